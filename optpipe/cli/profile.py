"""`optpipe profile`: costs of a model, computed from a table of sizes or measured on this hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import AsJson, doing_long, names_in, parse_share, parse_size, print_json, stdout, table
from optpipe.cli.plan import MAX_DIGITS, SliceChoice
from optpipe.cli.profile_model import Options, predict_model, profile_model
from optpipe.cli.profile_report import print_layers
from optpipe.errors import InputError, Issue, shown
from optpipe.files import check_writable, write_atomically
from optpipe.kinds import WITHOUT_MODES
from optpipe.mode_names import parse_modes
from optpipe.placement import devices_of_stages
from optpipe.units import bytes_text, time_text

if TYPE_CHECKING:
    from optpipe.layers import LayerProfile
    from optpipe.problem import Problem


CUT_S = 5.0
"""Seconds in which the layers of a table are cut; a search of a few hundred cuts of small problems ends before."""

UNCUT = "is layers, which 'optpipe plan' cuts and places"
"""A reason to refuse options with --format layers."""

LEAST_SLICES = 2
"""Least number of slices: one is the whole sequence, which is measured anyway."""


class Precision(StrEnum):
    """Precision of weights and activations."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BFLOAT16 = "bfloat16"


class Format(StrEnum):
    """Document to write."""

    PROBLEM = "problem"
    LAYERS = "layers"


class ClockChoice(StrEnum):
    """Clock that times ops on the CPU."""

    WALL = "wall"
    CPU = "cpu"


