"""Every method by name, with what it is and what it can handle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from optpipe.errors import InputError, Issue, MethodError
from optpipe.fields import MAX_BYTES
from optpipe.ops import Orders
from optpipe.problem import Problem
from solver.build import over_budget
from solver.microbatch_orders import refuse_without_cycle
from solver.published.ada_offload import ada_offload
from solver.published.interleaved import interleaved_1f1b
from solver.published.one_stage import gpipe, one_f_one_b, zb_h1, zb_h2
from solver.published.passes import general_methods
from solver.published.pipe_offload import gis, gis_h, po_f, po_h
from solver.published.recompute import one_f_one_b_recompute, one_f_one_b_recompute_ahead
from solver.published.seq1f1b import seq1f1b, slimpipe
from solver.published.v_family import v_half, v_min, v_zb
from solver.published.zb_auto import zb_auto
from solver.published.zb_v import zb_v
from solver.scale import refuse_beyond_milp, refuse_too_many_costs
from solver.searches import SEARCHES, Search


@dataclass(frozen=True)
class Method:
    """A method: a published schedule (`orders`), a search from a start (`search`), or the portfolio of them all.

    `refuse` raises MethodError for problems that the method cannot handle whatever the start, before there is one
    (`refuse_unsupported` calls it).
    `modes`: it decides on activation modes. `unsplit`: it is right where stages cannot split their backwards.
    `factors`: it is right where microbatches or slices have costs of their own, `slices`: where microbatches are cut
    into slices, `free_order`: where the order of microbatches is free (to keep the given one is right as well).
    """

    name: str
    kind: Literal["published", "exact", "search", "portfolio"]
    summary: str
    handles: str
    orders: Callable[[Problem], Orders] | None = None
    search: Search | None = None
    refuse: Callable[[Problem], None] = lambda _: None
    modes: bool = False
    unsplit: bool = False
    factors: bool = False
    slices: bool = False
    free_order: bool = False

    @property
    def handles_modes(self) -> bool:
        """True if its schedules and bounds are right where stages have modes; published schedules use none of them."""
        return self.modes or self.kind == "published"


_ONE_STAGE = "one stage a device, no offload"
_RECOMPUTE = "one stage a device, activation modes that recompute"
_CHUNKS = "stage s on device s mod p, two or more a device, no offload"
_CHUNKS_OFFLOAD = "stage s on device s mod p, two or more a device, offload, budgets"
_V = "two stages a device along a V, no offload"
_HIGHS = "mixed-integer program, HiGHS, proves optimality"
_ANY = "any placement, offload, budgets, shared channels"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "auto",
            "portfolio",
            "the best of all methods: published schedules, then every search",
            f"{_ANY}, modes, slices, free order",
            modes=True,
            unsplit=True,
            factors=True,
            slices=True,
            free_order=True,
        ),
        Method(
            "cp-sat",
            "exact",
            "interval model, OR-Tools CP-SAT, proves optimality",
            f"{_ANY}, modes, slices, free order",
            search=SEARCHES["cp-sat"],
            modes=True,
            unsplit=True,
            factors=True,
            slices=True,
            free_order=True,
        ),
        Method(
            "milp",
            "exact",
            _HIGHS,
            f"{_ANY}, modes, slices, free order",
            search=SEARCHES["milp"],
            refuse=refuse_beyond_milp,
            modes=True,
            unsplit=True,
            factors=True,
            slices=True,
            free_order=True,
        ),
        Method(
            "search",
            "search",
            "simulated annealing over orders, offloads, activation modes and waits",
            f"{_ANY}, modes, slices, free order",
            search=SEARCHES["search"],
            refuse=refuse_too_many_costs,
            modes=True,
            unsplit=True,
            factors=True,
            slices=True,
            free_order=True,
        ),
        Method(
            "pattern",
            "search",
            "one block of a microbatch, repeated every period",
            f"{_ANY}, modes or slices, free order",
            search=SEARCHES["pattern"],
            refuse=refuse_without_cycle,
            modes=True,
            factors=True,
            slices=True,
            free_order=True,
        ),
        Method(
            "gpipe",
            "published",
            "all forwards, then all backwards",
            f"{_ONE_STAGE}, slices",
            orders=gpipe,
            unsplit=True,
            slices=True,
            factors=True,
            free_order=True,
        ),
        Method(
            "1f1b",
            "published",
            "one forward, one backward, B and W fused",
            _ONE_STAGE,
            orders=one_f_one_b,
            unsplit=True,
            factors=True,
            free_order=True,
        ),
        Method(
            "interleaved-1f1b",
            "published",
            "1F1B over the chunks of a device",
            _CHUNKS,
            orders=interleaved_1f1b,
            unsplit=True,
            factors=True,
            free_order=True,
        ),
        Method(
            "seq1f1b",
            "published",
            "1F1B over slices of sequences",
            "one stage a device or interleaved, slices, no offload",
            orders=seq1f1b,
            unsplit=True,
            factors=True,
            slices=True,
            free_order=True,
        ),
        Method(
            "slimpipe",
            "published",
            "1F1B over slices, further ahead",
            "one stage a device or interleaved, slices, no offload",
            orders=slimpipe,
            unsplit=True,
            factors=True,
            slices=True,
            free_order=True,
        ),
        Method(
            "1f1b-recompute",
            "published",
            "1F1B, every microbatch recomputed after its gradient has come",
            _RECOMPUTE,
            orders=one_f_one_b_recompute,
            unsplit=True,
            factors=True,
            free_order=True,
        ),
        Method(
            "1f1b-recompute-ahead",
            "published",
            "1F1B, every microbatch recomputed before its gradient comes",
            _RECOMPUTE,
            orders=one_f_one_b_recompute_ahead,
            unsplit=True,
            factors=True,
            free_order=True,
        ),
        Method(
            "zb-h1",
            "published",
            "Zero Bubble, handcrafted, memory of 1F1B",
            _ONE_STAGE,
            orders=zb_h1,
            factors=True,
            free_order=True,
        ),
        Method(
            "zb-h2",
            "published",
            "Zero Bubble, handcrafted, 2p - 1 microbatches",
            _ONE_STAGE,
            orders=zb_h2,
            factors=True,
            free_order=True,
        ),
        Method("zb-auto", "published", "Zero Bubble, heuristic within each budget", _ONE_STAGE, orders=zb_auto),
        Method("zb-v", "published", "Zero Bubble on a V, heuristic within each budget", _V, orders=zb_v),
        Method("v-min", "published", "controllable memory, (p + 4) // 3 microbatches", _V, orders=v_min),
        Method("v-half", "published", "controllable memory, (p + 2) // 2 microbatches", _V, orders=v_half),
        Method("v-zb", "published", "controllable memory, p microbatches", _V, orders=v_zb),
        Method(
            "gis",
            "published",
            "PipeOffload's interleaved 1F1B, B and W apart",
            _CHUNKS,
            orders=gis,
            factors=True,
            free_order=True,
        ),
        Method(
            "gis-h",
            "published",
            "GIS in smaller groups, best within each budget",
            _CHUNKS,
            orders=gis_h,
            factors=True,
            free_order=True,
        ),
        Method("po-h", "published", "PipeOffload, the longer-lived half leaves", _CHUNKS_OFFLOAD, orders=po_h),
        Method("po-f", "published", "PipeOffload, all that can leave does", _CHUNKS_OFFLOAD, orders=po_f),
        Method(
            "ada-offload",
            "published",
            "OptPipe's start, offloads or recomputes to keep each budget",
            f"{_ANY}, modes by stage",
            orders=ada_offload,
            factors=True,
            free_order=True,
        ),
    )
}


def method_named(name: str, field: str = "method") -> Method:
    """The method of that name. Raises InputError that names the field and lists the methods."""
    if name not in METHODS:
        close = get_close_matches(str(name).lower(), METHODS, 1)
        detail = f"is {name!r}; the methods are {', '.join(METHODS)}." + "".join(f" Maybe {one}." for one in close)
        raise InputError([Issue(field, "unknown_method", detail)])
    return METHODS[name]


def refuse_unsupported(method: Method, problem: Problem) -> None:
    """Raise MethodError where the problem has something that the method is not made for.

    That may be activation modes, backwards in one piece, slices, costs of units, a free order of microbatches, or what
    the method's own `refuse` names, such as a combination of these. It takes no longer than reading the problem. A
    published schedule may still be refused for placement or a budget when it is made (`published_orders`).
    """
    modes = [s for s, stage in enumerate(problem.stages) if stage.modes]
    unsplit = [s for s, stage in enumerate(problem.stages) if not stage.split_backward]
    if modes and not method.handles_modes:
        able = ", ".join(name for name, other in METHODS.items() if other.handles_modes)
        raise MethodError(f"{method.name} cannot decide on stages[{modes[0]}].modes. Maybe use one of {able}.")
    if unsplit and not method.unsplit:
        able = ", ".join(name for name, other in METHODS.items() if other.unsplit)
        field = f"stages[{unsplit[0]}].split_backward"
        raise MethodError(f"{method.name} splits backwards, but {field} is false. Maybe use one of {able}.")
    needs = {
        "slices": (problem.slice_count > 1, f"runs microbatches whole, but slices.count is {problem.slice_count}"),
        "factors": (problem.has_factors, "takes all microbatches to be alike, but some have costs of their own"),
        "free_order": (problem.has_free_order, "keeps the order of the microbatches, but microbatch_order is 'free'"),
    }
    for ability, (needed, text) in needs.items():
        if needed and not getattr(method, ability):
            able = ", ".join(name for name, other in METHODS.items() if getattr(other, ability))
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
            f"{method.name} needs {peak} bytes on device {device}, but {limit} {budget}: {peak - budget} too few"
            + (f" (the worst of {len(over)} devices)." if len(over) > 1 else ".")
            + f" Maybe use {general_methods(problem)}, which can offload to keep it."
        )
    return orders
