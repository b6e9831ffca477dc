"""Every method by name, with what it is and what it can handle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Literal

from optpipe.errors import InputError, Issue, MethodError, shown
from optpipe.fields import MAX_BYTES
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.units import bytes_text
from solver.build import over_budget
from solver.microbatch_orders import refuse_without_cycle
from solver.published import (
    CONTROLLABLE_MEMORY,
    DUALPIPE,
    GPIPE,
    MARIO,
    MEGATRON,
    OPTPIPE,
    PIPE_OFFLOAD,
    PIPEDREAM_FLUSH,
    RECOMPUTATION,
    SEQ1F1B,
    SLIMPIPE,
    VOCABULARY,
    ZERO_BUBBLE,
    Paper,
)
from solver.published.ada_offload import ada_offload
from solver.published.custom import OrderFunction, custom_orders, load_function
from solver.published.dualpipe_v import dualpipe_v
from solver.published.interleaved import interleaved_1f1b
from solver.published.one_stage import gpipe, one_f_one_b, zb_h1, zb_h2
from solver.published.passes import general_methods
from solver.published.pipe_offload import gis, gis_h, po_f, po_h
from solver.published.recompute import one_f_one_b_recompute, one_f_one_b_recompute_ahead
from solver.published.seq1f1b import seq1f1b, slimpipe
from solver.published.v_family import v_half, v_min, v_zb
from solver.published.vocab import vocab_1, vocab_2
from solver.published.zb_auto import zb_auto
from solver.published.zb_v import zb_v
from solver.scale import refuse_beyond_milp, refuse_too_many_costs
from solver.searches import SEARCHES, Search

Feature = Literal["backwards in one piece", "costs of units", "slices", "free order", "spread passes"]
"""Features of problems that not every method is made for; `refuse_unsupported` tells which problem has it."""

UNEQUAL: frozenset[Feature] = frozenset({"costs of units", "free order"})
WHOLE_BACKWARDS: frozenset[Feature] = UNEQUAL | {"backwards in one piece"}
WHOLE_MODELS: frozenset[Feature] = WHOLE_BACKWARDS | {"slices"}
EVERYTHING: frozenset[Feature] = WHOLE_MODELS | {"spread passes"}


@dataclass(frozen=True)
class Method:
    """A method: a published or registered schedule (`orders`), a search from a start (`search`), or the portfolio.

    `takes`: the features of a problem with which its schedules and bounds are right; to keep the given order of
    microbatches is right where it is free. `refuse` raises MethodError for problems that the method cannot handle
    whatever the start, before there is one (`refuse_unsupported` calls it). `paper`: the source of a published one.
    """

    name: str
    kind: Literal["published", "exact", "search", "portfolio", "custom"]
    summary: str
    handles: str
    takes: frozenset[Feature] = frozenset()
    orders: Callable[[Problem], Orders] | None = None
    search: Search | None = None
    refuse: Callable[[Problem], None] = lambda _: None
    paper: Paper | None = None


def _published(
    name: str,
    orders: Callable[[Problem], Orders],
    paper: Paper,
    summary: str,
    handles: str,
    takes: frozenset[Feature] = frozenset(),
) -> Method:
    return Method(name, "published", summary, handles, takes, orders, paper=paper)


_ONE_STAGE = "one stage a device, no offload"
_RECOMPUTE = "one stage a device, activation modes that recompute"
_CHUNKS = "stage s on device s mod p, two or more a device, no offload"
_CHUNKS_OFFLOAD = "stage s on device s mod p, two or more a device, offload, budgets"
_V = "two stages a device along a V, no offload"
_SLICED = "one stage a device or interleaved, slices, no offload"
_ANY = "any placement, offload, budgets, shared channels"
_ALL = f"{_ANY}, modes, slices, free order"
_SEARCH = "simulated annealing over orders, offloads, activation modes and waits"
_PATTERN = "one block of a microbatch, repeated every period"
_TWO_PASSES = "one stage a device, two spread passes, no offload"
_SPREAD: frozenset[Feature] = WHOLE_BACKWARDS | {"spread passes"}
_SPLIT: frozenset[Feature] = UNEQUAL | {"slices"}
_AFTER = "1F1B, every microbatch recomputed after its gradient has come"
_AHEAD = "1F1B, every microbatch recomputed before its gradient comes"
ADA_OFFLOAD = "ada-offload"
"""Method of list schedules in memory."""
_ADA_OFFLOAD = "OptPipe's start, offloads or recomputes to keep each budget"
_BEST = "the best of all methods: published schedules, then every search"

_METHODS = (
    Method("auto", "portfolio", _BEST, _ALL, EVERYTHING),
    Method(
        "cp-sat",
        "exact",
        "interval model, OR-Tools CP-SAT, proves optimality",
        _ALL,
        EVERYTHING,
        search=SEARCHES["cp-sat"],
    ),
    Method(
        "milp",
        "exact",
        "mixed-integer program, HiGHS, proves optimality",
        _ALL,
        WHOLE_MODELS,
        search=SEARCHES["milp"],
        refuse=refuse_beyond_milp,
    ),
    Method("search", "search", _SEARCH, _ALL, EVERYTHING, search=SEARCHES["search"], refuse=refuse_too_many_costs),
    Method(
        "pattern",
        "search",
        _PATTERN,
        f"{_ANY}, modes or slices, free order",
        _SPLIT,
        search=SEARCHES["pattern"],
        refuse=refuse_without_cycle,
    ),
    _published("gpipe", gpipe, GPIPE, "all forwards, then all backwards", f"{_ONE_STAGE}, slices", WHOLE_MODELS),
    _published(
        "1f1b", one_f_one_b, PIPEDREAM_FLUSH, "one forward, one backward, B and W fused", _ONE_STAGE, WHOLE_BACKWARDS
    ),
    _published(
        "interleaved-1f1b", interleaved_1f1b, MEGATRON, "1F1B over the chunks of a device", _CHUNKS, WHOLE_BACKWARDS
    ),
    _published("seq1f1b", seq1f1b, SEQ1F1B, "1F1B over slices of sequences", _SLICED, WHOLE_MODELS),
    _published("slimpipe", slimpipe, SLIMPIPE, "1F1B over slices, further ahead", _SLICED, WHOLE_MODELS),
    _published("1f1b-recompute", one_f_one_b_recompute, RECOMPUTATION, _AFTER, _RECOMPUTE, WHOLE_BACKWARDS),
    _published("1f1b-recompute-ahead", one_f_one_b_recompute_ahead, MARIO, _AHEAD, _RECOMPUTE, WHOLE_BACKWARDS),
    _published("zb-h1", zb_h1, ZERO_BUBBLE, "Zero Bubble, handcrafted, memory of 1F1B", _ONE_STAGE, UNEQUAL),
    _published("zb-h2", zb_h2, ZERO_BUBBLE, "Zero Bubble, handcrafted, 2p - 1 microbatches", _ONE_STAGE, UNEQUAL),
    _published("zb-auto", zb_auto, ZERO_BUBBLE, "Zero Bubble, heuristic within each budget", _ONE_STAGE),
    _published("zb-v", zb_v, ZERO_BUBBLE, "Zero Bubble on a V, heuristic within each budget", _V),
    _published("v-min", v_min, CONTROLLABLE_MEMORY, "controllable memory, (p + 4) // 3 microbatches", _V),
    _published("v-half", v_half, CONTROLLABLE_MEMORY, "controllable memory, (p + 2) // 2 microbatches", _V),
    _published("v-zb", v_zb, CONTROLLABLE_MEMORY, "controllable memory, p microbatches", _V),
    _published("gis", gis, PIPE_OFFLOAD, "PipeOffload's interleaved 1F1B, B and W apart", _CHUNKS, UNEQUAL),
    _published("gis-h", gis_h, PIPE_OFFLOAD, "GIS in smaller groups, best within each budget", _CHUNKS, UNEQUAL),
    _published("po-h", po_h, PIPE_OFFLOAD, "PipeOffload, the longer-lived half leaves", _CHUNKS_OFFLOAD),
    _published("po-f", po_f, PIPE_OFFLOAD, "PipeOffload, all that can leave does", _CHUNKS_OFFLOAD),
    _published(
        "dualpipe-v", dualpipe_v, DUALPIPE, "blocks of a forward and a backward, 2p + 1 chunks", _V, WHOLE_BACKWARDS
    ),
    _published("vocab-1", vocab_1, VOCABULARY, "1F1B with a spread vocabulary, two barriers", _TWO_PASSES, _SPREAD),
    _published("vocab-2", vocab_2, VOCABULARY, "1F1B with a spread vocabulary, one barrier", _TWO_PASSES, _SPREAD),
    _published(ADA_OFFLOAD, ada_offload, OPTPIPE, _ADA_OFFLOAD, f"{_ANY}, modes by stage", UNEQUAL),
)
METHODS: dict[str, Method] = {method.name: method for method in _METHODS}
CUSTOM: dict[str, Method] = {}
"""Methods of `register`, apart from the built-in ones: a service offers those alone."""


def register(name: str, function: OrderFunction) -> Method:
    """Make a function a method of this process, under a name that no built-in method has.

    The function takes a Problem and returns Orders, or for each device its compute ops in order: text such as
    ``"F0.0 F0.1 B0.0 W0.0"``, or a list of such names. What it returns is checked and verified like every schedule.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or name in METHODS:
        detail = f"is {shown(name)}, but must be 1 to {MAX_NAME} characters and no built-in method. Maybe 'mine'."
        raise InputError([Issue("name", "bad_name", detail)])
    summary = ((function.__doc__ or "").strip().splitlines() or ["a function of yours"])[0].rstrip(".")
    CUSTOM[name] = Method(name, "custom", summary, _ALL, EVERYTHING, partial(custom_orders, name, function))
    return CUSTOM[name]


