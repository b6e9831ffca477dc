"""Output of `optpipe profile` on a model: measurements as JSON, tables of the stages, and the check of a step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.cli.console import stdout, table
from optpipe.kinds import WITHOUT_MODES
from optpipe.units import bytes_text, percent_text, share_text, time_text, times_text

if TYPE_CHECKING:
    from optpipe.layers import LayerProfile
    from optpipe.profile.check import Check
    from optpipe.profile.measured import Measured, StageFigures
    from optpipe.profile.ops import Spread


def document(measured: Measured, check: Check | None, output: Path, written: str) -> dict[str, Any]:
    """All measurements as JSON values."""
    result: dict[str, Any] = {
        "output": str(output),
        "format": written,
        "name": measured.name,
        "source": measured.source,
        "placement": list(measured.placement),
        "stages": [asdict(stage) for stage in measured.stages],
        "transfers": {
            "way": measured.transfers.transport,
            "boundaries": [s and asdict(s) for s in measured.transfers.spreads],
        },
        "copy_to_compute_ratio": measured.copy_to_compute_ratio,
        "fused_over_split": measured.fused_over_split,
        "varying_stages": list(measured.varying),
        "check": None,
    }
    if check:
        from optpipe.cli.trace import document as trace_document

        result["check"] = {
            "method": check.method,
            "predicted_serial_us": check.serial_us,
            "step": asdict(check.step),
            "measured_over_predicted": check.ratio,
            "shares": [asdict(share) for share in check.shares],
            "trace": trace_document(check.comparison),
            "failures": list(check.failures),
        }
    return result


def print_layers(profile: LayerProfile) -> None:
    """Print times and bytes of each layer."""
    rows = table("layer", "times", "F", "B", "W", "activation", "kept for W", "may be offloaded", "parameters")
    for layer in profile.layers:
        times = (layer.forward_us, layer.backward_input_us, layer.backward_weight_us)
        held = (layer.activation_bytes, layer.backward_weight_bytes, layer.offload_bytes, layer.parameter_bytes)
        rows.add_row(layer.name, str(layer.repeat), *times_text(times), *map(bytes_text, held))
    stdout().print(rows)


def print_stages(measured: Measured) -> None:
    """Print two tables, times and memory of the stages, and the cost of copies."""
    from optpipe.profile.ops import kinds_of_mode
    from optpipe.stage import Workspace

    console = stdout()
    times = table("stage", "device", *WITHOUT_MODES, "to the next stage")
    boundaries = [*measured.transfers.spreads, None]
    for s, stage in enumerate(measured.stages):
        cells = [_spread_text(stage.times.get(kind)) for kind in WITHOUT_MODES]
        times.add_row(str(s), str(measured.placement[s]), *cells, _spread_text(boundaries[s]))
    console.print(times)
    console.print("each: median, and interquartile range in per cent of it\n")
    for undeferred in [undeferred for stage in measured.stages for undeferred in stage.undeferred]:
        console.print(f"{undeferred}\n")
    workspaces = tuple(Workspace.model_fields)
    columns = ("activation", "kept for W", "may be offloaded", *(f"workspace {kind}" for kind in workspaces))
    memory = table("stage", *columns, "parameters")
    for s, stage in enumerate(measured.stages):
        sizes = stage.sizes
        held = (sizes.activation_bytes, sizes.backward_weight_bytes, sizes.offload_bytes)
        work = [sizes.workspace_bytes.get(kind) for kind in workspaces]
        cells = ["-" if size is None else bytes_text(size) for size in (*held, *work, stage.parameter_bytes)]
        memory.add_row(str(s), *cells)
    console.print(memory)
    for s, stage in enumerate(measured.stages):
        for mode, again in stage.sizes.recomputed.items():
            whole = stage.sizes.activation_bytes
            saves = "" if again.kept_bytes < whole else ", which saves nothing: no mode is written"
            recomputation = _spread_text(stage.times[kinds_of_mode(mode)[0]])
            console.print(
                f"stage {s}, {mode}: keeps {bytes_text(again.kept_bytes)} of {bytes_text(whole)}, C takes "
                f"{recomputation}, {bytes_text(again.segment_bytes)} at a time inside the backward{saves}"
            )
    for s in measured.varying:
        console.print(_varying_sizes_text(s, measured.stages[s]))
    if measured.varying:
        console.print("the largest sizes are used; --memory-margin keeps memory free for other data")
    console.print(f"\nk = {measured.copy_to_compute_ratio:.3f}: offload and reload over F, B and W (PipeOffload)")
    if measured.fused_over_split is not None:
        console.print(f"BW takes {measured.fused_over_split:.3f} times as long as B and W together; plans assume 1")


def print_slices(measured: Measured) -> None:
    """Print the times of slices, and the share of attention that follows from them."""
    from optpipe.profile.slices import passes_us

    console = stdout()
    for s, stage in enumerate(measured.stages):
        for slicing in stage.slicings:
            columns = ([one[kind].median_us for one in slicing.times] for kind in ("F", "BW"))
            texts = "; ".join(" ".join(times_text(times_us)) for times_us in columns)
            lengths = " ".join(map(str, slicing.lengths))
            console.print(f"stage {s}, slices of {lengths} tokens: F and BW take {texts}")
        total_us = sum(passes_us(stage.times).values())
        share = stage.attention_us / total_us if total_us else 0.0
        more = ", ".join(times_text([one.slice_us for one in stage.length_costs.values()]))
        console.print(
            f"stage {s}: causal attention is {percent_text(share)} of F, B and W of a whole sequence; each slice takes "
            f"{more} more in these; gradients of keys and values take "
            f"{bytes_text(stage.slicings[-1].gradient_bytes)} a slice"
        )


def _spread_text(spread: Spread | None) -> str:
    return f"{time_text(spread.median_us)} ({100 * spread.relative:.0f} %)" if spread else "-"


def _varying_sizes_text(number: int, stage: StageFigures) -> str:
    """Smallest and largest sizes of a stage over its microbatches, for those that differ."""
    assert stage.smallest is not None, "its sizes differ"
    kinds = stage.sizes.workspace_bytes
    pairs = {
        "activation": (stage.smallest.activation_bytes, stage.sizes.activation_bytes),
        "kept for W": (stage.smallest.backward_weight_bytes, stage.sizes.backward_weight_bytes),
        **{f"workspace {kind}": (stage.smallest.workspace_bytes[kind], kinds[kind]) for kind in kinds},
    }
    differing = [(name, *map(bytes_text, sizes)) for name, sizes in pairs.items() if sizes[0] != sizes[1]]
    spread = ", ".join(f"{name} {low} to {high}" for name, low, high in differing)
    return f"stage {number}: sizes depend on the data, over {stage.samples} microbatches: {spread}"


def print_check(check: Check) -> None:
    """Print predicted and measured step times, their breakdown by action, and peaks."""
    comparison, console, step_us = check.comparison, stdout(), check.step.median_us
    console.print(
        f"\nstep of {check.method}, all devices in one process, in turns:\n"
        f"  predicted {time_text(check.serial_us)} (the sum of all its ops and messages), measured "
        f"{time_text(step_us)} (interquartile range {100 * check.step.relative:.0f} %), "
        f"ratio {check.ratio:.3f}\n"
        f"  breakdown of one recorded step:"
    )
    rows = table("action", "times", "predicted", "recorded", "difference, of the step")
    for share in check.shares:
        predicted_us = share.predicted_us or 0.0
        predicted = "-" if share.predicted_us is None else time_text(predicted_us)
        difference = share_text((share.recorded_us - predicted_us) / step_us)
        rows.add_row(share.kind, str(share.actions), predicted, time_text(share.recorded_us), difference)
    between_us = step_us - sum(share.recorded_us for share in check.shares)
    rows.add_row("the rest of a step", "", "-", time_text(between_us), share_text(between_us / step_us))
    console.print(rows)
    console.print(
        f"as a pipeline, each device on its own hardware:\n"
        f"  predicted {time_text(comparison.planned_step_us)}, re-timed with the durations of a recorded step "
        f"{time_text(comparison.step_us)}, ratio {comparison.step_us / comparison.planned_step_us:.3f}"
    )
    for d, device in enumerate(comparison.devices):
        peak, expected = bytes_text(device.peak_bytes), bytes_text(device.expected_peak_bytes)
        console.print(f"  device {d}: peak {peak}, predicted {expected}")
