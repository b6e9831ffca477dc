"""`optpipe plan MODEL --gpus N`: how a job is spread over GPUs, with an end for every strategy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.cli.console import (
    check_picture,
    compile_within,
    ctrl_c_cancels,
    doing_long,
    print_json,
    stderr,
    stdout,
    table,
)
from optpipe.cli.plan_why import print_losses
from optpipe.errors import InputError, Issue, shown
from optpipe.files import check_writable, make_folder, write_atomically
from optpipe.units import budget_text, bytes_text, change_text, share_text, time_text, times_text

if TYPE_CHECKING:
    from rich.table import Table

    from optpipe.cluster.strategy import Strategy
    from solver.layout.cluster_plan import Plan
    from solver.layout.strategies import Rated, Rater

DEFAULT_SEQUENCE = 4096
"""Tokens of a sequence where none are asked for, or fewer where the model learns fewer positions."""
SHOWN, FIRST = 12, 5
"""Most strategies in the table at the end, and in the first one."""
TIGHT_SHARE = 0.05
"""Share of a GPU's memory; where less is left, the plan names the option that leaves more."""
MOST_RATED = 50
"""Most beaten strategies that are rated to say what one of them loses."""


@dataclass(frozen=True)
class Question:
    """Question of a user."""

    model: str
    gpus: int
    machine: str
    sequence: int | None
    global_batch: int
    software: str
    fixed: Mapping[str, str | None]
    expert_imbalance: float | None
    memory_margin: float
    objective: str | None
    why: str | None
    plot: Path | None


def plan_model(question: Question, time_limit: float, workers: int | None, output: Path | None, as_json: bool) -> int:
    """Plan a job and print or write the plan."""
    from optpipe.cluster.machine import Machine
    from optpipe.cluster.model import load_model
    from optpipe.cluster.software import require_software
    from solver.layout.cluster_plan import plan_cluster
    from solver.layout.fitting import Job
    from solver.layout.strategies import read_degrees
    from solver.limits import Limits, available_cores

    fixed = {name: _values(name, text) for name, text in question.fixed.items() if text is not None}
    if question.expert_imbalance is not None:
        fixed["expert_imbalance"] = [question.expert_imbalance]
    if question.objective not in (None, "time", "memory"):
        detail = f"is {shown(question.objective)} but must be time or memory with --gpus. Maybe leave it out."
        raise InputError([Issue("--objective", "unknown", detail)])
    wanted = None if question.why is None else read_degrees(question.why, "--why")
    for name, value in (wanted or {}).items():
        if name in fixed and value not in fixed[name]:
            detail = f"asks for {name} {value}, but --{name.replace('_', '-')} allows {question.fixed[name]} alone."
            raise InputError([Issue("--why", "not_allowed", f"{detail} Maybe leave one of them out.")])
    if question.plot is not None:
        check_picture(question.plot)
    if output is not None:
        make_folder(output)
        _check_folder(output)
    machine = Machine.load(question.machine).with_margin(question.memory_margin)
    model = load_model(question.model)
    job = Job(
        model,
        machine,
        question.sequence or min(DEFAULT_SEQUENCE, model.positions or DEFAULT_SEQUENCE),
        question.global_batch,
        require_software(question.software, machine.measured_software, "--software"),
        question.software,
    )
    if question.expert_imbalance is not None and not any(layer.feed_forward.experts for layer in job.model.layers):
        detail = f"has no meaning here: {job.model.name} has no experts. Maybe leave it out."
        raise InputError([Issue("--expert-imbalance", "meaningless", detail)])
    limits = Limits(time_limit, workers=workers or available_cores())

    def say(plan: Plan) -> None:
        if not plan.complete:
            return
        if output is not None:  # whatever ends the process later, this much is there
            _write(plan, plan.document(), output)
        first = plan.ratings[0]
        if not plan.solved and not as_json:
            stderr().print(plan_table(plan, FIRST))
        what = "fastest" if plan.objective == "time" else "least memory with"
        fastest = f"{what} {first.name}: {time_text(1e6 * first.seconds)}" if first.end == "solved" else "none fits"
        stderr().print(f"{len(plan.ratings):,} strategies rated; {fastest}")

    what = f"planning {job.model.name} on {question.gpus:,} GPUs for up to {time_limit:g} s"
    with doing_long(what), ctrl_c_cancels(limits.cancel):
        plan = plan_cluster(
            job,
            question.gpus,
            fixed,
            limits,
            say,
            lambda: compile_within(limits),
            objective="memory" if question.objective == "memory" else "time",
        )
    document = plan.document()
    if output is not None and not plan.complete:
        _write(plan, document, output)
    if question.plot is not None:
        _draw(document, question.plot)
    if as_json:
        print_json(document | {"output": str(output) if output else None} | _why_entry(plan, wanted))
    elif wanted is not None:
        _print_why(plan, wanted)
    else:
        _print(plan, output, question.memory_margin)
    if limits.cancel.requested:
        return 130
    return 0 if plan.ratings[0].end == "solved" else 4


