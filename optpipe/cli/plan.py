"""`optpipe plan`: how to cut a model into stages, place and batch them, and the schedule of the best layout."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import (
    AsJson,
    compile_once,
    ctrl_c_cancels,
    doing,
    names_in,
    parse_share,
    parse_size,
    print_json,
    stderr,
    stdout,
    table,
)
from optpipe.cli.solve import TimeLimit
from optpipe.document import shown
from optpipe.errors import InputError, Issue, NoSolutionError
from optpipe.files import check_writable, write_atomically
from optpipe.units import share_text, us_text

if TYPE_CHECKING:
    from optpipe.layers import LayerProfile
    from optpipe.problem import Objective
    from solver.layout.candidates import Candidate, Search
    from solver.layout.ranking import Judged, OnJudged

SHOWN = 24
"""Rows of the table, and reasons why no layout has a schedule; `--json` has all."""

MOST_DIGITS = 7
"""Of a global batch, and of what divides it."""


class OffloadChoice(StrEnum):
    """Whether layouts may offload: both are tried, or one."""

    BOTH = "both"
    YES = "yes"
    NO = "no"


def command(
    layers: Annotated[Path, typer.Argument(help="A layer profile (optpipe.layers/1).", metavar="LAYERS.json")],
    devices: Annotated[int, typer.Option(min=1, max=4096, help="Devices of the pipeline.")],
    global_batch: Annotated[int, typer.Option(min=1, max=10**6, help="Sequences in one training step.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where the best schedule goes.")] = None,
    microbatch_sizes: Annotated[
        str | None, typer.Option(help="Sequences in a microbatch to try; default: 1, 2, 4, ...", metavar="1,2,4")
    ] = None,
    placements: Annotated[
        str | None, typer.Option(help="linear, interleaved-N, v, v-N; default: the usual.", metavar="a,b")
    ] = None,
    offload: Annotated[OffloadChoice, typer.Option(help="Try layouts that offload, or only those that do not.")] = (
        OffloadChoice.BOTH
    ),
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Of a device, parameters included; default: the profile's."
        ),
    ] = None,
    memory_margin: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            metavar="10%",
            help="Share of that memory to leave free, for sizes that depend on the data; default: 0%.",
        ),
    ] = None,
    objective: Annotated[str, typer.Option(help="makespan or device_span.")] = "makespan",
    time_limit: TimeLimit = 60.0,
    workers: Annotated[int | None, typer.Option(min=1, help="Cores to use; default: all.")] = None,
    as_json: AsJson = False,
) -> int:
    """Choose how to cut, place and batch a model: every layout is judged, the promising ones are solved.

    The table says which wins and why the others do not; the best one's schedule is ready for `optpipe train`.
    """
    from optpipe.layers import LayerProfile
    from solver.layout.candidates import candidates
    from solver.layout.ranking import rank
    from solver.limits import Limits, available_cores

    if output:
        check_writable(output)
    profile = LayerProfile.load(layers)
    if memory is not None:
        profile = profile.model_copy(update={"memory_bytes": memory})
    if memory_margin is not None:
        profile = _with_margin(profile, memory_margin)
    search = _search(profile, devices, global_batch, microbatch_sizes, placements, offload, objective)
    compile_once()
    limits = Limits(time_limit, workers=workers or available_cores())
    what = f"judging layouts of {profile.name or layers.name} for up to {time_limit:g} s"
    with doing(what), ctrl_c_cancels(limits.cancel):
        judged = rank(candidates(profile, search, limits), limits, _print_better())
    schedule = judged[0].schedule
    if schedule is None:
        if limits.cancel.requested:
            raise KeyboardInterrupt
        raise _nothing_found(judged)
    if output:
        from optpipe.schedule import schedule_text

        write_atomically(output, schedule_text(schedule))
    if as_json:
        print_json({"layouts": [_document(one) for one in judged], "output": str(output) if output else None})
    else:
        _print(judged, output)
    return 130 if limits.cancel.requested else 0


def _with_margin(profile: LayerProfile, margin: float) -> LayerProfile:
    """The profile with that share of a device's memory taken off."""
    if profile.memory_bytes is None:
        detail = "has no meaning here: neither --memory nor the profile says what a device has. Maybe give --memory."
        raise InputError([Issue("--memory-margin", "meaningless", detail)])
    return profile.model_copy(update={"memory_bytes": int(profile.memory_bytes * (1 - margin))})


