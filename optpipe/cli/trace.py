"""`optpipe trace`: a measured step against its plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import AsJson, print_json, stdout, table
from optpipe.files import check_writable
from optpipe.units import share_text, us_text

if TYPE_CHECKING:
    from optpipe.trace.compare import Comparison
    from optpipe.trace.document import Trace


def document(comparison: Comparison) -> dict[str, Any]:
    """All figures as JSON values."""
    figures = asdict(replace(comparison, planned_spans={}, spans={}, path_ops=frozenset()))
    return {name: value for name, value in figures.items() if name not in ("planned_spans", "spans", "path_ops")}


def print_comparison(trace: Trace, comparison: Comparison) -> None:
    """Every figure as tables."""
    print_short(trace, comparison)
    _print_path(comparison)
    _print_differences(comparison)
    _print_kinds(comparison)
    _print_transfers(comparison)


def print_short(trace: Trace, comparison: Comparison) -> None:
    """How the figures came about, the step, and the devices."""
    console = stdout()
    basis = comparison.basis
    console.print(f"step {trace.step} of {trace.source or 'a training run'}")
    console.print(_basis_text(trace, comparison))
    ratio = _ratio_text(comparison.step_us, comparison.planned_step_us)
    console.print(
        f"step: planned {_us(comparison.planned_step_us)}, {basis} {_us(comparison.step_us)}, ratio {ratio}; "
        f"compute takes {comparison.work_ratio:.3f} times as long as planned"
    )
    if not comparison.plan_fits:
        console.print(
            "note: the plan's durations are not those of this model on this machine. "
            "Maybe measure them with 'optpipe profile' and solve again."
        )
    _print_devices(comparison)


def _basis_text(trace: Trace, comparison: Comparison) -> str:
    if comparison.basis == "measured":
        return (
            f"measured: each device had a process of its own; their clocks agree to {_us(trace.clock_error_us)}, "
            "so times are shown as they were"
        )
    return (
        f"re-timed: the devices shared a process and took turns, so that step ({_us(comparison.measured_step_us)}) "
        "is no pipeline's;\nshown is the plan's order with the median duration measured for each kind of op and stage"
    )


def _print_devices(comparison: Comparison) -> None:
    basis = comparison.basis
    rows = table(
        "device",
        "bubble planned",
        basis,
        "busy planned",
        basis,
        "peak bytes planned",
        "measured",
        "measured / planned",
        "copies hidden planned",
        "measured",
    )
    for d, device in enumerate(comparison.devices):
        rows.add_row(
            str(d),
            share_text(device.planned_bubble),
            share_text(device.bubble),
            _us(device.planned_busy_us),
            _us(device.busy_us),
            f"{device.expected_peak_bytes:,}",
            f"{device.peak_bytes:,}",
            _ratio_text(device.peak_bytes, device.expected_peak_bytes),
            _optional_share(device.planned_hidden),
            _optional_share(device.hidden),
        )
    stdout().print(rows)


def _print_path(comparison: Comparison) -> None:
    path = comparison.path
    stdout().print(
        f"\nthe step differs by {_signed(comparison.step_us - comparison.planned_step_us)}: along the {path.ops} ops "
        f"that decide its end, ops {_signed(path.op_difference_us)}, gaps between them "
        f"{_signed(path.gap_difference_us)}, and {_signed(path.slack_us)} that the plan had to spare there"
    )


def _print_differences(comparison: Comparison) -> None:
    rows = table("largest differences", "device", "planned", "measured", "difference", "decides the end")
    for found in comparison.differences:
        times = (_us(found.planned_us), _us(found.measured_us), _signed(found.difference_us))
        rows.add_row(found.op, str(found.device), *times, "yes" if found.on_path else "")
    stdout().print()
    stdout().print(rows)


def _print_kinds(comparison: Comparison) -> None:
    rows = table("medians", "ops", "planned", "measured", "measured / planned")
    for kind in comparison.kinds:
        times = (_us(kind.planned_us), _us(kind.median_us), _ratio_text(kind.median_us, kind.planned_us))
        rows.add_row(f"{kind.kind} of stage {kind.stage}", str(kind.ops), *times)
    stdout().print()
    stdout().print(rows)


def _print_transfers(comparison: Comparison) -> None:
    if not any(transfer.timed for transfer in comparison.transfers):
        return  # a transfer shows its time only where its receiver waits for it
    rows = table("transfers", "messages", "waited for", "planned", "measured median")
    for transfer in comparison.transfers:
        before, after = transfer.boundary, transfer.boundary + 1
        way = f"stage {before} -> {after}" if transfer.direction == "F" else f"stage {after} -> {before}"
        found = "-" if transfer.median_us is None else _us(transfer.median_us)
        rows.add_row(way, str(transfer.messages), str(transfer.timed), _us(transfer.planned_us), found)
    stdout().print()
    stdout().print(rows)


def _us(time_us: float) -> str:
    return us_text(time_us, 1)  # clocks tell no more


def _signed(time_us: float) -> str:
    return f"{time_us:+,.1f} us"


def _ratio_text(measured: float, planned: float) -> str:
    return f"{measured / planned:.3f}" if planned else "-"


def _optional_share(share: float | None) -> str:
    return "-" if share is None else share_text(share)


TraceFile = Annotated[
    Path, typer.Argument(help="A measured step (optpipe.trace/1), from 'optpipe train --trace'.", metavar="TRACE.json")
]


def command(
    trace: TraceFile,
    plot: Annotated[Path | None, typer.Option(help="Also draw both at one time scale (png, svg, html).")] = None,
    as_json: AsJson = False,
) -> int:
    """Compare a measured step with its schedule: time, bubble, memory, copies, and the ops that differ most.

    Measured times count where each device had a process of its own. Where devices shared one, they took turns, and the
    schedule is timed anew with the durations that were measured; the output says which of the two it shows.
    """
    from optpipe.trace.compare import compare
    from optpipe.trace.document import Trace

    if plot:
        from optpipe.plot.figure import format_of

        format_of(plot)
        check_writable(plot)
    loaded = Trace.load(trace)
    comparison = compare(loaded)
    if plot:
        from optpipe.plot.planned_and_measured import draw_planned_and_measured

        draw_planned_and_measured(loaded, comparison, plot)
    if as_json:
        print_json(document(comparison))
    else:
        print_comparison(loaded, comparison)
        if plot:
            stdout().print(f"wrote {plot}")
    return 0