def _values(name: str, text: str) -> list[Any]:
    """Values of an option such as ``2,4,8``. Raises InputError."""
    from solver.layout.strategies import MOST_DIGITS, check_values

    parts = [part.strip() for part in text.split(",")]
    values = [int(part) if part.isdecimal() and len(part) <= MOST_DIGITS else part for part in parts]
    check_values(name, values, "--" + name.replace("_", "-"))
    return values


def _matches(strategy: Strategy, wanted: Mapping[str, Any]) -> bool:
    from solver.layout.strategies import values_of

    return values_of(strategy).items() >= wanted.items()


def _check_folder(folder: Path) -> None:
    """Refuse a folder that has files with the names of a plan's, but no plan: they are not to be replaced."""
    from solver.layout.cluster_plan import PLAN_FILES, PLAN_FORMAT

    for name in PLAN_FILES:
        check_writable(folder / name)
    found = [name for name in PLAN_FILES if (folder / name).is_file()]
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / "plan.json").read_text()).get("format") == PLAN_FORMAT:
            return
    if found:
        detail = f"is {folder}, where {found[0]} is of no earlier plan. Maybe name another folder."
        raise InputError([Issue("--output", "not_a_plan", detail)])


def _write(plan: Plan, document: dict[str, Any], folder: Path) -> None:
    """Write the files of a plan; those that an earlier plan left there, and this one has not, go."""
    from optpipe.schedule import schedule_text
    from solver.layout.cluster_plan import PLAN_FILES

    texts = {"plan.json": json.dumps(document, indent=1, allow_nan=False) + "\n"}
    texts |= {plan.schedule_file(n): schedule_text(one.schedule) for n, one in enumerate(plan.solved)}
    if (best := plan.best_solved) is not None:
        texts["layers.json"] = best.layers.to_json()
    for name in PLAN_FILES:
        if name in texts:
            write_atomically(folder / name, texts[name])
        else:
            (folder / name).unlink(missing_ok=True)


def _draw(document: Mapping[str, Any], path: Path) -> None:
    from optpipe.plot import draw_plan

    if document["best"] is None:
        stderr().print(f"{path} is not drawn: nothing fits.")
    else:
        draw_plan(document, path)


def _print(plan: Plan, output: Path | None, memory_margin: float) -> None:
    console = stdout()
    console.print(plan_table(plan, SHOWN))
    which = "legal strategies" if plan.complete else "strategies, before it was cancelled"
    ends = {end: sum(one.end == end for one in plan.ratings) for end in ("solved", "beaten", "does_not_fit")}
    console.print(
        f"{len(plan.ratings):,} {which}: {ends['solved']:,} have a schedule, {ends['beaten']:,} are beaten by "
        f"their bounds, {ends['does_not_fit']:,} do not fit"
    )
    best = plan.best
    if best.end != "solved":
        least = min(plan.ratings, key=lambda one: one.memory_bytes)
        console.print(f"nothing fits: the least that is needed is {least.reason}, with {least.name}. Maybe more GPUs.")
        return
    bound_s = min(one.bound_s for one in plan.ratings)
    step = f"take {best.name}: {time_text(1e6 * best.seconds)} a step"
    if plan.objective == "memory":
        fastest_s = min(one.seconds for one in plan.ratings)
        console.print(
            f"{step}, {change_text(best.seconds, fastest_s)} to the fastest; {bytes_text(best.memory_bytes)} on its "
            "fullest rank are the least of all strategies with a published schedule"
        )
    else:
        console.print(f"{step}; no strategy takes less than {time_text(1e6 * bound_s)} by this cost model")
        console.print(_memory_left(plan, memory_margin))
    if not plan.error:
        console.print(f"nothing was measured on {plan.job.machine.name}: these are guesses from other machines")
    elif plan.ties > 1 and plan.objective == "time":
        console.print(
            f"half of the published steps on {plan.job.machine.name} are predicted within {share_text(plan.error)}: "
            f"{plan.ties:,} strategies tie with the fastest, and this is the simplest of them"
        )
    for sentence in (*_of_vocabulary(plan), *plan.job.model.assumptions):
        console.print(sentence)
    if output is not None:
        files = [*map(plan.schedule_file, range(len(plan.solved))), *(["layers.json"] if plan.best_solved else [])]
        console.print(", ".join([f"wrote {output}/plan.json", *sorted(files, key=len)]))


def _memory_left(plan: Plan, margin: float) -> str:
    """A sentence on the memory that the strategy to take leaves."""
    memory_bytes = plan.job.machine.facts.memory_bytes
    text = f"its fullest rank takes {budget_text(plan.best.memory_bytes, memory_bytes)}"
    if not margin and memory_bytes - plan.best.memory_bytes < TIGHT_SHARE * memory_bytes:
        text += "; --memory-margin 10% leaves more"
    return text