def _search(
    profile: LayerProfile,
    devices: int,
    global_batch: int,
    sizes: str | None,
    placements: str | None,
    offload: OffloadChoice,
    objective: str,
) -> Search:
    """What to choose from; everything wrong with the options at once."""
    from optpipe.partition import DEFAULT_PLACEMENTS, parse_placement
    from solver.layout.candidates import Search

    issues: list[Issue] = []
    if objective not in ("makespan", "device_span"):
        issues.append(Issue("--objective", "unknown", f"is {objective!r} but must be makespan or device_span."))
    names = names_in(placements) if placements else list(DEFAULT_PLACEMENTS)
    for name in names:
        try:
            parse_placement(name)
        except ValueError as error:
            issues.append(Issue("--placements", "unknown", f"is wrong: {error}"))
    wanted = _microbatch_sizes(sizes, devices, global_batch, issues)
    if offload is OffloadChoice.YES and not (profile.copies and any(layer.offload_bytes for layer in profile.layers)):
        detail = "is yes, but the profile says of no layer that it may leave, or not how fast. Maybe add copies to it."
        issues.append(Issue("--offload", "impossible", detail))
    if issues:
        raise InputError(issues)
    choices = {OffloadChoice.BOTH: (False, True), OffloadChoice.YES: (True,), OffloadChoice.NO: (False,)}[offload]
    aim: Objective = "makespan" if objective == "makespan" else "device_span"
    return Search(devices, global_batch, wanted, names, choices, aim)


def _microbatch_sizes(text: str | None, devices: int, global_batch: int, issues: list[Issue]) -> list[int]:
    """Divisors of the global batch: those asked for, or powers of two that leave a microbatch for each device."""
    if text is None:
        usual = [2**k for k in range(20) if global_batch % 2**k == 0 and 2**k * devices <= global_batch]
        return usual or [1]
    sizes = []
    for part in names_in(text):
        size = int(part) if part.isdecimal() and len(part) <= MOST_DIGITS else 0
        if size < 1 or global_batch % size:
            detail = f"holds {shown(part)}, which does not divide --global-batch {global_batch}."
            issues.append(Issue("--microbatch-sizes", "no_divisor", detail))
        sizes.append(size)
    return sizes


def _print_better() -> OnJudged:
    """A line on stderr for each layout that is better than all before."""
    best_us = float("inf")

    def show(one: Judged) -> None:
        nonlocal best_us
        if one.value_us < best_us:
            best_us = one.value_us
            stderr().print(f"{us_text(one.value_us):>16}  {one.candidate.name}")

    return show


def _nothing_found(judged: Sequence[Judged]) -> NoSolutionError:
    reasons = list(dict.fromkeys(f"{one.candidate.name}: {one.why_not}" for one in judged))
    return NoSolutionError("no layout has a schedule:\n" + "\n".join(reasons[:SHOWN]))


def _document(one: Judged) -> dict[str, Any]:
    candidate = one.candidate
    layout = candidate.layout
    return {
        "placement": candidate.placement,
        "cut": candidate.cut,
        "layers_of_stages": list(layout.sizes) if layout else None,
        "devices_of_stages": list(layout.placement) if layout else None,
        "microbatch_size": candidate.batching.microbatch_size,
        "microbatches": candidate.batching.microbatches,
        "offload": candidate.offload,
        "value_us": one.schedule.value_us if one.schedule else None,
        "bound_us": one.bound_us if one.bound_us < float("inf") else None,
        "sequences_per_s": one.sequences_per_s if one.schedule else None,
        "bubble": one.schedule.bubble if one.schedule else None,
        "peak_bytes": _peak_bytes(one),
        "host_peak_bytes": one.host_peak_bytes,
        "method": one.schedule.method if one.schedule else None,
        "why_not": one.why_not,
    }


def _peak_bytes(one: Judged) -> int | None:
    """The most of any device under any timing: activations, without parameters."""
    return one.schedule.largest_peak_bytes if one.schedule else None


def _print(judged: Sequence[Judged], output: Path | None) -> None:
    columns = (
        "placement",
        "cut",
        "microbatch",
        "offload",
        "step",
        "sequences / s",
        "bubble",
        "peak bytes",
        "host bytes",
    )
    result = table(*columns, "")
    result.columns[1].justify = result.columns[-1].justify = "left"
    result.columns[-1].no_wrap = False
    best = judged[0]
    for one in judged[:SHOWN]:
        result.add_row(*_cells(one.candidate), *_figures(one), "wins" if one is best else _reason(one, best))
    console = stdout()
    console.print(result)
    if len(judged) > SHOWN:
        console.print(f"and {len(judged) - SHOWN} more, none better; --json lists all")
    assert best.candidate.layout is not None
    console.print(f"layers of each stage: {' '.join(map(str, best.candidate.layout.sizes))}")
    if output:
        console.print(f"wrote {output}")


def _cells(candidate: Candidate) -> tuple[str, str, str, str]:
    batching = candidate.batching
    size = f"{batching.microbatches} x {batching.microbatch_size}"
    return candidate.placement, candidate.cut, size, "yes" if candidate.offload else "no"


def _figures(one: Judged) -> tuple[str, ...]:
    found = one.schedule
    if found is None:
        return ("-",) * 5
    shown = (us_text(found.value_us), f"{one.sequences_per_s:,.2f}", share_text(found.bubble))
    return (*shown, f"{_peak_bytes(one):,}", f"{one.host_peak_bytes:,}")


def _reason(one: Judged, best: Judged) -> str:
    if one.schedule is None or one.why_not:
        return one.why_not
    return f"{100 * (one.value_us / best.value_us - 1):.1f} % slower"
