"""`optpipe profile --model`: a model's stages measured on this hardware, and the prediction held against real steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.text import Text

from optpipe.cli.output import doing, print_json, stderr, write_whole
from optpipe.errors import InputError, Issue, NoSolutionError, OptPipeError
from optpipe.extras import needs_extra
from optpipe.placements import devices_of_stages

if TYPE_CHECKING:
    import torch

    from optpipe.problem import Problem
    from optpipe.profile.chain import Chain
    from optpipe.profile.check import Check
    from optpipe.profile.measured import Measured
    from optpipe.profile.subject import Subject
    from optpipe.schedule import Schedule

QUICK_METHODS = ("1f1b", "interleaved-1f1b", "zb-v", "ada-offload")
"""Tried for --check, the best of those that can handle the problem taken: each takes milliseconds."""

TIMEOUT_SECONDS = 600.0
"""Under torchrun: how long to wait for another process."""


@dataclass(frozen=True)
class Options:
    """What was asked for; `layers` and what follows up to `dtype` are about our own models."""

    devices: int | None
    stages: int | None
    placement: str
    microbatches: int | None
    as_layers: bool
    memory_bytes: int | None
    memory_margin: float
    data: str | None
    layers: int | None
    microbatch_size: int
    sequence: int | None
    dtype: Literal["float32", "float64"]
    rounds: int
    clock: Literal["wall", "cpu"]
    check: bool


def profile_model(model: str, options: Options, output: Path, as_json: bool) -> int:
    """Measure, write, and say what was found; under torchrun rank 0 alone writes and prints."""
    with needs_extra("train", "measuring"):
        from optpipe.profile.chain import chain_of
    from optpipe.cli.profile_report import figures, print_figures
    from optpipe.profile.measured import measure
    from optpipe.train.launch import launched, leads, one_core_left

    _refuse_what_does_not_go_together(options)
    device = _device()
    subject, placed = _subject_and_placement(model, options)
    count = max(placed) + 1
    microbatches = options.microbatches or 2 * count
    with one_core_left(), launched(count, TIMEOUT_SECONDS) as launch:
        mine = {s for s, d in enumerate(placed) if d in launch.own_devices}
        with _progress(subject.name, leads()) as on_round:
            chain = chain_of(subject, device, microbatches, mine)
            measured = measure(
                subject,
                chain,
                placed,
                device,
                options.rounds,
                clock=options.clock,
                gather=launch.gather,
                on_round=on_round,
            )
        memory = options.memory_bytes, options.memory_margin
        problem = None if options.as_layers else measured.problem(microbatches, *memory)
        document = problem or measured.layers(*memory)
        if not leads():
            return 0
        write_whole(output, document.to_json() + "\n")
        check = _check(measured, chain, problem, device, options.memory_margin) if options.check and problem else None
    if as_json:
        print_json(figures(measured, check, output, document.format))
    else:
        print_figures(measured, check, output, document.format)
    failures = check.failures if check else ()
    for failure in failures:
        print(f"error: memory is not as predicted: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _check(measured: Measured, chain: Chain, problem: Problem, device: torch.device, margin: float) -> Check:
    from optpipe.profile.check import check_prediction

    schedule = _quick_schedule(measured, problem)
    with doing(f"running steps of {schedule.method}"):
        return check_prediction(measured, chain, schedule, device, margin)


def _refuse_what_does_not_go_together(options: Options) -> None:
    from optpipe.train.launch import under_torchrun

    issues = []
    if options.check and options.as_layers:
        issues.append(Issue("--check", "no_problem", "needs a problem to schedule, but --format is layers."))
    if options.check and under_torchrun():
        detail = "runs steps in one process. Maybe leave torchrun out, or use 'optpipe train --trace' under it."
        issues.append(Issue("--check", "many_processes", detail))
    if options.as_layers and under_torchrun():
        detail = "is layers, which one process measures. Maybe leave torchrun out."
        issues.append(Issue("--format", "many_processes", detail))
    if issues:
        raise InputError(issues)


def _device() -> torch.device:
    """This process's GPU where torch can use one, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _subject_and_placement(model: str, options: Options) -> tuple[Subject, Sequence[int]]:
    """The model, and the device of each of its stages; for a layer profile each layer has one of its own."""
    from optpipe.profile.subject import load_subject, with_samples

    if ":" in model:
        subject = load_subject(model)
        if options.data is not None:
            subject = with_samples(subject, options.data)
        stages = len(subject.stages)
        if options.as_layers:
            return subject, range(stages)
        if options.stages is not None and options.stages != stages:
            detail = f"is {options.stages}, but {model} returns {stages}. Maybe leave it out."
            raise InputError([Issue("--stages", "wrong_count", detail)])
        return subject, devices_of_stages(options.placement, options.devices, stages)
    if options.as_layers:
        if options.layers is None:
            raise InputError([Issue("--layers", "missing", "is missing: a layer profile needs to know how many.")])
        return _our_gpt(model, options, options.layers), range(options.layers)
    placed = devices_of_stages(options.placement, options.devices or _world(options.stages), options.stages)
    return _our_gpt(model, options, len(placed)), placed