def _of_vocabulary(plan: Plan) -> Iterator[str]:
    """Sentences on an output layer whose rows are on all devices, or would make a step faster there."""
    if plan.best.strategy.vocabulary == "spread":
        yield "no trainer but optpipe train runs the passes of an output layer with its rows on all devices"
    layer = plan.output_layer
    if layer is None or not layer.may_be_spread:
        return
    text = (
        f"the output layer takes as long as {layer.layers:.1f} layers, and with pp={plan.best.strategy.pipeline} a cut "
        f"evens out {layer.most_layers:.1f} at most"
    )
    rated = layer.rated.get("spread")
    if plan.best.strategy.vocabulary != "spread" and rated is not None and rated.seconds < inf:
        seconds, by = rated.seconds, "the published schedule"
        if plan.spread is not None and plan.spread.seconds < seconds:
            seconds, by = plan.spread.seconds, "a schedule that was searched"
        text += (
            f": with its rows on all devices (--vocabulary spread) a step takes {time_text(1e6 * seconds)} by {by} "
            f"({change_text(seconds, plan.best.seconds)})"
        )
    yield text


def plan_table(plan: Plan, most: int) -> Table:
    """The fastest strategies, and the one to take."""
    rows = table("strategy", "step", "tokens/s/GPU", "MFU", "memory", "lost to", "schedule")
    rows.columns[-2].justify = rows.columns[-1].justify = "left"
    fastest = [one for one in plan.ratings[:most] if one.end == "solved"]
    if plan.best.end == "solved" and plan.best not in fastest:
        fastest.append(plan.best)
    for one, step in zip(fastest, times_text([1e6 * one.seconds for one in fastest]), strict=True):
        rows.add_row(
            ("* " if one == plan.best else "  ") + one.name,
            step,
            f"{plan.tokens_per_s(one.seconds):,.0f}",
            share_text(plan.utilization(one.seconds)),
            bytes_text(one.memory_bytes),
            _lost(plan, one),
            one.reason,
        )
    return rows


def _lost(plan: Plan, one: Rated) -> str:
    """The largest losses of a strategy."""
    from solver.layout.strategies import Rater
    from solver.layout.why import losses_text

    return losses_text(Rater(plan.job, plan.fixed).lost_s(one), one.seconds)


def _asked(plan: Plan, rater: Rater, wanted: Mapping[str, Any]) -> Rated | None:
    """The fastest strategy with these degrees, rated even if its bound had beaten it; None if none is legal.

    Where none fits it is the one that needs least memory.
    """
    found = [one for one in plan.ratings if _matches(one.strategy, wanted)]
    if not found:
        return None
    promising = sorted(found, key=lambda one: one.bound_s)[:MOST_RATED]
    rated = [rater.rate(one.strategy, one.bound_s) if one.end == "beaten" else one for one in (found[0], *promising)]
    return min(rated, key=lambda one: (one.seconds, one.memory_bytes))


def _why_entry(plan: Plan, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    """Entry `why` of the JSON, as those of `strategies`; null if no strategy that --why asks for is legal."""
    from solver.layout.cluster_plan import strategy_entry
    from solver.layout.strategies import Rater

    if wanted is None:
        return {}
    rater = Rater(plan.job, plan.fixed)
    if (one := _asked(plan, rater, wanted)) is None:
        return {"why": None}
    losses = {"lost_s": rater.lost_s(one), "hidden_s": rater.hidden_s(one)} if one.end == "solved" else {}
    return {"why": strategy_entry(one) | losses}


def _print_why(plan: Plan, wanted: Mapping[str, Any]) -> None:
    from solver.layout.strategies import Rater

    console, best, rater = stdout(), plan.best, Rater(plan.job, plan.fixed)
    one = _asked(plan, rater, wanted)
    what = ", ".join(f"{name} {value}" for name, value in wanted.items())
    if one is None:
        console.print(f"no legal strategy has {what}. Maybe `optpipe fits` says which rule it breaks.")
        return
    if one.end != "solved":
        console.print(f"the best with {what} is {one.name}: {one.end.replace('_', ' ')}, {one.reason}")
        return
    mine, others = ({kind: 1e6 * lost_s for kind, lost_s in rater.lost_s(rated).items()} for rated in (one, best))
    print_losses("lost to", (one.name, mine), (best.name, others))
    for rating in (one, best):
        if hidden_s := rater.hidden_s(rating):
            console.print(f"{rating.name} hides {time_text(1e6 * hidden_s)} of exchanges of experts in blocks")
    change = change_text(one.seconds, best.seconds)
    console.print(
        f"{one.name} takes {time_text(1e6 * one.seconds)}, {best.name} {time_text(1e6 * best.seconds)}: {change}"
    )
