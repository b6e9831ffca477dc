"""Check of a step against the reference step (plain autograd, no pipeline), evaluation, and one recorded step."""

from __future__ import annotations

import logging
import math
import platform
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from statistics import median

import torch
from torch import Tensor, nn

from optpipe.compile.memory import PlannedMemory, planned_memory, planned_peaks_bytes
from optpipe.compile.program import Program
from optpipe.errors import OptPipeError, TrainingError
from optpipe.kinds import HALVES, INSIDE, RECOMPUTATIONS
from optpipe.mode_names import IN_LOW_PRECISION, without_offload
from optpipe.partition import cut_in_name
from optpipe.profile.measured import Measured
from optpipe.profile.subject import random_gradient
from optpipe.profile.undeferred import Undeferred, measure_undeferred
from optpipe.runtime import module_state, probe
from optpipe.runtime.activations import LOW_PRECISIONS, storage_key
from optpipe.runtime.loss import Loss, total_loss
from optpipe.runtime.messages import Tree, leaves, map_leaves, message_spec, size_bytes, spec_text
from optpipe.runtime.probe import (
    StageSizes,
    measure_samples,
    measure_slices,
    measure_stage,
    size_range,
    stages_of_slice,
    with_measured_sizes,
)
from optpipe.runtime.recorder import MemoryMeter
from optpipe.runtime.rng import RandomNumbers
from optpipe.runtime.shapes import MessageShapes
from optpipe.runtime.stage import storages
from optpipe.runtime.trace_step import record_step
from optpipe.runtime.weight_gradients import undeferred_layers
from optpipe.trace import Trace
from optpipe.trace.document import Part, assemble
from optpipe.train.launch import hardware_name
from optpipe.train.model import Model, moved
from optpipe.train.result import CheckResult, DeviceMemory
from optpipe.train.tasks.base import Batch
from optpipe.train.vocabulary import ROWS
from optpipe.units import bytes_text

LOG = logging.getLogger("optpipe.train")

