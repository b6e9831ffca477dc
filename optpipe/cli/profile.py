"""`optpipe profile`: costs of a model, by formula from a table of sizes or measured on this hardware."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from optpipe.cli.console import (
    AsJson,
    doing,
    parse_share,
    parse_size,
    print_json,
    stderr,
    stdout,
    table,
)
from optpipe.errors import InputError, Issue, NoSolutionError, OptPipeError, needs_extra
from optpipe.files import check_writable, write_atomically
from optpipe.partition import devices_of_stages
from optpipe.units import share_text, us_text

if TYPE_CHECKING:
    import torch

    from optpipe.layers import LayerProfile
    from optpipe.problem import Problem
    from optpipe.profile.check import Check
    from optpipe.profile.cost_model import SizeTable
    from optpipe.profile.measured import Measured, StageFigures
    from optpipe.profile.ops import Spread
    from optpipe.profile.subject import Chain, Subject
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
        from optpipe.profile.subject import build_chain
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
            )
        memory = options.memory_bytes, options.memory_margin
        problem = None if options.as_layers else measured.problem(microbatches, *memory)
        document = problem or measured.layers(*memory)
        if not leads():
            return 0
        write_atomically(output, document.to_json() + "\n")
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
    from optpipe.train.config import SIZES, GPTShape, ModelConfig
    from optpipe.train.tasks.gpt import Batches, build_stages, byte_loss, gpt_name, standard_library_text

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
    from solver.solve import solve

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


class Precision(StrEnum):
    """Precision of weights and activations."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Format(StrEnum):
    """The document that is written."""

    PROBLEM = "problem"
    LAYERS = "layers"


class ClockChoice(StrEnum):
    """What times the ops on the CPU."""

    WALL = "wall"
    CPU = "cpu"


def command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile goes.", metavar="FILE.json")],
    from_table: Annotated[
        Path | None, typer.Option(help="Nothing is measured: sizes and rates are read here.", metavar="TABLE.toml")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="tiny, small or medium (our GPT), or your own as module:callable.", metavar="MODEL"),
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Default: a problem where it is known how many stages there are.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, max=4096, help="Devices of the pipeline.")] = None,
    stages: Annotated[int | None, typer.Option(min=1, max=4096, help="Stages, instead of devices.")] = None,
    placement: Annotated[str, typer.Option(help="linear, interleaved-N, v or v-N.")] = "linear",
    microbatches: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="In a step; default: two a device.")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            help="Of a device: parameters with gradients and Adam's moments are taken off and the rest is the budget; "
            "messages that wait for their op come on top. Default: no limit.",
            metavar="SIZE",
        ),
    ] = None,
    memory_margin: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            help="Share of --memory to leave free, for sizes that depend on the data; default: 0%.",
            metavar="10%",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Called with 0, returns microbatches to measure with, as 'train' has it.", metavar="module:callable"
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=2000, help="Blocks of our GPT; default: one a stage.")
    ] = None,
    microbatch_size: Annotated[int | None, typer.Option(min=1, max=4096, help="Sequences; default: 4.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Bytes of text in one; default: the longest.")] = None,
    dtype: Annotated[Precision | None, typer.Option(help="Precision of our GPT; default: float32.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="How often each op is timed, after warm-up; default: 10.")
    ] = None,
    clock: Annotated[
        ClockChoice | None,
        typer.Option(help="cpu: the computing thread's time, which a busy machine does not lengthen; default: wall."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Run steps and compare with what is predicted; exit code 1 if peaks differ."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Find out what a model's stages cost: times, memory, transfers. Writes a problem to solve, or layers to plan.

    From a table of sizes (--from-table) by formula, for machines that are not at hand; or measured here (--model), with
    the code that runs in training. Under torchrun each process measures the stages of its device.
    """
    check_writable(output)
    our_gpt: dict[str, object] = {
        "--layers": layers,
        "--microbatch-size": microbatch_size,
        "--sequence": sequence,
        "--dtype": dtype,
    }
    measuring: dict[str, object] = {
        "--memory": memory,
        "--memory-margin": memory_margin,
        "--data": data,
        "--rounds": rounds,
        "--clock": clock,
        "--check": check or None,
    }
    if from_table is not None:
        _refuse("--from-table", "measures nothing and has all from its table", {"--model": model} | our_gpt | measuring)
        return profile_table(from_table, output, form, devices, stages, placement, microbatches, as_json)
    if model is None:
        raise InputError([Issue("--model", "missing", "is missing. Maybe --model small, or --from-table TABLE.toml.")])
    if ":" in model:
        _refuse("--model", f"is {model}, whose callable decides that", our_gpt)
    else:
        _refuse("--model", f"is {model}, which has its own text", {"--data": data})
    if memory is None:
        _refuse("--memory", "is not given", {"--memory-margin": memory_margin})
    options = Options(
        devices=devices,
        stages=stages,
        placement=placement,
        microbatches=microbatches,
        as_layers=form is Format.LAYERS,
        memory_bytes=memory,
        memory_margin=memory_margin or 0.0,
        data=data,
        layers=layers,
        microbatch_size=microbatch_size or 4,
        sequence=sequence,
        dtype=(dtype or Precision.FLOAT32).value,
        rounds=rounds or 10,
        clock=(clock or ClockChoice.WALL).value,
        check=check,
    )
    return profile_model(model, options, output, as_json)


def _refuse(option: str, why: str, others: Mapping[str, object]) -> None:
    """Raise InputError about the options that were given but mean nothing beside `option`."""
    issues = [
        Issue(name, "meaningless", f"has no meaning here: {option} {why}. Maybe leave it out.")
        for name, value in others.items()
        if value is not None
    ]
    if issues:
        raise InputError(issues)


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
    from optpipe.profile.cost_model import SizeTable, build_profile

    sizes = SizeTable.load(path)
    profile = build_profile(sizes)
    problem = None
    wants_problem = form == "problem" or (form is None and not (devices is None and stages is None))
    if wants_problem:
        problem = _problem(profile, devices, stages, placement, microbatches)
    written = problem or profile
    write_atomically(output, written.to_json() + "\n")
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
    from optpipe.partition import Batching, Partition, build_problem, devices_of_stages
    from solver.layout.candidates import balanced_sizes, even_sizes

    placed = devices_of_stages(placement_name, devices, stages)
    count, layers = max(placed) + 1, len(profile.each_layer)
    problem = None
    if len(placed) <= layers:
        batching = Batching(profile.microbatch_size, microbatches or 2 * count)
        sizes = balanced_sizes(profile, placed) or even_sizes(layers, len(placed))
        problem = build_problem(profile, Partition(sizes, placed), batching, offload=True)
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
    from optpipe.cli.trace import document

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
