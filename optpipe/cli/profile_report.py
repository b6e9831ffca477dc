"""What is printed of measured stages."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.cli.output import stdout, table
from optpipe.units import share_text, us_text

if TYPE_CHECKING:
    from optpipe.profile.check import Check
    from optpipe.profile.measured import Measured, StageFigures
    from optpipe.profile.timing import Spread

KINDS = ("F", "B", "W", "BW", "O", "R")


def figures(measured: Measured, check: Check | None, output: Path, written: str) -> dict[str, Any]:
    """Everything that was measured, as JSON values."""
    return {
        "output": str(output),
        "format": written,
        "name": measured.name,
        "source": measured.source,
        "placement": list(measured.placement),
        "stages": [asdict(stage) for stage in measured.stages],
        "transfers": {
            "way": measured.transfers.way,
            "boundaries": [s and asdict(s) for s in measured.transfers.spreads],
        },
        "copy_to_compute_ratio": measured.copy_to_compute_ratio,
        "fused_over_split": measured.fused_over_split,
        "varying_stages": list(measured.varying),
        "check": _check_figures(check) if check else None,
    }


def _check_figures(check: Check) -> dict[str, Any]:
    from optpipe.cli.trace_report import document

    return {
        "method": check.method,
        "predicted_serial_us": check.serial_us,
        "step": asdict(check.step),
        "measured_over_predicted": check.ratio,
        "shares": [asdict(share) for share in check.shares],
        "trace": document(check.comparison),
        "failures": list(check.failures),
    }


def print_figures(measured: Measured, check: Check | None, output: Path, written: str) -> None:
    """Times and memory of the stages, messages, copies, and how the prediction compares with real steps."""
    console = stdout()
    console.print(measured.name)
    console.print(f"{measured.source}\n")
    _print_times(measured)
    _print_memory(measured)
    _print_copies(measured)
    if check:
        _print_check(check)
    console.print(f"wrote {output} ({written})")


def _print_times(measured: Measured) -> None:
    rows = table("stage", "device", *(f"{kind} (us)" for kind in KINDS), "to the next stage")
    boundaries = [*measured.transfers.spreads, None]
    for s, stage in enumerate(measured.stages):
        cells = [_spread_text(stage.times.get(kind)) for kind in KINDS]
        rows.add_row(str(s), str(measured.placement[s]), *cells, _spread_text(boundaries[s]))
    stdout().print(rows)
    stdout().print("each: median, and from quartile to quartile in per cent of it\n")
    for one in [one for stage in measured.stages for one in stage.undeferred]:
        stdout().print(f"{one}\n", markup=False)


def _spread_text(spread: Spread | None) -> str:
    return f"{spread.median_us:,.1f} ({100 * spread.relative:.0f} %)" if spread else "-"


def _print_memory(measured: Measured) -> None:
    workspaces = ("F", "B", "W", "BW")
    columns = ("activation bytes", "kept for W", "may leave", *(f"workspace {kind}" for kind in workspaces))
    rows = table("stage", *columns, "parameter bytes")
    for s, stage in enumerate(measured.stages):
        sizes = stage.sizes
        held = (sizes.activation_bytes, sizes.backward_weight_bytes, sizes.offload_bytes)
        work = [sizes.workspace_bytes.get(kind) for kind in workspaces]
        cells = ["-" if size is None else f"{size:,}" for size in (*held, *work, stage.parameter_bytes)]
        rows.add_row(str(s), *cells)
    stdout().print(rows)
    for s in measured.varying:
        stdout().print(_spread_of_sizes(s, measured.stages[s]))
    if measured.varying:
        stdout().print("the largest counts; --memory-margin leaves room for what other data may need")


def _spread_of_sizes(number: int, stage: StageFigures) -> str:
    """What of a stage's memory differed between microbatches, from the smallest to the largest."""
    assert stage.smallest is not None, "its sizes differ"
    kinds = stage.sizes.workspace_bytes
    pairs = {
        "activation": (stage.smallest.activation_bytes, stage.sizes.activation_bytes),
        "kept for W": (stage.smallest.backward_weight_bytes, stage.sizes.backward_weight_bytes),
        **{f"workspace {kind}": (stage.smallest.workspace_bytes[kind], kinds[kind]) for kind in kinds},
    }
    spread = ", ".join(f"{name} {low:,} to {high:,}" for name, (low, high) in pairs.items() if low != high)
    return f"stage {number}: bytes depend on the data, over {stage.samples} microbatches: {spread}"


def _print_copies(measured: Measured) -> None:
    console = stdout()
    console.print(f"\nk = {measured.copy_to_compute_ratio:.3f}: offload and reload over F, B and W (PipeOffload)")
    if measured.fused_over_split is not None:
        console.print(f"BW takes {measured.fused_over_split:.3f} times B and W together, which a plan takes it to be")


def _print_check(check: Check) -> None:
    comparison, console = check.comparison, stdout()
    console.print(
        f"\nstep of {check.method}, all devices in one process, one after the other:\n"
        f"  predicted {us_text(round(check.serial_us))} (the sum of all its ops and messages), measured "
        f"{us_text(round(check.step.median_us))} ({100 * check.step.relative:.0f} % from quartile to quartile), "
        f"ratio {check.ratio:.3f}\n"
        f"  it is made of, in one recorded step:"
    )
    _print_shares(check)
    console.print(
        f"as a pipeline, each device on hardware of its own:\n"
        f"  predicted {us_text(round(comparison.planned_step_us))}, re-timed with the durations of a recorded step "
        f"{us_text(round(comparison.step_us))}, ratio {comparison.step_us / comparison.planned_step_us:.3f}"
    )
    for d, device in enumerate(comparison.devices):
        console.print(f"  device {d}: peak {device.peak_bytes:,} bytes, predicted {device.expected_peak_bytes:,}")


def _print_shares(check: Check) -> None:
    rows = table("action", "times", "predicted", "recorded", "difference, of the step")
    for share in check.shares:
        predicted_us = share.predicted_us or 0.0
        predicted = "-" if share.predicted_us is None else us_text(round(predicted_us))
        difference = share_text((share.recorded_us - predicted_us) / check.step.median_us)
        rows.add_row(share.kind, str(share.actions), predicted, us_text(round(share.recorded_us)), difference)
    between_us = check.step.median_us - sum(share.recorded_us for share in check.shares)
    difference = share_text(between_us / check.step.median_us)
    rows.add_row("the rest of a step", "", "-", us_text(round(between_us)), difference)
    stdout().print(rows)
