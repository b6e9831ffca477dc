"""`optpipe trace`: compares a measured step with its plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import AsJson, check_picture, doing_long, print_json, stdout, table
from optpipe.errors import InputError, Issue
from optpipe.files import check_writable, write_atomically
from optpipe.units import bytes_text, difference_text, idle_text, share_text, time_text, time_unit

if TYPE_CHECKING:
    from optpipe.schedule import Schedule
    from optpipe.trace.compare import Comparison
    from optpipe.trace.document import Trace


def document(comparison: Comparison) -> dict[str, Any]:
    """All figures as JSON values."""
    figures = asdict(replace(comparison, planned_spans={}, spans={}, path_ops=frozenset()))
    return {name: value for name, value in figures.items() if name not in ("planned_spans", "spans", "path_ops")}


def print_short(trace: Trace, comparison: Comparison) -> None:
    """Print how times were measured, the step, and a table of the devices."""
    console = stdout()
    basis = comparison.basis
    console.print(f"step {trace.step} of {trace.source or 'a training run'}")
    if basis == "measured":
        console.print(
            f"measured: each device ran in its own process; clocks agree to within {time_text(trace.clock_error_us)}, "
            "so times are shown as measured"
        )
    else:
        console.print(
            f"re-timed: the devices ran in one process, in turns, so the measured step "
            f"({time_text(comparison.measured_step_us)}) is not that of a pipeline;\n"
            "shown is the plan's order with the median duration measured for each kind of op and stage"
        )
    ratio = _ratio_text(comparison.step_us, comparison.planned_step_us)
    planned, took = time_text(comparison.planned_step_us), time_text(comparison.step_us)
    console.print(
        f"step: planned {planned}, {basis} {took}, ratio {ratio}; "
        f"compute takes {comparison.work_ratio:.3f} times as long as planned"
    )
    if not comparison.plan_fits:
        console.print(_misfit(trace, comparison))
    unit = time_unit(max(comparison.planned_step_us, comparison.step_us))
    rows = table(
        "device",
        "busy planned",
        basis,
        "idle planned",
        basis,
        "peak planned",
        "measured",
        "measured / planned",
        "copies hidden planned",
        "measured",
    )
    for d, device in enumerate(comparison.devices):
        rows.add_row(
            str(d),
            time_text(device.planned_busy_us, unit),
            time_text(device.busy_us, unit),
            *(idle_text(idle_us, unit) for idle_us in (device.planned_idle_us, device.idle_us)),
            bytes_text(device.expected_peak_bytes),
            bytes_text(device.peak_bytes),
            _ratio_text(device.peak_bytes, device.expected_peak_bytes),
            _optional_share(device.planned_hidden),
            _optional_share(device.hidden),
        )
    console.print(rows)
    console.print("idle: before a device's first op of the step + between its ops + after its last")
    for d, device in enumerate(comparison.devices):
        if device.collectives_us:
            inside_us = device.collectives_us - device.exposed_collectives_us
            share = share_text(inside_us / comparison.step_us if comparison.step_us else 0.0)
            console.print(
                f"device {d}: {time_text(device.collectives_us)} in gathers of parameters and reductions of gradients, "
                f"which no plan has: {time_text(inside_us)} while it is idle, {share} of the step, and "
                f"{time_text(device.exposed_collectives_us)} before the step's first op or behind its last"
            )


def _misfit(trace: Trace, comparison: Comparison) -> str:
    """The likely reason why compute took much longer or shorter than planned: another model, or a busy machine."""
    planned, ran = trace.schedule.problem.name, trace.source.partition(";")[0]
    if ran and not planned.startswith(ran):
        return (
            f"note: the plan is of {planned or 'a problem without a name'!r}, but the step ran {ran!r}. Maybe train "
            "with the --model and sizes that were profiled, or profile this model and solve again."
        )
    return (
        f"note: compute took {comparison.work_ratio:.3g} times as long as planned. Maybe other programs kept the "
        "machine busy, now or in the profile: a step is timed by the wall clock, so record it again when they rest."
    )


def _print_differences(comparison: Comparison) -> None:
    """Print where the step's difference comes from: the critical path, single ops, kinds of ops, and transfers."""
    console, path = stdout(), comparison.path
    console.print(
        f"\nthe step differs by {difference_text(comparison.step_us - comparison.planned_step_us)}: on its critical "
        f"path, {path.ops} ops that decide the end, ops {difference_text(path.op_difference_us)}, gaps between them "
        f"{difference_text(path.gap_difference_us)}, and {difference_text(path.slack_us)} of slack in the plan\n"
    )
    rows = table("largest differences", "device", "planned", "measured", "difference", "decides the end")
    for op in comparison.differences:
        times = (time_text(op.planned_us), time_text(op.measured_us), difference_text(op.difference_us))
        rows.add_row(op.op, str(op.device), *times, "yes" if op.on_path else "")
    console.print(rows)
    console.print()
    rows = table("medians", "ops", "planned", "measured", "measured / planned")
    for kind in comparison.kinds:
        times = (time_text(kind.planned_us), time_text(kind.median_us), _ratio_text(kind.median_us, kind.planned_us))
        mode = f", {kind.mode}" if kind.mode else ""
        rows.add_row(f"{kind.kind} of stage {kind.stage}{mode}", str(kind.ops), *times)
    console.print(rows)
    if not any(transfer.timed for transfer in comparison.transfers):
        return  # a transfer can be timed only if its receiver waits for it
    console.print()
    rows = table("transfers", "messages", "waited for", "planned", "measured median")
    for transfer in comparison.transfers:
        before, after = transfer.boundary, transfer.boundary + 1
        stages = f"stage {before} -> {after}" if transfer.direction == "F" else f"stage {after} -> {before}"
        median = "-" if transfer.median_us is None else time_text(transfer.median_us)
        rows.add_row(stages, str(transfer.messages), str(transfer.timed), time_text(transfer.planned_us), median)
    console.print(rows)


