"""`optpipe profile`: costs of a model, computed from a table of sizes or measured on this hardware."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from optpipe.cli.console import (
    AsJson,
    doing,
    names_in,
    parse_share,
    parse_size,
    print_json,
    stderr,
    stdout,
    table,
)
from optpipe.cli.plan import MAX_DIGITS, SliceChoice
from optpipe.cli.profile_report import KINDS, print_check, print_slices, print_stages
from optpipe.cli.profile_report import document as measured_document
from optpipe.document import shown
from optpipe.errors import InputError, Issue, NoSolutionError, OptPipeError, needs_extra
from optpipe.files import check_writable, write_atomically
from optpipe.mode_names import IN_LOW_PRECISION, parse_modes
from optpipe.partition import devices_of_stages
from optpipe.units import us_text

if TYPE_CHECKING:
    from optpipe.layers import LayerProfile
    from optpipe.problem import Problem
    from optpipe.profile.measured import Measured
    from optpipe.profile.subject import Subject
    from optpipe.schedule import Schedule
    from optpipe.sequences import SliceBy


QUICK_METHODS = ("1f1b", "interleaved-1f1b", "zb-v", "ada-offload", "seq1f1b")
"""Methods tried for --check: each takes milliseconds, and the best schedule that the stages can run is used."""

TIMEOUT_SECONDS = 600.0
"""Timeout of collective operations under torchrun."""

LEAST_SLICES = 2
"""Least number of slices: one is the whole sequence, which is measured anyway."""


@dataclass(frozen=True)
class Options:
    """Options of a measured profile; `layers` applies only to the built-in GPT, the next three not to own stages."""

    devices: int | None
    stages: int | None
    placement: str
    microbatches: int | None
    as_layers: bool
    memory_bytes: int | None
    memory_margin: float
    data: str | None
    cut: str | None
    layers: int | None
    microbatch_size: int
    sequence: int | None
    dtype: Literal["float32", "float64", "bfloat16"]
    rounds: int
    clock: Literal["wall", "cpu"]
    check: bool
    modes: Sequence[str]
    splits: bool
    slices: Sequence[int]
    slice_by: SliceBy


def profile_model(model: str, options: Options, output: Path, as_json: bool) -> int:
    """Measure a model, write the profile and print its figures; under torchrun only rank 0 writes and prints."""
    with needs_extra("train", "measuring"):
        from optpipe.profile.subject import build_chain
    from optpipe.profile.measured import measure
    from optpipe.train.launch import launched, leads, one_core_left

    _check_options(options)
    import torch

    device = torch.device("cpu")
    if torch.cuda.is_available() and any(mode not in ("offload", *IN_LOW_PRECISION) for mode in options.modes):
        detail = "measures recomputation on CPUs alone so far. Maybe write stages[].modes into the problem."
        raise InputError([Issue("--modes", "not_measured", detail)])
    if torch.cuda.is_available() and options.slices:
        detail = "measures slices on CPUs alone so far. Maybe write slices and stages[].slice_factors into the problem."
        raise InputError([Issue("--slices", "not_measured", detail)])
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    subject, placed, each = _subject_and_placement(model, options)
    count = max(placed) + 1
    microbatches = options.microbatches or 2 * count
    with one_core_left(), launched(count, TIMEOUT_SECONDS) as launch:
        mine = {s for s, d in enumerate(placed) if d in launch.own_devices}
        with _progress(subject.name, leads()) as on_round:
            chain = build_chain(subject, device, microbatches, mine)
            measured = measure(
                subject,
                chain,
                placed,
                device,
                options.rounds,
                clock=options.clock,
                gather=launch.gather,
                on_round=on_round,
                modes=options.modes,
                splits=options.splits,
                slices=options.slices,
                slice_by=options.slice_by,
            )
        memory = options.memory_bytes, options.memory_margin
        problem = None if options.as_layers else measured.problem(microbatches, *memory)
        document = problem or measured.layers(*memory, each)
        if not leads():
            return 0
        write_atomically(output, document.to_json() + "\n")
        check = None
        if options.check and problem:
            from optpipe.profile.check import check_prediction

            schedule = _quick_schedule(measured, problem)
            cut = chain.in_slices(measured.slice_lengths) if measured.slice_lengths else [chain]
            with doing(f"running steps of {schedule.method}"):
                check = check_prediction(measured, cut, schedule, device, options.memory_margin)
    if as_json:
        print_json(measured_document(measured, check, output, document.format))
    else:
        console = stdout()
        console.print(measured.name)
        console.print(f"{measured.source}\n")
        print_stages(measured)
        if measured.slice_lengths:
            print_slices(measured)
        if check:
            print_check(check)
        console.print(f"wrote {output} ({document.format})")
    failures = check.failures if check else ()
    for failure in failures:
        print(f"error: memory is not as predicted: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _check_options(options: Options) -> None:
    """Raise InputError for options that exclude each other."""
    from optpipe.train.launch import under_torchrun

    issues = []
    if options.check and options.as_layers:
        detail = "needs a problem to schedule, but --format is layers. Maybe leave one of them out."
        issues.append(Issue("--check", "no_problem", detail))
    if options.check and under_torchrun():
        detail = "runs steps in one process. Maybe leave torchrun out, or use 'optpipe train --trace' under it."
        issues.append(Issue("--check", "many_processes", detail))
    if options.as_layers and under_torchrun():
        detail = "is layers, which one process measures. Maybe leave torchrun out."
        issues.append(Issue("--format", "many_processes", detail))
    if issues:
        raise InputError(issues)


Layers = Sequence[tuple[str, int]] | None
"""Names of all layers of a layer profile, each with the stage that is measured for it; None: one stage a layer."""


def _subject_and_placement(model: str, options: Options) -> tuple[Subject, Sequence[int], Layers]:
    """Build the model and the device of each of its stages; in a layer profile each layer has its own device."""
    from optpipe.profile.subject import load_subject, with_cut, with_samples

    if model.startswith("hf:"):
        return _hugging_face(model, options)
    if ":" in model:
        subject = load_subject(model)
        if options.data is not None:
            subject = with_samples(subject, options.data)
        if options.cut is not None:
            subject = with_cut(subject, options.cut, options.stages, "--cut")
        stages = len(subject.stages)
        if options.as_layers:
            return subject, range(stages), None
        if options.stages is not None and options.stages != stages:
            detail = f"is {options.stages}, but {model} returns {stages}. Maybe leave it out."
            raise InputError([Issue("--stages", "wrong_count", detail)])
        return subject, devices_of_stages(options.placement, options.devices, stages), None
    if options.as_layers:
        if options.layers is None:
            detail = "is missing, but a layer profile needs the number of layers. Maybe --layers 12."
            raise InputError([Issue("--layers", "missing", detail)])
        return _build_gpt(model, options, options.layers), range(options.layers), None
    placed = _placed(options)
    return _build_gpt(model, options, len(placed)), placed, None


def _placed(options: Options) -> Sequence[int]:
    """The device of each stage of a model that is cut into as many as are asked for."""
    devices = options.devices
    if devices is None and options.stages is None and "WORLD_SIZE" in os.environ:
        devices = int(os.environ["WORLD_SIZE"])  # under torchrun one device per process by default
    return devices_of_stages(options.placement, devices, options.stages)


def _hugging_face(model: str, options: Options) -> tuple[Subject, Sequence[int], Layers]:
    """Build the stages of a model of transformers; in a layer profile one layer of those that are equal."""
    from optpipe.models.hugging_face import SLICED, HuggingFace
    from optpipe.models.loss import LabelLoss, PerToken
    from optpipe.profile.subject import Subject, sampled
    from optpipe.train.config import ModelConfig
    from optpipe.train.tasks.hugging_face import HuggingFaceBatches

    config = ModelConfig(
        model,
        microbatch_size=options.microbatch_size,
        sequence=options.sequence,
        dtype=options.dtype,
        data=options.data,
    )
    placed = None if options.as_layers else _placed(options)
    count = None if placed is None else len(placed)
    found = HuggingFace(model, count, options.cut, dtype=config.torch_dtype, cut_field="--cut")
    batches = HuggingFaceBatches(found, config, None, 0)
    if options.slices and not found.takes_slices:
        detail = (
            f"is given, but {model} is a configuration of {found.config.model_type}: models with full causal attention "
            f"of {', '.join(SLICED)} take slices. Maybe leave it out."
        )
        raise InputError([Issue("--slices", "not_taken", detail)])
    inputs, labels = batches.batch(0)
    loss = PerToken(found.loss)
    if options.slices:  # the label of a slice's last position is in the next slice
        labels = [found.loss.shifted(label) for label in labels]
        loss = PerToken(LabelLoss(shift=False))
    batch = list(zip(inputs, loss.with_tokens(labels), strict=True))
    if placed is not None:
        stages, each = found.build_stages(sample=batch[0][0]), None
    else:
        alike = found.alike()
        measured = sorted({*alike})
        built = found.build_stages(measured)
        stages, placed = [built[u] for u in measured], range(len(measured))
        each = [(str(unit), measured.index(u)) for unit, u in zip(found.units, alike, strict=True)]
    return sampled(Subject(f"{batches.name}, {options.dtype}", stages, *batch[0], loss), batch), placed, each


def _build_gpt(model: str, options: Options, stages: int) -> Subject:
    """Build the GPT of a size, with a microbatch of text. Raises InputError for an unknown size or wrong options."""
    from optpipe.profile.subject import Subject
    from optpipe.train.config import SIZES, GPTShape, ModelConfig
    from optpipe.train.tasks.gpt import Batches, build_stages, byte_loss, gpt_name, standard_library_text

    layers = options.layers or stages
    issues = []
    if model not in SIZES:
        detail = f"is {model!r} but must be one of {', '.join(SIZES)}, hf:FOLDER, or package.module:callable."
        raise InputError([Issue("--model", "unknown", detail)])
    if layers < stages:
        detail = f"is {layers}, but there are {stages} stages, and each needs one. Maybe --layers {stages}."
        issues.append(Issue("--layers", "too_few", detail))
    longest = SIZES[model].sequence
    sequence = options.sequence or longest
    if sequence > longest:
        detail = f"is {sequence}, but the {model} model takes at most {longest}. Maybe --sequence {longest}."
        issues.append(Issue("--sequence", "too_long", detail))
    if issues:
        raise InputError(issues)
    shape = GPTShape(SIZES[model].width, SIZES[model].heads, sequence, layers)
    text = standard_library_text()
    batches = Batches(text, microbatches=1, size=options.microbatch_size, sequence=sequence, seed=0)
    [inputs], [targets] = batches.batch(0)
    modules = build_stages(shape, stages, 0, ModelConfig(dtype=options.dtype).torch_dtype)
    name = f"{gpt_name(model, layers, options.microbatch_size, sequence)}, {options.dtype}"
    return Subject(name, modules, inputs, targets, byte_loss)


def _quick_schedule(measured: Measured, problem: Problem) -> Schedule:
    """Return the best published schedule that the stages can run. Raises NoSolutionError."""
    from solver.solve import solve

    fused = {s for s, stage in enumerate(measured.stages) if not stage.splits}
    schedules, reasons = [], []
    for method in QUICK_METHODS:
        try:
            schedule = solve(problem, method)
        except OptPipeError as error:
            reasons.append(f"{method}: {error}")
            continue
        ops = (op for device in schedule.devices for op in device.compute.ops)
        if any(op.kind in ("B", "W") and op.stage in fused for op in ops):
            reasons.append(f"{method}: splits B and W of a compiled stage")
        else:
            schedules.append(schedule)
    if not schedules:
        raise NoSolutionError("no quick schedule for --check:\n" + "\n".join(reasons))
    return min(schedules, key=lambda schedule: schedule.value_us)


@contextmanager
def _progress(name: str, leads: bool) -> Iterator[Callable[[int, int], None]]:
    """Show the current round on stderr: a spinner on a terminal, else about five lines. Only rank 0 shows it."""
    if not leads:
        yield lambda _round, _rounds: None
    elif sys.stderr.isatty():
        with doing(f"measuring {name}") as status:
            yield lambda number, rounds: status.update(Text(f"measuring {name}: round {number + 1} of {rounds}"))
    else:

        def print_round(number: int, rounds: int) -> None:
            if number % max(1, rounds // 5) == 0:
                stderr().print(f"round {number + 1:>4} of {rounds}")

        yield print_round


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
        int | None, typer.Option(min=1, help="Bytes of text in a sequence; default: the model's maximum.")
    ] = None,
    dtype: Annotated[Precision | None, typer.Option(help="Precision of the GPT; default: float32.")] = None,
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
            "(selective with each number), and +offload behind full and these (what stays leaves). Default: offload."
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
    measures the stages of its device. With --from-run they were recorded in a trainer of yours. With --from-table costs
    are computed from sizes and rates, for hardware that is not available here.
    """
    check_writable(output)
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
    if from_run is not None:
        others: dict[str, object] = {"--devices": devices, "--stages": stages, "--from-table": from_table}
        others |= {"--model": model, "--format": form if form is Format.LAYERS else None} | gpt | measuring
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
        others = {"--model": model} | gpt | measuring | {"--modes": None}
        _refuse("--from-table", "takes everything from its table", others)
        names = None if modes is None else parse_modes(modes, "--modes")
        return profile_table(from_table, output, form, devices, stages, placement, microbatches, names, as_json)
    if model is None:
        maybe = "Maybe --model small, --from-run FOLDER or --from-table TABLE.toml."
        raise InputError([Issue("--model", "missing", f"is missing. {maybe}")])
    if model.startswith("hf:"):
        _refuse("--model", f"is {model}, whose configuration decides it", {"--layers": layers})
    elif ":" in model:
        _refuse("--model", f"is {model}, whose callable decides it", gpt)
    else:
        _refuse("--model", f"is {model}, which has its own text", {"--data": data})
        _refuse("--model", f"is {model}, whose layers are spread evenly", {"--cut": cut})
    if form is Format.LAYERS:
        _refuse("--format", "is layers, which are not cut", {"--cut": cut if model.startswith("hf:") else None})
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
    )
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
    times = table("stage", "device", *(f"{kind} (us)" for kind in KINDS), "to the next", "back", "gather", "reduce")
    memory = table("stage", "activation bytes", "kept for W", "may leave", "parameter bytes", "gathered", "gradients")
    for s, costs in enumerate(run.stages):
        found = [*(costs.times_us.get(kind) for kind in KINDS), *[*run.transfers_us, (None, None)][s]]
        found += [costs.times_us.get(kind) for kind in ("GATHER", "REDUCE")]
        times.add_row(str(s), str(run.placement[s]), *("-" if us is None else f"{us:,.1f}" for us in found))
        held = (costs.activation_bytes, costs.backward_weight_bytes, costs.offload_bytes, costs.parameter_bytes)
        sizes = (*held, costs.replica.gathered_bytes, costs.replica.gradient_bytes)
        memory.add_row(str(s), *(f"{size:,}" for size in sizes))
    console.print(times)
    console.print("medians; gather and reduce are once a step, in the bubble of a trace and not in the problem\n")
    console.print(memory)
    for s, stage in enumerate(problem.stages):
        for mode in stage.modes:
            console.print(
                f"stage {s}, {mode.name}: keeps {mode.kept_bytes:,} of {stage.activation_bytes:,} bytes, C takes "
                f"{mode.recompute_us:,.1f} us"
            )
    if memory_bytes is not None:
        left = ", ".join(f"{budget:,}" for budget in budgets if budget is not None)
        console.print(f"left of {memory_bytes:,} bytes for activations: {left}")
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
    from optpipe.profile.cost_model import SizeTable, assumptions, build_profile, copy_to_compute_ratio

    sizes = SizeTable.load(path)
    profile = build_profile(sizes)
    document: Problem | LayerProfile = profile
    if form == "problem" or (form is None and not (devices is None and stages is None)):
        document = _problem(profile, devices, stages, placement, microbatches, modes)
    elif modes is not None:
        _refuse("--format", "is layers, which say what each keeps if it is recomputed", {"--modes": modes})
    write_atomically(output, document.to_json() + "\n")
    ratio = None if sizes.machine.copy_gb_per_s is None else copy_to_compute_ratio(sizes)
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
    rows = table("layer", "times", "F", "B", "W", "activation bytes", "kept for W", "may leave", "parameter bytes")
    for layer in profile.layers:
        times = (layer.forward_us, layer.backward_input_us, layer.backward_weight_us)
        held = (layer.activation_bytes, layer.backward_weight_bytes, layer.offload_bytes, layer.parameter_bytes)
        rows.add_row(layer.name, str(layer.repeat), *map(us_text, times), *(f"{size:,}" for size in held))
    console = stdout()
    console.print(rows)
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
    """Build the problem with the layers cut so that the busiest device has the least work.

    `modes` are those allowed (`parse_modes`); None: offload alone.

    Falls back to an even cut if no balanced one is found. Raises InputError if the layers do not fit.
    """
    from optpipe.partition import Batching, Partition, build_problem, check_layer_modes
    from solver.layout.candidates import balanced_sizes, even_sizes

    placed = devices_of_stages(placement_name, devices, stages)
    count, layers = max(placed) + 1, len(profile.each_layer)
    recomputing = [name for name in modes or () if name != "offload"]
    check_layer_modes(profile, recomputing, "--modes")
    problem = None
    if len(placed) <= layers:
        batching = Batching(profile.microbatch_size, microbatches or 2 * count)
        sizes = balanced_sizes(profile, placed) or even_sizes(layers, len(placed))
        offload = modes is None or "offload" in modes
        problem = build_problem(profile, Partition(sizes, placed), batching, offload=offload, modes=recomputing)
    if problem is None:
        detail = (
            f"gives {len(placed)} stages on {count} devices, into which {layers} layers do not fit: each stage needs "
            f"a layer, and the parameters of a device's stages at most {profile.memory_bytes:,} bytes. Maybe use "
            "other numbers of stages or devices, or divide layers among more of them (parallel.tensor)."
        )
        raise InputError([Issue("--placement", "does_not_fit", detail)])
    return problem