def command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Output file.", metavar="FILE.json")],
    from_table: Annotated[
        Path | None,
        typer.Option(
            help="Compute the costs from this table of sizes and rates instead of measuring.", metavar="TABLE.toml"
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            help="Take the costs from what a Recorder wrote in a training run of yours: a file for each of its ranks.",
            metavar="FOLDER",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model to measure: tiny, small or medium (a GPT), hf:FOLDER with a model of transformers, or your own "
            "as module:callable.",
            metavar="MODEL",
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="With --model: predict its layers for this machine, a name of `optpipe machines` or a file, instead "
            "of measuring them here. Nothing is computed, and no memory taken.",
            metavar="h100",
        ),
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format", help="Document to write; default: a problem if the number of stages is known, else layers."
        ),
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, max=4096, help="Devices of the pipeline.")] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Stages of the pipeline, instead of --devices.")
    ] = None,
    placement: Annotated[str, typer.Option(help="Placement of stages: linear, interleaved-N, v or v-N.")] = "linear",
    microbatches: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="Microbatches in a step; default: two per device.")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            help="Memory of a device. Parameters, gradients and Adam's moments are subtracted, the rest is the budget; "
            "buffers of received messages come on top. Default: no limit.",
            metavar="SIZE",
        ),
    ] = None,
    memory_margin: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            help="Share of --memory to keep free, for sizes that depend on the data; default: 0%.",
            metavar="10%",
        ),
    ] = None,
    reduce_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**6,
            help="With --from-run and --memory: microbatches after which PlannedSchedule is to reduce gradients. 1 "
            "leaves more memory where a device has several stages. Default: once a step.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Callable that returns microbatches to measure, as for 'optpipe train'; called with step 0.",
            metavar="module:callable",
        ),
    ] = None,
    cut: Annotated[
        str | None,
        typer.Option(
            help="Layers of each stage, or a JSON file with the names of its modules; default: spread evenly.",
            metavar="5,6,6,5",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=2000, help="Transformer layers of the GPT; default: one per stage.")
    ] = None,
    microbatch_size: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Sequences in a microbatch; default: 4.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, max=2**24, help="Bytes of text in a sequence; default: the model's maximum.")
    ] = None,
    dtype: Annotated[
        Precision | None, typer.Option(help="Precision of the model; default: float32, or bfloat16 for --machine.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Timed rounds after the warm-up; default: 10.")
    ] = None,
    clock: Annotated[
        ClockChoice | None,
        typer.Option(
            help="wall: elapsed time; cpu: CPU time of the computing thread, unaffected by other load. Default: wall."
        ),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Ways to hold an activation beside keeping it, by commas: offload, offload-bf16 and offload-fp8 "
            "(copies in low precision, which change gradients), full (recompute the stage from its input), selective "
            "(each block from its own input), selective-2 (the first two), selective:mlp (a part of each), blocks "
            "(selective with each number), selective-groups-2 (two blocks at a time), groups (each useful size), and "
            "+offload behind full and these (what stays leaves). Default: offload."
        ),
    ] = None,
    fused_backward: Annotated[
        bool,
        typer.Option(
            "--fused-backward",
            help="Write a problem whose backwards are never split into B and W, for trainers that run them whole.",
        ),
    ] = False,
    slices: Annotated[
        str | None,
        typer.Option(
            help="Number of slices into which each sequence is cut: the costs are those of slices that run with the "
            "keys and values of the earlier ones. With --format layers, numbers of slices from whose times the profile "
            "says what attention costs. Default: whole sequences.",
            metavar="4",
        ),
    ] = None,
    slice_by: Annotated[
        SliceChoice | None,
        typer.Option(help="Slices of a problem have equal compute or equal length; default: compute."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run steps and compare them with the prediction; exit code 1 if memory peaks differ."
        ),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Determine the costs of a model's stages: times, memory, transfers. Writes a problem to solve, or layers to plan.

    With --model the stages are measured on this machine, by the code that runs in training; under torchrun each process
    measures the stages of its device. With --machine as well, its layers are predicted for a GPU that is not here. With
    --from-run they were recorded in a trainer of yours. With --from-table costs are computed from sizes and rates.
    """
    check_writable(output, from_table)
    gpt: dict[str, object] = {
        "--layers": layers,
        "--microbatch-size": microbatch_size,
        "--sequence": sequence,
        "--dtype": dtype,
    }
    measuring: dict[str, object] = {
        "--memory": memory,
        "--memory-margin": memory_margin,
        "--data": data,
        "--cut": cut,
        "--rounds": rounds,
        "--clock": clock,
        "--modes": modes,
        "--fused-backward": fused_backward or None,
        "--slices": slices,
        "--slice-by": slice_by,
        "--check": check or None,
    }
    placed: dict[str, object] = {
        "--devices": devices,
        "--stages": stages,
        "--placement": None if placement == "linear" else placement,
    }
    if from_run is not None:
        others: dict[str, object] = placed | {"--from-table": from_table}
        others |= (
            {"--model": model, "--machine": machine, "--format": form if form is Format.LAYERS else None}
            | gpt
            | measuring
        )
        others |= {"--memory": None, "--memory-margin": None, "--modes": None}
        _refuse("--from-run", "takes stages and costs from the run", others)
        if memory is None:
            _refuse("--memory", "is not given", {"--memory-margin": memory_margin})
        names = None if modes is None else [name.strip() for name in modes.split(",")]
        if memory is None:
            _refuse("--memory", "is not given", {"--reduce-every": reduce_every})
        return profile_run(from_run, output, microbatches, memory, memory_margin or 0.0, names, reduce_every, as_json)
    _refuse("--from-run", "is not given", {"--reduce-every": reduce_every})
    if from_table is not None:
        others = {"--model": model, "--machine": machine} | gpt | measuring | {"--modes": None}
        _refuse("--from-table", "takes everything from its table", others)
        if form is None and devices is None and stages is None:
            form = Format.LAYERS
        if form is Format.LAYERS:
            _refuse("--format", UNCUT, placed | {"--microbatches": microbatches, "--modes": modes})
        names = None if modes is None else parse_modes(modes, "--modes")
        return profile_table(from_table, output, form, devices, stages, placement, microbatches, names, as_json)
    if model is None:
        maybe = "Maybe --model small, --from-run FOLDER or --from-table TABLE.toml."
        raise InputError([Issue("--model", "missing", f"is missing. {maybe}")])
    if machine is not None:
        cutting = placed | {"--microbatches": microbatches, "--cut": cut}
        cutting |= {"--format": form if form is Format.PROBLEM else None, "--fused-backward": fused_backward or None}
        _refuse("--machine", "predicts layers, which 'optpipe plan' cuts", cutting)
        running = ("--rounds", "--clock", "--slices", "--slice-by", "--check")
        _refuse("--machine", "computes nothing", {name: measuring[name] for name in running})
        form, dtype = Format.LAYERS, dtype or Precision.BFLOAT16
    if model.startswith("hf:"):
        _refuse("--model", f"is {model}, whose configuration decides it", {"--layers": layers})
    elif ":" in model:
        _refuse("--model", f"is {model}, whose callable decides it", gpt)
    else:
        _refuse("--model", f"is {model}, which has its own text", {"--data": data})
    if form is Format.LAYERS:
        own = ":" in model and not model.startswith("hf:")
        cutting = placed | {"--microbatches": microbatches, "--cut": cut}
        _refuse("--format", UNCUT, cutting | ({"--cut": None, "--stages": None} if own else {}))
        if modes is not None and any(name not in ("offload", "selective") for name in parse_modes(modes, "--modes")):
            detail = (
                f"is {modes}, but of a layer only 'selective' is measured, from which 'optpipe plan --modes' makes the "
                "modes of stages. Maybe --modes selective."
            )
            raise InputError([Issue("--modes", "not_by_layers", detail)])
        _refuse("--format", "is layers, which are not scheduled yet", {"--fused-backward": fused_backward or None})
        _refuse("--format", "is layers, which 'optpipe plan' cuts into slices", {"--slice-by": slice_by})
    if memory is None:
        _refuse("--memory", "is not given", {"--memory-margin": memory_margin})
    if slices is None:
        _refuse("--slices", "is not given", {"--slice-by": slice_by})

    options = Options(
        devices=devices,
        stages=stages,
        placement=placement,
        microbatches=microbatches,
        as_layers=form is Format.LAYERS,
        memory_bytes=memory,
        memory_margin=memory_margin or 0.0,
        data=data,
        cut=cut,
        layers=layers,
        microbatch_size=microbatch_size or 4,
        sequence=sequence,
        dtype=(dtype or Precision.FLOAT32).value,
        rounds=rounds or 10,
        clock=(clock or ClockChoice.WALL).value,
        check=check,
        modes=["offload"] if modes is None else parse_modes(modes, "--modes"),
        splits=not fused_backward,
        slices=() if slices is None else _numbers_of_slices(slices, form),
        slice_by="length" if form is Format.LAYERS or slice_by is SliceChoice.LENGTH else "compute",
        machine=machine,
    )
    if machine is not None:
        return predict_model(model, options, machine, output, as_json)
    return profile_model(model, options, output, as_json)


def _numbers_of_slices(text: str, form: Format | None) -> list[int]:
    """The numbers of slices to measure: one for a problem. Raises InputError."""
    names = names_in(text)
    for name in names:
        if not name.isdecimal() or len(name) > MAX_DIGITS or int(name) < LEAST_SLICES:
            detail = f"holds {shown(name)}, but a sequence is cut into {LEAST_SLICES} slices or more."
            raise InputError([Issue("--slices", "out_of_range", detail)])
    if form is not Format.LAYERS and len(names) > 1:
        detail = f"holds {len(names)} numbers, but a problem has one number of slices. Maybe --format layers."
        raise InputError([Issue("--slices", "too_many", detail)])
    return [int(name) for name in names]


def _refuse(option: str, why: str, others: Mapping[str, object]) -> None:
    """Raise InputError for the options that have no effect together with `option`."""
    issues = [
        Issue(name, "meaningless", f"has no meaning here: {option} {why}. Maybe leave it out.")
        for name, value in others.items()
        if value is not None
    ]
    if issues:
        raise InputError(issues)


def profile_run(
    folder: Path,
    output: Path,
    microbatches: int | None,
    memory_bytes: int | None,
    margin: float,
    modes: Sequence[str] | None,
    reduce_every: int | None,
    as_json: bool,
) -> int:
    """Write the problem of a recorded run, and print its costs and what replicas add."""
    from optpipe.profile.from_run import join_records
    from optpipe.trace.record import load_records

    run = join_records(load_records(folder))
    problem = run.problem(microbatches, memory_bytes, margin, modes, reduce_every)
    write_atomically(output, problem.to_json() + "\n")
    budgets = [device.memory_bytes for device in problem.devices]
    if as_json:
        print_json(asdict(run) | {"output": str(output), "format": problem.format, "budgets_bytes": budgets})
        return 0
    console = stdout()
    console.print(f"{run.name}: {run.source}\n")
    times = table("stage", "device", *WITHOUT_MODES, "to the next", "back", "gather", "reduce")
    memory = table("stage", "activation", "kept for W", "may be offloaded", "parameters", "gathered", "gradients")
    for s, costs in enumerate(run.stages):
        found = [*(costs.times_us.get(kind) for kind in WITHOUT_MODES), *[*run.transfers_us, (None, None)][s]]
        found += [costs.times_us.get(kind) for kind in ("GATHER", "REDUCE")]
        times.add_row(str(s), str(run.placement[s]), *("-" if us is None else time_text(us) for us in found))
        held = (costs.activation_bytes, costs.backward_weight_bytes, costs.offload_bytes, costs.parameter_bytes)
        sizes = (*held, costs.replica.gathered_bytes, costs.replica.gradient_bytes)
        memory.add_row(str(s), *map(bytes_text, sizes))
    console.print(times)
    console.print("medians; gather and reduce are once a step, in the bubble of a trace and not in the problem\n")
    console.print(memory)
    for s, stage in enumerate(problem.stages):
        for mode in (one for one in stage.choices if one.recomputes):
            console.print(
                f"stage {s}, {mode.name}: keeps {bytes_text(mode.kept_bytes)} of "
                f"{bytes_text(stage.activation_bytes)}, C takes {time_text(mode.recompute_us)}"
            )
    if memory_bytes is not None:
        left = ", ".join(bytes_text(budget) for budget in budgets if budget is not None)
        console.print(f"left of {bytes_text(memory_bytes)} for activations: {left}")
    console.print(f"wrote {output} ({problem.format})")
    return 0


def profile_table(
    path: Path,
    output: Path,
    form: str | None,
    devices: int | None,
    stages: int | None,
    placement: str,
    microbatches: int | None,
    modes: Sequence[str] | None,
    as_json: bool,
) -> int:
    """Write the layer profile of a table, or the problem of a placement, and print costs and assumptions."""
    from optpipe.profile.size_table import SizeTable, assumptions, build_profile, copy_to_compute_ratio

    sizes = SizeTable.load(path)
    profile = build_profile(sizes)
    document: Problem | LayerProfile = profile
    if form != "layers":
        document = _problem(profile, devices, stages, placement, microbatches, modes)
    write_atomically(output, document.to_json() + "\n")
    ratio = copy_to_compute_ratio(profile)
    if as_json:
        print_json(
            {
                "output": str(output),
                "format": document.format,
                "layers": [layer.model_dump(mode="json") for layer in profile.layers],
                "copy_to_compute_ratio": ratio,
                "assumptions": assumptions(sizes),
            }
        )
        return 0
    print_layers(profile)
    console = stdout()
    if ratio is not None:
        verdict = "copies can hide behind compute" if ratio <= 1 else "copies take longer than compute"
        console.print(f"\nk = {ratio:.2f}: a layer's offload and reload over its F, B and W; {verdict} (PipeOffload)")
    console.print("\nassumed:")
    for sentence in assumptions(sizes):
        console.print(f"- {sentence}")
    console.print(f"wrote {output} ({document.format})")
    return 0


def _problem(
    profile: LayerProfile,
    devices: int | None,
    stages: int | None,
    placement_name: str,
    microbatches: int | None,
    modes: Sequence[str] | None,
) -> Problem:
    """Build the problem with the layers cut for the shortest step, by bounds and quick schedules.

    `modes` are those allowed (`parse_modes`); None: offload alone. Raises InputError if the layers do not fit.
    """
    from optpipe.partition import check_layer_modes
    from solver.layout.candidates import Search, candidates_of
    from solver.limits import Limits

    placed = devices_of_stages(placement_name, devices, stages)
    count, layers = max(placed) + 1, len(profile.each_layer)
    recomputing = [name for name in modes or () if name != "offload"]
    check_layer_modes(profile, recomputing, "--modes")
    sequences = (microbatches or 2 * count) * profile.microbatch_size
    offload = modes is None or "offload" in modes
    search = Search(count, sequences, [profile.microbatch_size], [placement_name], [offload], modes=recomputing)
    with doing_long(f"cutting {layers} layers into {len(placed)} stages"):
        cuts = [one for one in candidates_of(profile, search, Limits(CUT_S)) if one.problem]
    best = min(cuts, key=lambda one: one.rating.estimate_us if one.rating else inf, default=None)
    problem = best.problem if best else None
    if problem is None:
        memory = profile.memory_bytes
        most = f", and the parameters of a device's stages at most {bytes_text(memory)}" if memory is not None else ""
        detail = (
            f"gives {len(placed)} stages on {count} devices, into which {layers} layers do not fit: each stage needs "
            f"a layer{most}. Maybe use other numbers of stages or devices, or divide layers among more of them "
            "(parallel.tensor)."
        )
        raise InputError([Issue("--placement", "does_not_fit", detail)])
    return problem
