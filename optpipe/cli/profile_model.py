"""Measurement of a model by `optpipe profile`: its stages, the profile that is written, and the check of a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.text import Text

from optpipe.cli.console import doing, doing_long, print_json, stderr, stdout
from optpipe.cli.profile_report import document as measured_document
from optpipe.cli.profile_report import print_check, print_layers, print_slices, print_stages
from optpipe.errors import InputError, Issue, NoSolutionError, OptPipeError, needs_extra
from optpipe.files import write_atomically
from optpipe.mode_names import IN_LOW_PRECISION
from optpipe.placement import devices_of_stages

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.profile.subject import Subject
    from optpipe.schedule import Schedule
    from optpipe.sequences import SliceBy

QUICK_METHODS = ("1f1b", "interleaved-1f1b", "zb-v", "ada-offload", "seq1f1b")
"""Methods tried for --check: each takes milliseconds, and the best schedule that the stages can run is used."""

TIMEOUT_SECONDS = 600.0
"""Timeout of collective operations under torchrun."""


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
    machine: str | None = None


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

            schedule = _quick_schedule(problem)
            cut = chain.in_slices(measured.slice_lengths) if measured.slice_lengths else [chain]
            with doing_long(f"running steps of {schedule.method}"):
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


def predict_model(model: str, options: Options, machine: str, output: Path, as_json: bool) -> int:
    """Predict the layers of a model on a machine, write the profile and print its figures."""
    from optpipe.cluster.machine import Machine

    with needs_extra("train", "running models without values"):
        from optpipe.profile.predicted import predict_layers
    from optpipe.profile.measured import without_margin
    from optpipe.profile.without_values import WithoutValues
    from optpipe.train.launch import under_torchrun

    if under_torchrun():
        detail = "is given, but one process predicts all layers. Maybe leave torchrun out."
        raise InputError([Issue("--machine", "many_processes", detail)])
    known, run = Machine.load(machine), WithoutValues()
    with doing_long(f"running {model} without values"):
        with nullcontext() if model.startswith("hf:") else run:
            subject, _, each = _subject_and_placement(model, options)
        memory_bytes = options.memory_bytes and without_margin(options.memory_bytes, options.memory_margin)
        profile = predict_layers(run, subject, known, each, options.modes, memory_bytes)
    write_atomically(output, profile.to_json() + "\n")
    if as_json:
        print_json({"output": str(output)} | profile.to_data())
        return 0
    console = stdout()
    console.print(profile.name)
    console.print(f"{profile.source}\n")
    print_layers(profile)
    console.print(f"wrote {output} ({profile.format})")
    return 0


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
    from optpipe.partition import name_with_sizes
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
    compared = list(zip(inputs, labels, strict=True))
    loss = PerToken(found.loss)
    if options.slices:  # the label of a slice's last position is in the next slice
        labels = [found.loss.shifted(label) for label in labels]
        loss = PerToken(LabelLoss(shift=False))
    batch = list(zip(inputs, loss.with_tokens(labels), strict=True))
    if placed is not None:
        stages, each = found.build_stages(None, compared), None
    else:
        alike = found.alike()
        measured = sorted({*alike})
        if options.machine is not None:  # a layer that has no values computes nothing to compare
            compared = []
        built = found.build_stages(() if options.machine is not None else measured, compared)
        stages, placed = [built[u] for u in measured], range(len(measured))
        each = [(str(unit), measured.index(u)) for unit, u in zip(found.units, alike, strict=True)]
    name = f"{batches.name}, {options.dtype}"
    name = name if options.cut is None else name_with_sizes(name, found.sizes)
    subject = Subject(name, stages, *batch[0], loss, compared=len(compared))
    return sampled(subject, batch), placed, each


def _build_gpt(model: str, options: Options, stages: int) -> Subject:
    """Build the GPT of a size, with a microbatch of text. Raises InputError for an unknown size or wrong options."""
    from optpipe.partition import name_with_sizes
    from optpipe.profile.subject import Subject
    from optpipe.train.config import SIZES, GPTShape, ModelConfig
    from optpipe.train.tasks.gpt import Batches, build_stages, byte_loss, gpt_name, gpt_sizes, standard_library_text

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
    sizes = gpt_sizes(shape, stages, options.cut, "--cut")
    modules = build_stages(shape, sizes, 0, ModelConfig(dtype=options.dtype).torch_dtype)
    name = f"{gpt_name(model, layers, options.microbatch_size, sequence)}, {options.dtype}"
    name = name if options.cut is None else name_with_sizes(name, sizes)
    return Subject(name, modules, inputs, targets, byte_loss)


def _quick_schedule(problem: Problem) -> Schedule:
    """Return the best published schedule of a problem. Raises NoSolutionError."""
    from solver.solve import solve

    schedules, reasons = [], []
    for method in QUICK_METHODS:
        try:
            schedules.append(solve(problem, method))
        except OptPipeError as error:
            reasons.append(f"{method}: {error}")
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
