"""Layouts of `optpipe plan LAYERS.json`: the table, its document, and what is printed meanwhile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.cli.console import LONG_S, stderr, stdout, table
from optpipe.units import bytes_text, change_text, share_text, time_text, times_text

if TYPE_CHECKING:
    from solver.layout.ranking import Judged, OnJudged
    from solver.limits import Limits

SHOWN = 24
"""Most rows of the table, and most reasons printed if no layout has a schedule; `--json` has all."""

SAME = 1e-9
"""Share by which a bound may be below a value that it proves: sums of decimal times differ by as much."""


def progress_printer(limits: Limits) -> OnJudged:
    """Return a callback that prints on stderr each layout better than all before it, and counts after long silence."""
    best_us, shown_s = float("inf"), limits.seconds
    rated: set[str] = set()
    solved: set[str] = set()

    def show(one: Judged) -> None:
        nonlocal best_us, shown_s
        (solved if one.solved else rated).add(one.candidate.name)
        if one.value_us < best_us:
            best_us = one.value_us
            stderr().print(f"{time_text(one.value_us):>10}  {one.candidate.name}")
        elif limits.seconds > shown_s + LONG_S:
            stderr().print(f"{limits.seconds:.0f} s: {len(rated)} cuts rated, {len(solved)} solved")
        else:
            return
        shown_s = limits.seconds

    return show


def layout_document(one: Judged) -> dict[str, Any]:
    """A layout as an entry of `layouts` in the JSON of `optpipe plan LAYERS.json`."""
    from optpipe.export.megatron_layout import layout_of_partition
    from optpipe.partition import stage_sizes
    from solver.layout.why import time_by_kind_us

    candidate, schedule = one.candidate, one.schedule
    layout, own = candidate.layout, candidate.profile
    return {
        "placement": candidate.placement,
        "cut": candidate.cut,
        "layers_of_stages": stage_sizes(own, layout) if layout else None,
        "devices_of_stages": list(layout.placement) if layout else None,
        "megatron_layout": layout_of_partition(layout, own) if layout else None,
        "vocabulary": candidate.vocabulary,
        "microbatch_size": candidate.batching.microbatch_size,
        "microbatches": candidate.batching.microbatches,
        "offload": candidate.offload,
        "slices": max(1, len(candidate.slices)),
        "slice_lengths": list(candidate.slices) or None,
        "value_us": one.value_us if one.value_us < float("inf") else None,
        "bound_us": one.bound_us if one.bound_us < float("inf") else None,
        "every_cut_bound_us": candidate.every_cut_us if candidate.every_cut_us < float("inf") else None,
        "sequences_per_s": one.sequences_per_s,
        "bubble": schedule.bubble if schedule else None,
        "peak_bytes": schedule.largest_peak_bytes if schedule else None,
        "host_peak_bytes": one.host_peak_bytes,
        "recomputed": one.recomputed,
        "method": schedule.method if schedule else None,
        "end": one.end,
        "why_not": one.why_not,
        "time_by_kind_us": time_by_kind_us(schedule) if schedule else None,
    }


def _best_and_named(judged: Sequence[Judged]) -> list[Judged]:
    """The best cut, the even one and a given one of each combination of the other choices, in the order given."""
    from solver.layout.given import GIVEN

    shown: dict[tuple[object, ...], Judged] = {}
    named = ("even", GIVEN)
    return [one for one in judged if shown.setdefault(one.candidate.choice, one) is one or one.candidate.cut in named]


def _rated_choices(judged: Sequence[Judged]) -> tuple[set[tuple[object, ...]], set[tuple[object, ...]]]:
    """All combinations of the choices other than the cut, and those of which a cut was rated."""
    rated = {one.candidate.choice for one in judged if one.rated}
    return {one.candidate.choice for one in judged}, rated


def first_of(judged: Sequence[Judged]) -> str:
    """Name for the first layout: the best, where a cut of every combination of choices was rated."""
    every, rated = _rated_choices(judged)
    return "best" if len(rated) == len(every) else "best of those rated"


def _what_is_known(judged: Sequence[Judged]) -> str:
    """Sentences on how much was rated and solved, and on what is proved of other cuts."""
    choices, rated = _rated_choices(judged)
    cuts, solved = sum(one.rated for one in judged), sum(one.solved for one in judged)
    best_us = judged[0].value_us
    ends = Counter(one.end for one in judged)
    counts = (
        f"rated {len(rated)} of {len(choices)} layouts with {cuts} cuts of them, solved {solved}; {ends['beaten']} are "
        f"beaten by their bounds, {ends['does_not_fit']} do not fit"
    )
    if len(rated) < len(choices):
        return f"{counts}: the time was over. Maybe a longer --time-limit, or fewer --placements."
    least_us_of: defaultdict[tuple[object, ...], float] = defaultdict(float)
    for one in judged:
        least_us_of[one.candidate.choice] = max(least_us_of[one.candidate.choice], one.candidate.every_cut_us)
    least_us = min(least_us_of.values())
    if least_us >= best_us * (1 - SAME):
        return f"{counts}; no cut of them has a shorter step"
    own_us = min(judged[0].bound_us, best_us)
    return f"{counts}; bound of this cut {time_text(own_us)}" + (
        f", of every cut {time_text(least_us)} ({change_text(least_us, best_us)})" if least_us > 0 else ""
    )


def _reason(one: Judged, best: Judged) -> str:
    """The time that an alternative with a value loses to the best, and to what."""
    from solver.layout.why import losses_text, time_by_kind_us

    change = one.why_not or change_text(one.value_us, best.value_us)
    if one.schedule is None or best.schedule is None or not best.value_us:
        return change
    mine, others = time_by_kind_us(one.schedule), time_by_kind_us(best.schedule)
    lost = losses_text({kind: mine[kind] - others[kind] for kind in mine}, best.value_us)
    return f"{change}: {lost}" if lost else change


def print_layouts(judged: Sequence[Judged], output: Path | None) -> None:
    """Print the table of layouts, what is proved of others, and how to run the best."""
    from optpipe.export.megatron_layout import layout_of_partition
    from optpipe.partition import stage_sizes
    from solver.layout.given import GIVEN

    sliced = ("slices",) if any(one.candidate.slices for one in judged) else ()
    choices = ("placement", "cut", "microbatch", *sliced, "offload")
    places = ("output layer",) if any(one.candidate.profile.spread for one in judged) else ()
    choices = (*choices, *places)
    again = ("recomputed",) if any(one.recomputed for one in judged) else ()
    rows = table(*choices, "step", "sequences / s", "bubble", "peak", "host", *again, "", left=(0, 1), wraps=True)
    best = judged[0]
    shown, first = _best_and_named(judged), first_of(judged)
    steps = times_text([one.value_us if one.value_us < float("inf") else None for one in shown[:SHOWN]])
    for one, step in zip(shown, steps, strict=False):
        candidate, schedule = one.candidate, one.schedule
        size = f"{candidate.batching.microbatches} x {candidate.batching.microbatch_size}"
        figures, reason = ["-"] * (5 + len(again)), one.why_not
        if one.value_us < float("inf"):
            rate = "-" if one.sequences_per_s is None else f"{one.sequences_per_s:,.2f}"
            figures[:2] = [step, rate]
            if schedule is not None:
                figures[2:4] = [share_text(schedule.bubble), bytes_text(schedule.largest_peak_bytes)]
                figures[4:] = [bytes_text(one.host_peak_bytes), *(f"{one.recomputed:,}" for _ in again)]
            if one is not best:
                reason = _reason(one, best)
        offload = "yes" if candidate.offload else "no"
        where = candidate.placement, candidate.cut, size, *(str(max(1, len(candidate.slices))) for _ in sliced)
        where = *where, offload, *(candidate.vocabulary for _ in places)
        rows.add_row(*where, *figures, first if one is best else reason)
    console = stdout()
    console.print(rows)
    if len(judged) > min(len(shown), SHOWN):
        console.print(f"and {len(judged) - min(len(shown), SHOWN)} more, none better; --json lists all")
    console.print(_what_is_known(judged))
    assert best.candidate.layout is not None
    sizes = stage_sizes(best.candidate.profile, best.candidate.layout)
    cut = ",".join(map(str, sizes))
    console.print(f"layers of each stage: {' '.join(map(str, sizes))} (optpipe train --cut {cut})")
    if best.candidate.profile.spread:
        console.print("the rows of the last layer are on all devices, which no trainer but optpipe train runs")
    if megatron := layout_of_partition(best.candidate.layout, best.candidate.profile):
        console.print(f"for Megatron-LM: --pipeline-model-parallel-layout '{megatron}'")
    given = min((one for one in judged if one.candidate.cut == GIVEN), key=lambda one: one.value_us, default=None)
    if given is not None:
        change = f"the {first}"
        if given is not best:
            change = f"{change_text(given.value_us, best.value_us)} against {change}"
        bound = f"; at least {time_text(given.bound_us)} by any schedule" if given.bound_us else ""
        console.print(
            f"--layout takes {time_text(given.value_us)} by {given.schedule.method}, {change}{bound}"
            if given.schedule
            else f"--layout has no schedule: {given.why_not}"
        )
    if best.candidate.slices:
        console.print(f"tokens of each slice: {' '.join(f'{length:,}' for length in best.candidate.slices)}")
    if output:
        console.print(f"wrote {output}")
