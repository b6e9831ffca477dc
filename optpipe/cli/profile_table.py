"""`optpipe profile --from-table`: a plan for machines that are not at hand begins here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.cli.output import print_json, stdout, table, write_whole
from optpipe.errors import InputError, Issue
from optpipe.units import us_text

if TYPE_CHECKING:
    from optpipe.layers import LayerProfile
    from optpipe.problem import Problem
    from optpipe.profile.table import SizeTable


def profile_table(
    path: Path,
    output: Path,
    form: str | None,
    devices: int | None,
    stages: int | None,
    placement: str,
    microbatches: int | None,
    as_json: bool,
) -> int:
    """Write the layers of a table, or the problem of a placement, and say what they rest on."""
    from optpipe.profile.cost_model import profile_of
    from optpipe.profile.table import SizeTable

    sizes = SizeTable.load(path)
    profile = profile_of(sizes)
    problem = None
    wants_problem = form == "problem" or (form is None and not (devices is None and stages is None))
    if wants_problem:
        problem = _problem(profile, devices, stages, placement, microbatches)
    written = problem or profile
    write_whole(output, written.to_json() + "\n")
    if as_json:
        print_json(_document(sizes, profile, output, written.format))
    else:
        _print(sizes, profile)
        stdout().print(f"wrote {output} ({written.format})")
    return 0


def _problem(
    profile: LayerProfile, devices: int | None, stages: int | None, placement_name: str, microbatches: int | None
) -> Problem:
    """Layers cut so that the busiest device has least to do; whatever may leave to the host can.

    Cut evenly where no balanced cut is found.
    """
    from optpipe.layout import Batching, Layout, problem_of
    from optpipe.placements import devices_of_stages
    from solver.layout.cutting import balanced_sizes, even_sizes

    placed = devices_of_stages(placement_name, devices, stages)
    count, layers = max(placed) + 1, len(profile.each_layer)
    problem = None
    if len(placed) <= layers:
        batching = Batching(profile.microbatch_size, microbatches or 2 * count)
        sizes = balanced_sizes(profile, placed) or even_sizes(layers, len(placed))
        problem = problem_of(profile, Layout(sizes, placed), batching, offload=True)
    if problem is None:
        detail = (
            f"gives {len(placed)} stages on {count} devices, into which {layers} layers do not fit: each stage needs "
            f"a layer, and the parameters of a device's stages at most {profile.memory_bytes:,} bytes. Maybe use "
            "other numbers of stages or devices, or divide layers among more of them (parallel.tensor)."
        )
        raise InputError([Issue("--placement", "does_not_fit", detail)])
    return problem


def _document(sizes: SizeTable, profile: LayerProfile, output: Path, written: str) -> dict[str, Any]:
    from optpipe.profile.cost_model import assumptions

    return {
        "output": str(output),
        "format": written,
        "layers": [layer.model_dump(mode="json") for layer in profile.layers],
        "copy_to_compute_ratio": _ratio(sizes),
        "assumptions": assumptions(sizes),
    }


def _ratio(sizes: SizeTable) -> float | None:
    from optpipe.profile.cost_model import copy_to_compute_ratio

    return None if sizes.machine.copy_gb_per_s is None else copy_to_compute_ratio(sizes)


def _print(sizes: SizeTable, profile: LayerProfile) -> None:
    from optpipe.profile.cost_model import assumptions

    rows = table("layer", "times", "F", "B", "W", "activation bytes", "kept for W", "may leave", "parameter bytes")
    for layer in profile.layers:
        times = (layer.forward_us, layer.backward_input_us, layer.backward_weight_us)
        held = (layer.activation_bytes, layer.backward_weight_bytes, layer.offload_bytes, layer.parameter_bytes)
        rows.add_row(layer.name, str(layer.repeat), *map(us_text, times), *(f"{size:,}" for size in held))
    console = stdout()
    console.print(rows)
    ratio = _ratio(sizes)
    if ratio is not None:
        verdict = "copies can hide behind compute" if ratio <= 1 else "copies take longer than compute"
        console.print(f"\nk = {ratio:.2f}: a layer's offload and reload over its F, B and W; {verdict} (PipeOffload)")
    console.print("\nassumed:")
    for sentence in assumptions(sizes):
        console.print(f"- {sentence}")