def _load(paths: list[Path], chunks: int | None) -> Trace:
    from optpipe.trace.document import Trace
    from optpipe.trace.observed import NUMBERED, is_profile, load_profiles
    from optpipe.trace.record import load_records, trace_of_records

    if all(path.is_file() for path in paths) and any(map(is_profile, paths)):
        return load_profiles(paths, chunks)
    if chunks is not None:
        raise InputError([Issue("--chunks", "not_counted", NUMBERED)], str(paths[0]))
    if len(paths) == 1 and paths[0].is_dir():
        return trace_of_records(load_records(paths[0]))
    if len(paths) > 1:
        detail = f"are {len(paths)} files, but only profiles of torch.profiler are read together. Maybe name one trace."
        raise InputError([Issue("TRACE.json", "too_many", detail)])
    return Trace.load(paths[0])


def _better_order(schedule: Schedule, seconds: float) -> dict[str, Any]:
    """Best schedule that a search finds for the problem of a step, compared with the order that ran."""
    from solver import Limits
    from solver.process import solve_in_child

    with doing_long("searching for a better order"):
        found = solve_in_child(
            schedule.problem, "auto", Limits(time_limit_s=seconds), starts=[schedule.orders]
        ).schedule
    in_use_us = schedule.value_us
    assert found is not None, "the order that ran is one"
    return {
        "method": found.method,
        "value_us": found.value_us,
        "bound_us": found.bound_us,
        "in_use_us": in_use_us,
        "saved": 1 - found.value_us / in_use_us,
        "most_saved": 1 - found.bound_us / in_use_us,
    }


def _ratio_text(measured: float, planned: float) -> str:
    return f"{measured / planned:.3f}" if planned else "-"


def _optional_share(share: float | None) -> str:
    return "-" if share is None else share_text(share)


def command(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="A measured step (optpipe.trace/1), from 'optpipe train --trace'; or a folder that a Recorder wrote "
            "to; or profiles of another trainer, as torch.profiler exports them, one a rank of its pipeline in their "
            "order.",
            metavar="TRACE.json...",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the step as optpipe.trace/1.", metavar="FILE.json"),
    ] = None,
    better: Annotated[
        float,
        typer.Option(
            min=0,
            max=1e6,
            help="Seconds to search for a better order of the same ops, with what they took and as many in flight.",
        ),
    ] = 0.0,
    chunks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Model chunks of each rank in profiles of Megatron-LM, whose ops have no numbers; default: by their "
            "order.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw both at one time scale (png, svg, pdf, html).")] = None,
    as_json: AsJson = False,
) -> int:
    """Compare a measured step with its schedule: time, idle time, memory, copies, and the ops that differ most.

    If each device ran in its own process, the measured times are compared. If devices shared a process, they ran in
    turns; the schedule is then re-timed with the measured durations. The output says which of the two it shows.
    """
    from optpipe.trace.compare import compare

    if plot:
        check_picture(plot)
    if output:
        check_writable(output, *traces)
    loaded = _load(traces, chunks)
    comparison = compare(loaded)
    if output:
        write_atomically(output, loaded.to_json() + "\n")
    if plot:
        from optpipe.plot.planned_and_measured import draw_planned_and_measured

        draw_planned_and_measured(loaded, comparison, plot)
    found = _better_order(loaded.schedule, better) if better else None
    if as_json:
        print_json(document(comparison) | ({"better": found} if found else {}))
    else:
        print_short(loaded, comparison)
        _print_differences(comparison)
        if found:
            stdout().print(
                f"\nthis order of the ops takes {time_text(found['in_use_us'])}; {found['method']} found one that "
                f"takes {time_text(found['value_us'])}, {share_text(found['saved'])} less; at most "
                f"{share_text(found['most_saved'])} can be saved"
            )
        if output:
            stdout().print(f"wrote {output}")
        if plot:
            stdout().print(f"wrote {plot}")
    return 0