MAX_NAME = 100
"""Most characters of a name: a schedule's `method` has no more."""


def register_file(text: str, field: str) -> Method:
    """Register a function of a Python file, given as ``mine.py:order``, which runs the file.

    Raises InputError that names `field` where there is no such file or function, or the file itself fails.
    """
    function = load_function(text, field)
    return register(text[-MAX_NAME:], function)


def method_named(name: str, field: str = "method") -> Method:
    """The method of that name, built in or registered. Raises InputError that names the field and lists the methods."""
    if name in CUSTOM:
        return CUSTOM[name]
    if name not in METHODS:
        close = get_close_matches(str(name).lower(), METHODS, 1)
        if str(name).endswith(".py"):
            close = [f"{name}:FUNCTION, for a function of that file"]
        detail = f"is {name!r}; the methods are {', '.join(METHODS)}." + "".join(f" Maybe {one}." for one in close)
        raise InputError([Issue(field, "unknown_method", detail)])
    return METHODS[name]


def refuse_unsupported(method: Method, problem: Problem) -> None:
    """Raise MethodError where the problem has something that the method is not made for.

    That is one of `Feature`, or what the method's own `refuse` names, such as a combination of these. Every method is
    right where stages have activation modes; published schedules use none. It takes no longer than reading the problem.
    A published schedule may still be refused for placement or a budget when it is made (`published_orders`).
    """
    unsplit = [s for s, stage in enumerate(problem.stages) if not stage.split_backward]
    needs: dict[Feature, tuple[bool, str]] = {
        "backwards in one piece": (
            bool(unsplit),
            f"splits backwards, but stages[{next(iter(unsplit), 0)}].split_backward is false",
        ),
        "slices": (problem.slice_count > 1, f"runs microbatches whole, but slices.count is {problem.slice_count}"),
        "costs of units": (
            problem.has_factors,
            "takes all microbatches to be alike, but some have costs of their own",
        ),
        "spread passes": (
            bool(problem.spread or problem.gates),
            f"knows no spread passes, but the problem has {', '.join(problem.pass_names) or 'gates'}",
        ),
        "free order": (problem.has_free_order, "keeps the order of the microbatches, but microbatch_order is 'free'"),
    }
    for feature, (needed, text) in needs.items():
        if needed and feature not in method.takes:
            able = ", ".join(name for name, other in METHODS.items() if feature in other.takes)
            raise MethodError(f"{method.name} {text}. Maybe use one of {able}.")
    method.refuse(problem)


def published_orders(method: Method, problem: Problem) -> Orders:
    """The orders of a published schedule. Raises MethodError where placement or a budget forbids it, with numbers."""
    assert method.orders is not None
    refuse_unsupported(method, problem)
    orders = method.orders(problem)
    over = over_budget(problem, orders)
    if over:
        device, peak, budget = max(over, key=lambda entry: entry[1] - entry[2])
        limit = "its budget is" if budget < MAX_BYTES else "a schedule states at most"
        raise MethodError(
            f"{method.name} needs {bytes_text(peak)} on device {device}, but {limit} {bytes_text(budget)}: "
            f"{bytes_text(peak - budget)} too few"
            + (f" (the worst of {len(over)} devices)." if len(over) > 1 else ".")
            + f" Maybe use {general_methods(problem)}, which can offload to keep it."
        )
    return orders