GRADIENT_LIMITS = {"float64": 1e-12, "float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""A check fails beyond these, where rounding is not measured to explain more: what re-ordered sums can differ by.

In low precision that is two roundings, of eps / 2 each, where a kernel sums in another order before them.
"""

LIMITS_OF_COPIES = {"bf16": 2.0**-8, "fp8": 2.0**-4}
"""The same where activations come back in low precision: the rounding of one entry. Sums mostly differ by less."""

AUTOCAST_LIMIT_ON_CPU = 1e-5
"""There the order is the same: the error was below 1e-6, and a step that left autocast out differs by 0.006."""

MOST_OF_ROUNDING = 0.25
"""Rounding changes most gradients by less: 0.04 was measured for copies in fp8, which have 4 bits."""

ROUNDINGS = 2
"""Multiples of the effect of rounding (`_rounding_effects`) that explain an error.

The schedule and the plain step round different sums. If E is what rounding does to the plain one, then both differ by
about E from what there would be without, and by the triangle inequality at most by 2 E from each other. E has in it
what no constant has: how many numbers an entry of the gradient sums, in which precision, and how far they cancel out.
"""


LIMIT_OF_NOISE = 16.0
"""Where rounding changes more of a gradient, it is rounding alone, as those of key biases are, which softmax cancels.

Then its size can be compared, and no digit of it. Only where the schedule rounds otherwise than the plain step.
"""

SCALE = 3.0
"""Factor of the loss, not a power of two, of a plain step that rounds otherwise."""


def check_step(model: Model, plain_modules: Sequence[nn.Module], batch: Batch) -> CheckResult:
    """Run one batch once through `plain_modules` and twice through the schedule, and compare.

    `plain_modules` have the weights of the model and are on its hardware. The first run through the schedule is
    compared; the second, after it, shows peaks and leaks without the caches that modules make at first. Where stages
    are compiled, it runs once more. Called by all processes together,
    with the same result. Raises TrainingError if no parameter is trainable or an action of the schedule fails.
    """
    if not any(parameter.requires_grad for module in plain_modules for parameter in module.parameters()):
        raise TrainingError(
            "no parameter of the model requires a gradient, so there is none to check. Maybe unfreeze some, or leave "
            "the check out."
        )
    planned, scheduled = planned_peaks(model, batch), scheduled_memory(model)
    if scheduled is None and model.shapes is None and model.launch.rank == 0:
        LOG.info(
            "peaks are not held against the schedule's sizes and budgets: its problem is named %r, but a profile of "
            "this model is named %r. Maybe solve what 'optpipe profile' measures of this model.",
            model.problem.name,
            model.task.name,
        )
    plain_batch, autocast = moved(batch, model.hardware), model.config.model.torch_autocast
    next_run = model.step_number * model.config.accumulate + 1  # the pipeline counts a run when it begins

    def drawing(stage: int, microbatch: int) -> AbstractContextManager[None]:
        replica, own = divmod(microbatch, model.microbatches)  # each replica draws for its own microbatches
        run, own = divmod(own, model.program.microbatches)
        numbers = RandomNumbers(model.config.seed + replica, stage)
        numbers.step = next_run + run
        return numbers.of(own, model.hardware)

    with module_state.unchanged([*plain_modules, model.task.loss], model.hardware):
        plain_loss = reference_step(plain_modules, model.task.loss, *plain_batch, autocast, drawing)
    limits = _gradient_limits(model, plain_modules, plain_batch, plain_loss, drawing)
    first, second = MemoryMeter(), MemoryMeter()
    with unchanged(model):
        losses = model.run(*model.own_part(batch), first)
        errors = gradient_errors(model, plain_modules)
        left_bytes = {d: first.live_bytes[d] for d in model.devices}
        model.run(*model.own_part(batch), second)
        # Less what it has freed of the first step's: a forward may replace a buffer.
        grown_bytes = {d: second.live_bytes[d] + first.live_bytes[d] - left_bytes[d] for d in model.devices}
    if any(model.launch.gather(not all(stage.splits for stage in model.stages.values()))):
        with unchanged(model):  # once more: under a meter the code of torch.compile does not run
            losses = model.run(*model.own_part(batch))
        errors = gradient_errors(model, plain_modules)
    loss = model.mean_loss(model.launch.sum(losses))
    memory = [
        {
            "peak_bytes": second.peak_bytes[d],
            "planned_peak_bytes": planned[d],
            "live_bytes": [left_bytes[d], grown_bytes[d]],
            "host_peak_bytes": model.pipeline.host_slabs[d].peak_bytes,
            "schedule_peak_bytes": scheduled[d].peak_bytes if scheduled else None,
            "budget_bytes": scheduled[d].budget_bytes if scheduled else None,
        }
        for d in model.devices
    ]
    own = {
        "worst": max((one for one in errors if limits[one[1]] != LIMIT_OF_NOISE), default=(0.0, "")),
        "beyond": max(((error / limits[name], error, limits[name], name) for error, name in errors), default=None),
        "devices": memory,
    }
    ranks = model.launch.gather(own)
    error, parameter = max(tuple(rank["worst"]) for rank in ranks)
    beyond = max(tuple(rank["beyond"]) for rank in ranks if rank["beyond"] is not None)
    devices = [
        DeviceMemory(**device | {"live_bytes": tuple(device["live_bytes"])})
        for rank in ranks[: model.launch.pipeline_processes]
        for device in rank["devices"]
    ]
    result = CheckResult(error, parameter, relative_error(abs(loss - plain_loss), abs(plain_loss)), tuple(devices))
    return replace(result, failures=(*_gradient_failures(*beyond), *_memory_failures(result, model)))


@contextmanager
def unchanged(model: Model) -> Iterator[None]:
    """Restore what running the pipeline changes besides gradients."""
    step = model.step_number
    with probe.unchanged(model.stages.values(), gradients=False):
        try:
            yield
        finally:
            model.step_number = step


def planned_peaks(model: Model, batch: Batch) -> list[int]:
    """Peak bytes of each device by the program's order, with the sizes of this model's stages measured one by one.

    Each stage is measured with the messages that the stages before it send. Where sizes depend on the data, the largest
    over all microbatches of the batch counts; where microbatches differ, each has sizes of its own.
    """
    inputs, targets = model.own_part(batch)
    received = _received(model, inputs, targets)
    if model.program.slices > 1:
        return _planned_peaks_of_slices(model, received, model.cut(inputs, targets)[1])
    if model.shapes is not None:
        return _planned_peaks_of_unequal(model, model.shapes, inputs, targets, received)
    own_sizes = {}
    for s, stage in model.stages.items():
        samples = list(zip(received.pop(s), targets, strict=True))
        modes = _recomputing_modes(model.program, s)
        own_sizes[str(s)] = asdict(measure_samples(stage, samples, *model.messages_at(s), modes=modes).largest)
    sizes: dict[int, list[StageSizes]] = defaultdict(list)
    for entry in model.launch.gather(own_sizes):  # of all replicas, each with its own part of the batch
        for s, size in entry.items():
            sizes[int(s)].append(StageSizes.from_data(size))
    measured = with_measured_sizes(model.problem, [size_range(sizes[s]).largest for s in sorted(sizes)])
    if model.vocabulary is not None:
        measured = model.vocabulary.with_sizes(measured, model.messages[-1])
    # Microbatches are of one shape here, whatever factors the schedule was planned with.
    of_units = [measured.stages] * model.program.microbatches
    return planned_peaks_bytes(model.program, measured, model.message_bytes, of_units=of_units)


def _planned_peaks_of_slices(
    model: Model, received: Mapping[int, Sequence[Tree]], targets: Sequence[Tree]
) -> list[int]:
    """Peak bytes of each device with the sizes of each slice of the first microbatch."""
    slices = model.program.slices
    own_sizes = {}
    for s, stage in model.stages.items():
        samples = list(zip(received[s][:slices], targets[:slices], strict=True))
        measured = measure_slices(
            stage, samples, model.messages_of_slices(s), modes=_recomputing_modes(model.program, s)
        )
        own_sizes[str(s)] = [asdict(size) for size in measured]
    sizes = {
        int(s): [StageSizes.from_data(size) for size in of_stage]
        for rank in model.launch.gather_pipeline(own_sizes)
        for s, of_stage in rank.items()
    }
    of_slices = [stages_of_slice(model.problem, [sizes[s][q] for s in sorted(sizes)]) for q in range(slices)]
    of_units = of_slices * model.program.microbatches
    return planned_peaks_bytes(model.program, model.problem, model.message_bytes, of_units=of_units)


def _planned_peaks_of_unequal(
    model: Model,
    shapes: MessageShapes,
    inputs: Sequence[Tree],
    targets: Sequence[Tree],
    received: dict[int, Sequence[Tree]],
) -> list[int]:
    """Peak bytes of each device in the first run of the schedule, with the sizes of each microbatch."""
    m = model.program.microbatches
    order = model.order_of(inputs[:m]) or range(m)
    texts = [spec_text(message_spec(inputs[i])) for i in order]
    firsts = dict(zip(texts, order, strict=True))  # one microbatch of each shape
    own_sizes = {}
    for s, stage in model.stages.items():
        modes = _recomputing_modes(model.program, s)
        own_sizes[str(s)] = [
            asdict(
                measure_stage(
                    stage,
                    (received[s][i], targets[i]),
                    *model.messages_at(s, inputs[i]),
                    zeros=False,
                    modes=modes,
                )
            )
            for i in firsts.values()
        ]
        del received[s]
    launch = model.launch
    first = launch.replica * launch.pipeline_processes  # of the processes of this replica
    ranks = launch.gather(own_sizes)[first : first + launch.pipeline_processes]
    sizes = {
        int(s): [StageSizes.from_data(size) for size in of_stage] for rank in ranks for s, of_stage in rank.items()
    }
    stages = range(len(model.program.placement))
    problems = {
        text: with_measured_sizes(model.problem, [sizes[s][k] for s in stages]) for k, text in enumerate(firsts)
    }
    messages = zip(*([size_bytes(spec) for spec in shapes.of(inputs[i])] for i in order), strict=True)
    of_units = [problems[text].stages for text in texts]
    return planned_peaks_bytes(model.program, problems[texts[0]], list(messages), of_units=of_units)


def _recomputing_modes(program: Program, stage: int) -> dict[str, set[str]]:
    """The modes in which a program recomputes microbatches of a stage, each with the backwards that do it inside."""
    modes: dict[str, set[str]] = {}
    for action in program.actions():
        if action.stage == stage and action.kind in RECOMPUTATIONS:
            name = without_offload(program.modes[stage, action.microbatch])
            modes.setdefault(name, set()).update({action.kind} & {*INSIDE})
    return modes


def warn_undeferred(model: Model, measured: Measured | None) -> None:
    """Log layers whose weight gradients stay in B although the schedule has B and W apart; rank 0 logs.

    Called by all processes together. Measures the stages on a microbatch unless they were `measured` before.
    """
    splits = {s: not model.program.kinds_of(s).isdisjoint(HALVES) for s in range(len(model.program.placement))}
    if measured is not None:
        layers = [layer for stage in measured.stages for layer in stage.undeferred]
    else:
        suspects = [s for s, stage in model.stages.items() if splits[s] and undeferred_layers(stage.module)]
        if not any(model.launch.gather(bool(suspects))):
            return
        inputs, targets = model.own_part(model.task.batch(0))
        received = _received(model, inputs[:1], targets[:1])
        [own_target, *_] = model.cut(inputs[:1], targets[:1])[1]
        layers = []
        for s in suspects:
            _, after = model.messages_at(s)
            gradient = None if after is None else map_leaves(lambda spec: random_gradient(spec, model.hardware), after)
            target = own_target if after is None else None
            try:
                layers += measure_undeferred(s, model.stages[s], received[s][0], target, gradient)
            except OptPipeError:
                raise
            except Exception as error:
                raise TrainingError(
                    f"stages[{s}] of {model.task.name} fails on a microbatch: {type(error).__name__}: {error}."
                ) from error
        ranks = model.launch.gather_pipeline([asdict(layer) for layer in layers])
        layers = [Undeferred(**data) for entry in ranks for data in entry]
    if model.launch.rank == 0:
        for layer in layers:
            if splits[layer.stage]:
                LOG.warning("%s", layer)


def _received(model: Model, inputs: Sequence[Tree], targets: Sequence[Tree]) -> dict[int, Sequence[Tree]]:
    """Messages that each stage of this process receives for these microbatches; called by all processes together."""
    with unchanged(model), ExitStack() as contexts:
        received = {s: contexts.enter_context(stage.listening()) for s, stage in model.stages.items()}
        model.pipeline.evaluate(*model.cut(inputs, targets), change_mode=False)
    units = model.cut(inputs, targets)[0]
    return {s: units if s == 0 else trees for s, trees in received.items()}


def scheduled_memory(model: Model) -> list[PlannedMemory] | None:
    """Plan and budget of each device with the schedule's own sizes; None if these are another model's.

    A schedule may be run with any model of as many stages. It is this model's if its problem has the name that a
    profile of this model gives it, with or without more behind a comma; a cut there must be that of the model. None,
    too, where microbatches are of other sizes in each step.
    """
    if model.shapes is not None or not f"{model.problem.name},".startswith(f"{model.task.name},"):
        return None
    planned = cut_in_name(model.problem.name)
    if planned is not None and planned != ",".join(map(str, model.task.identity().get("cut") or ())):
        return None
    return planned_memory(model.program, model.problem, model.message_bytes)


def gradient_errors(model: Model, plain_modules: Sequence[nn.Module]) -> list[tuple[float, str]]:
    """Gradient error of each parameter of this process's stages, with stage and name.

    Infinity if only one of the two steps has a gradient and it is not 0. A parameter without any is left out: frozen.
    """
    errors, divided = [], model.vocabulary
    for s, stage in model.stages.items():
        plain = {name: (s, name, p.grad) for name, p in plain_modules[s].named_parameters()}
        if divided is not None and s in divided.holders:
            place, name = divided.head
            whole, own = plain_modules[place].get_parameter(name).grad, divided.rows_in(s)
            plain[ROWS] = place, name, whole if whole is None else whole[own.start : own.stop]
        for name, parameter in stage.module.named_parameters():
            if (s, name) in model.followers:
                continue  # its gradient is complete in the rows alone
            place, plain_name, gradient = plain[name]
            both = [one for one in (parameter.grad, gradient) if one is not None]
            if both:
                error = gradient_error(*both) if len(both) == 2 else math.inf if both[0].any() else 0.0
                errors.append((error, f"stages[{place}].{plain_name}"))
    return errors


def _gradient_failures(ratio: float, error: float, limit: float, parameter: str) -> Iterator[str]:
    """A sentence about the parameter whose error is furthest beyond its limit, if one is."""
    if not ratio <= 1.0:
        yield (
            f"the gradient of {parameter} differs from the plain step's by {error:.2e} of its largest entry, but "
            f"rounding explains at most {limit:.2e}. Maybe this stage or a later one keeps something from one "
            "microbatch to the next, or draws random numbers by other means than torch's."
        )


def _gradient_limits(
    model: Model, plain_modules: Sequence[nn.Module], batch: Batch, plain_loss: float, drawing: Drawing
) -> Mapping[str, float]:
    """Largest error that rounding explains in the gradient of each parameter, by stage and name.

    Its effect is measured where numbers are of low precision, or a vocabulary layer is divided, and the plain step
    repeats its loss: a model that does not would have other errors than those of rounding in the measurement.
    """
    autocast = model.config.model.autocast
    parameters = {
        f"stages[{s}].{name}": p for s, module in enumerate(plain_modules) for name, p in module.named_parameters()
    }
    precisions = {str(p.dtype.to_real()).removeprefix("torch.") for p in parameters.values()} & GRADIENT_LIMITS.keys()
    limit = max(GRADIENT_LIMITS[precision] for precision in precisions | {autocast or "float64"})
    if autocast and model.hardware.type == "cpu":
        limit = AUTOCAST_LIMIT_ON_CPU
    modes, slices = model.program.modes, model.program.slices
    copies = {(s, i // slices): IN_LOW_PRECISION[name] for (s, i), name in modes.items() if name in IN_LOW_PRECISION}
    limit = max(limit, *(LIMITS_OF_COPIES[precision] for precision in copies.values()), 0.0)
    narrow, divided = bool(precisions & {"bfloat16", "float16"}), model.vocabulary is not None
    if not (copies or narrow or divided or (autocast and model.hardware.type != "cpu")):
        return dict.fromkeys(parameters, limit)
    with module_state.unchanged([*plain_modules, model.task.loss], model.hardware):
        torch_autocast = model.config.model.torch_autocast
        again = reference_step(plain_modules, model.task.loss, *batch, torch_autocast, drawing, backward=False)
    if relative_error(abs(again - plain_loss), abs(plain_loss)) > GRADIENT_LIMITS["float32"]:
        return dict.fromkeys(parameters, limit)
    effects = _rounding_effects(model, plain_modules, batch, drawing, copies, narrow=narrow)
    noise = {name for name, effect in effects.items() if divided and effect > MOST_OF_ROUNDING}
    return {n: LIMIT_OF_NOISE if n in noise else max(limit, ROUNDINGS * effects.get(n, 0.0)) for n in parameters}


def _rounding_effects(
    model: Model,
    plain_modules: Sequence[nn.Module],
    batch: Batch,
    drawing: Drawing,
    copies: Mapping[tuple[int, int], str],
    *,
    narrow: bool,
) -> Mapping[str, float]:
    """Errors of the gradients of `plain_modules` against those of a plain step that rounds otherwise, by parameter.

    That rounds the activations of the (stage, microbatch) pairs of `copies` to their precision; `narrow` modules are in
    float32 there. Where a vocabulary layer is divided, its loss has another scale. Empty where they do not run so, or
    where the difference is more than rounding.
    """
    modules = [module.to(model.hardware) for module in model.task.build_stages()]
    inputs, targets = batch
    if narrow:
        modules = [module.float() for module in modules]
        inputs, targets = ([map_leaves(_widened, part) for part in parts] for parts in batch)
    received = {storage_key(leaf) for part in inputs for leaf in leaves(part)}
    own = [storages([*module.parameters(), *module.buffers()]) for module in modules]

    def saving(stage: int, microbatch: int) -> AbstractContextManager[None]:
        precision = copies.get((stage, microbatch % model.program.microbatches))
        resident = own[stage] if stage else own[stage] | received
        return _saving_rounded(precision, resident) if precision else nullcontext()

    autocast = model.config.model.torch_autocast if copies else None
    scale = 1.0 if model.vocabulary is None else SCALE

    def loss(output: Tree, target: Tree) -> Tensor:
        return scale * total_loss(model.task.loss(output, target))

    try:
        with module_state.unchanged([*modules, model.task.loss], model.hardware):
            reference_step(modules, loss, inputs, targets, autocast, drawing, saving)
    except RuntimeError:  # such as of a dtype that is written into a module
        return {}
    effects = {}
    for s, (plain, other) in enumerate(zip(plain_modules, modules, strict=True)):
        others = dict(other.named_parameters())
        for name, parameter in plain.named_parameters():
            gradient = others[name].grad
            if parameter.grad is not None and gradient is not None:
                effects[f"stages[{s}].{name}"] = gradient_error(gradient / scale, parameter.grad)
    # On a GPU masks of dropout may be others in float32; then most gradients are.
    only_rounding = effects and median(effects.values()) <= MOST_OF_ROUNDING
    return {name: effect for name, effect in effects.items() if math.isfinite(effect)} if only_rounding else {}


def _widened(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf


@contextmanager
def _saving_rounded(precision: str, resident: Collection[int]) -> Iterator[None]:
    """Context in which autograd saves numbers as they come back from the host in low precision."""
    narrow = LOW_PRECISIONS[precision]

    def pack(saved: Tensor) -> Tensor:
        if saved.dtype not in (torch.float32, torch.float64) or storage_key(saved) in resident or not saved.numel():
            return saved.detach()
        if precision == "bf16":
            return saved.detach().to(narrow).to(saved.dtype)
        scale = (saved.detach().abs().amax() / torch.finfo(narrow).max).clamp_min(1e-30)
        return (saved.detach() / scale).to(narrow).to(saved.dtype) * scale

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield


def _memory_failures(check: CheckResult, model: Model) -> Iterator[str]:
    """A sentence about each device whose memory exceeds the plan, or is not freed after a step."""
    for d, device in enumerate(check.devices):
        planned_bytes = device.planned_peak_bytes
        if device.schedule_peak_bytes is not None:
            planned_bytes = min(planned_bytes, device.schedule_peak_bytes)
        planned = PlannedMemory(planned_bytes, device.budget_bytes)
        if excess := planned.excess(d, device.peak_bytes, model.config.online.memory_margin):
            yield excess
        if device.left_bytes:
            yield (
                f"device {d} has {bytes_text(device.left_bytes)} left alive after a step, but must have none. Maybe a "
                "module of its stages keeps tensors of its forward."
            )


Drawing = Callable[[int, int], AbstractContextManager[None]]
"""Context of a (stage, microbatch), such as one in which torch draws the random numbers of it."""


def reference_step(
    modules: Sequence[nn.Module],
    loss: Loss,
    inputs: Sequence[Tree],
    targets: Sequence[Tree],
    autocast: torch.dtype | None = None,
    drawing: Drawing = lambda _stage, _microbatch: nullcontext(),
    saving: Drawing = lambda _stage, _microbatch: nullcontext(),
    *,
    backward: bool = True,
) -> float:
    """Set `.grad` of all parameters to the gradient of the mean loss over the microbatches; return that loss.

    Parameters that are frozen, or on which the loss does not depend, get none. The loss draws the random numbers of the
    last module. Contexts of `saving` are around the forward of each. Without `backward` gradients stay as they are.
    """
    for module in modules if backward else ():
        module.zero_grad()
    total = 0.0
    last = len(modules) - 1
    for i, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        with torch.autocast(leaves(x)[0].device.type, autocast) if autocast else nullcontext():
            for s, module in enumerate(modules):
                with drawing(s, i), saving(s, i):
                    x = total_loss(loss(module(x), target)) if s == last else module(x)
        value = x / len(inputs)
        if backward and value.requires_grad:
            torch.autograd.backward(value)
            if not i:
                _part_gradients(modules)
        total += value.item()
    return total


def _part_gradients(modules: Sequence[nn.Module]) -> None:
    """Give each gradient memory of its own: autograd may leave one to two parameters, and add to it for both."""
    seen = set()
    for parameter in (p for module in modules for p in module.parameters()):
        if (gradient := parameter.grad) is not None:
            key = storage_key(gradient)
            if key in seen:
                parameter.grad = gradient.clone()
            seen.add(key)


def gradient_error(gradient: Tensor, plain: Tensor) -> float:
    """max|g - g_plain| / max|g_plain|.

    0 where both gradients are 0; infinity where only the plain one is, and where anything is not a number.
    """
    return relative_error(float((gradient - plain).abs().max()), float(plain.abs().max()))


def relative_error(difference: float, scale: float) -> float:
    """difference / scale; 0 where there is no difference, infinity where the scale is 0 or the error not a number."""
    if difference == 0.0:
        return 0.0
    error = difference / scale if scale else math.inf
    return math.inf if math.isnan(error) else error


def evaluation_loss(model: Model, first_step: int, count: int) -> float:
    """Mean loss of the batches of `count` steps from `first_step` on, forward alone and in evaluation mode.

    The training is the same as without. Called by all processes together, between two settled steps, with the same
    answer.
    """
    losses = []
    for step in range(first_step, first_step + count):
        own = model.own_part(model.task.batch(step))
        with unchanged(model):
            of_step = model.evaluate(*own)
        losses.append(model.mean_loss(model.launch.sum(of_step)))
    return sum(losses) / count


def record_trace(model: Model, batch: Batch, step: int) -> Trace:
    """Run the batch apart from training and record its first replica, with the schedule in use.

    Called by all processes together, with the same answer.
    """
    planned = planned_peaks(model, batch)
    inputs, targets = model.own_part(batch)
    first, rank = model.program.microbatches, model.launch.rank
    with unchanged(model):
        part = record_step(
            model.pipeline, *model.cut(inputs[:first], targets[:first]), process=rank, device=model.hardware
        )
    config = model.config.model
    precision = f"{config.dtype}, autocast to {config.autocast}" if config.autocast else config.dtype
    hardware = hardware_name(model.hardware, platform.machine())
    threads = f"{torch.get_num_threads()} threads in each of {model.launch.world} process(es)"
    return assemble(
        [Part.from_data(data) for data in model.launch.gather_pipeline(part.to_data())],
        model.schedule,
        program=model.program.digest,
        step=step,
        planned_peak_bytes=planned,
        source=f"{model.task.name}, {precision}; torch {torch.__version__} on {hardware}, {threads}",
    )