def _world(stages: int | None) -> int | None:
    """Under torchrun there are as many devices as processes, unless something else is said."""
    return int(os.environ["WORLD_SIZE"]) if stages is None and "WORLD_SIZE" in os.environ else None


def _our_gpt(model: str, options: Options, stages: int) -> Subject:
    """Our GPT of that size, on a microbatch of text."""
    from optpipe.profile.subject import Subject
    from optpipe.train.config import ModelConfig
    from optpipe.train.gpt import SIZES, GPTShape, build_stages, byte_loss, gpt_name
    from optpipe.train.text import Batches, standard_library_text

    layers = options.layers or stages
    issues = []
    if model not in SIZES:
        detail = f"is {model!r} but must be one of {', '.join(SIZES)}, or package.module:callable."
        raise InputError([Issue("--model", "unknown", detail)])
    if layers < stages:
        issues.append(Issue("--layers", "too_few", f"is {layers}, but there are {stages} stages, and each needs one."))
    longest = SIZES[model].sequence
    sequence = options.sequence or longest
    if sequence > longest:
        issues.append(Issue("--sequence", "too_long", f"is {sequence}, but the {model} model takes at most {longest}."))
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
    """The best of the published schedules that the stages can run."""
    from solver.portfolio import solve

    fused = {s for s, stage in enumerate(measured.stages) if not stage.splits}
    found, reasons = [], []
    for method in QUICK_METHODS:
        try:
            schedule = solve(problem, method)
        except OptPipeError as error:
            reasons.append(f"{method}: {error}")
            continue
        ops = (op for device in schedule.devices for op in device.compute.ops)
        if any(op.kind in ("B", "W") and op.stage in fused for op in ops):
            reasons.append(f"{method}: has B and W apart on a compiled stage")
        else:
            found.append(schedule)
    if not found:
        raise NoSolutionError("no quick schedule for --check:\n" + "\n".join(reasons))
    return min(found, key=lambda schedule: schedule.value_us)


@contextmanager
def _progress(name: str, leads: bool) -> Iterator[Callable[[int, int], None]]:
    """Says on stderr which round runs: a changing line on a terminal, about five lines elsewhere."""
    if not leads:
        yield lambda _round, _rounds: None
    elif sys.stderr.isatty():
        with doing(f"measuring {name}") as status:
            yield lambda number, rounds: status.update(Text(f"measuring {name}: round {number + 1} of {rounds}"))
    else:
        yield _print_round


def _print_round(number: int, rounds: int) -> None:
    if number % max(1, rounds // 5) == 0:
        stderr().print(f"round {number + 1:>4} of {rounds}")
