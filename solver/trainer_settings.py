"""Activation settings of other trainers that come nearest to a schedule, and what is lost by them.

Megatron-LM and torchtitan hold the activations of all microbatches on all stages alike. Each setting that they
have and the problem has a mode for is simulated in the order of 1F1B or interleaved 1F1B; for torchtitan,
which takes an order as a file, in that of the schedule too. Microbatches come in the order in which the schedule runs
them. Slices are refused, and by torchtitan microbatches of other sizes, which it receives all in one shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from optpipe.errors import DeadlockError, InputError, Issue, MethodError
from optpipe.export.launch.megatron import OFFLOAD_MODULES, OVERLAP, group_size
from optpipe.export.megatron_layout import layout_text, parse_layout
from optpipe.kinds import PLAIN_BACKWARD
from optpipe.mode_names import KEPT, OFFLOAD, SELECTIVE, parse_recomputed
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.partition import cut_in_name, predicted_in_name
from optpipe.placement import placement
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.bounds.blocks import without_blocks
from solver.build import peak_budgets
from solver.by_stage import ByStage
from solver.microbatch_orders import in_order, with_numbers_in_order
from solver.published.interleaved import interleaved_1f1b
from solver.published.one_stage import one_f_one_b
from solver.published.transfers import TransferPlanner, TransferRequest
from solver.variants import Variant, variants

Trainer = Literal["megatron", "torchtitan"]

MEGATRON_MODULES = {
    "mlp": "mlp",
    "core_attention": "core_attn",
    "core_attn": "core_attn",
    "moe": "moe",
    "shared_experts": "shared_experts",
}
"""Parts of a block whose recomputation Megatron-LM can switch on, by the names that modes give them."""

DEFAULT_CHUNKS = 2
"""Stages of a rank that torchtitan makes where its schedule has several, by default."""

LEAD = 1.0
"""Reload times before its backward at which an activation comes back: Megatron-LM fetches one layer ahead."""


def pipeline_settings(problem: Problem, trainer: Trainer) -> list[str]:
    """Flags for the pipeline itself; for Megatron-LM with the cut, where the name of a planned problem has it.

    Raises InputError for fewer microbatches than Megatron-LM interleaves.
    """
    devices, stages = len(problem.devices), len(problem.stages)
    if trainer == "torchtitan":
        return [f"--parallelism.pipeline_parallel_degree {devices}"]
    flags = [f"--pipeline-model-parallel-size {devices}"]
    if (cut := cut_in_name(problem.name)) is not None:
        layout = layout_text([*map(int, cut.split(","))], predicted=predicted_in_name(problem.name))
        flags.append(f"--pipeline-model-parallel-layout {layout}")
    elif stages > devices:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {stages // devices}")
    if stages > devices > problem.microbatches:
        detail = (
            f"is {problem.microbatches}, but Megatron-LM interleaves stages of {devices} devices with {devices} or "
            "more. Maybe one stage a device."
        )
        raise InputError([Issue(("problem", "microbatches"), "too_few", detail)])
    if stages > devices and (size := group_size(devices, problem.microbatches)) is not None:
        flags.append(f"--microbatch-group-size-per-virtual-pipeline-stage {size}")
    return flags


def left_to_the_user(problem: Problem, trainer: Trainer) -> Iterator[str]:
    """Sentence on the stages of torchtitan where they are not those that it makes by default."""
    cut, devices, stages = cut_in_name(problem.name), len(problem.devices), len(problem.stages)
    made = min(DEFAULT_CHUNKS * devices, stages)
    if trainer == "torchtitan" and (cut is not None or stages > made):
        layers = "" if cut is None else f" of {cut} layers, embedding and output layer among them"
        yield (
            f"no flag cuts the model: set parallelism.module_fqns_per_model_part to {stages} stages{layers}, else "
            f"layers are spread evenly over {made}"
        )


@dataclass(frozen=True)
class Setting:
    """A trainer's settings, the mode in which they hold all activations, and what a step then takes.

    `settings`: flags of the command line. `blocks`: exchanges of experts hide in blocks. `peak_bytes` of each device,
    under any timing. `short_bytes`: the most by which a device exceeds its budget, 0 where all keep theirs.
    """

    settings: Sequence[str]
    mode: str
    blocks: bool
    value_us: float
    bubble: float
    peak_bytes: Sequence[int]
    short_bytes: int


def nearest_settings(schedule: Schedule, trainer: Trainer) -> list[Setting]:
    """All settings of the trainer that can be simulated, best first: those within the budgets, then the fastest.

    Raises InputError where the trainer has no pipeline of this placement, or of such stages or microbatches.
    """
    _refuse_what_it_does_not_run(schedule.problem, trainer)
    problem, orders, found = schedule.problem, schedule.orders, []
    if orders.microbatch_order is not None:
        problem, orders = in_order(problem, orders.microbatch_order), with_numbers_in_order(problem, orders)
    if problem.overlaps:
        with suppress(MethodError, DeadlockError):
            if trainer == "megatron":
                found.append(_simulated(problem, _interleaved(problem), [OVERLAP], KEPT))
        problem = without_blocks(problem)
    for settings, mode in _megatron(problem) if trainer == "megatron" else _torchtitan(problem):
        chosen = _chosen(problem, mode)
        if chosen is None:
            continue
        by_stage = ByStage(problem, chosen)
        for flags, compute in _compute_orders(problem, orders, trainer):
            with suppress(DeadlockError):
                plain = _with_copies(by_stage, compute) if mode == OFFLOAD else Orders.of_compute(compute)
                whole = plain and by_stage.with_modes(plain)
                if whole is not None:
                    found.append(_simulated(problem, whole, [*flags, *settings], mode))
    return sorted(found, key=lambda setting: (setting.short_bytes, setting.value_us))


def _refuse_what_it_does_not_run(problem: Problem, trainer: Trainer) -> None:
    """Raise InputError for stages without a backward, slices, and microbatches of sizes that the trainer has not."""
    name = "Megatron-LM" if trainer == "megatron" else trainer
    if problem.stages[0].backward == "none":
        detail = (
            f"is 'none', but {name} sends every stage the gradient of its output. Maybe train with optpipe train or "
            "PlannedSchedule, or solve with a backward of 0 us there."
        )
        raise InputError([Issue(("problem", "stages", 0, "backward"), "no_backward", detail)])
    if problem.spread:
        detail = f"has {', '.join(problem.pass_names)}, but {name} runs no passes of all devices. Maybe train with "
        raise InputError([Issue(("problem", "spread"), "spread_passes", f"{detail}optpipe train.")])
    if problem.slice_count > 1:
        detail = f"is {problem.slice_count}, but {name} runs microbatches whole. Maybe leave slices out of the problem."
        raise InputError([Issue(("problem", "slices", "count"), "slices", detail)])
    for i, own in enumerate(problem.microbatch_factors or ()):
        if trainer == "torchtitan" and (own.bytes, own.transfer) != (1, 1):
            detail = (
                "makes this microbatch of another size, but torchtitan receives all in one shape. Maybe pad them to "
                "one length, and leave bytes and transfer out."
            )
            raise InputError([Issue(("problem", "microbatch_factors", i), "unequal_microbatches", detail)])


def _megatron(problem: Problem) -> Iterator[tuple[list[str], str]]:
    """Flags of Megatron-LM, each with the mode that holds activations so."""
    full = "--recompute-granularity full"
    yield [], KEPT
    yield ["--fine-grained-activation-offloading", f"--offload-modules {' '.join(OFFLOAD_MODULES)}"], OFFLOAD
    for name in _common_modes(problem):
        recomputed = parse_recomputed(name)
        if recomputed is None or name.endswith("+offload"):
            continue
        in_groups = recomputed.whole or recomputed.blocks is not None or recomputed.group > 1
        if in_groups and predicted_in_name(problem.name):
            continue  # layers of multi-token prediction run again one by one, or not at all
        if recomputed.whole:
            if (layers := _blocks(problem)) is not None:
                yield [full, "--recompute-method uniform", f"--recompute-num-layers {layers}"], name
        elif recomputed.blocks is not None:
            yield [full, "--recompute-method block", f"--recompute-num-layers {recomputed.blocks}"], name
        elif not recomputed.part:
            yield [full, "--recompute-method uniform", f"--recompute-num-layers {recomputed.group}"], name
        elif module := MEGATRON_MODULES.get(recomputed.part.rpartition(".")[2]):
            yield ["--recompute-granularity selective", f"--recompute-modules {module}"], name


def _torchtitan(problem: Problem) -> Iterator[tuple[list[str], str]]:
    """Settings of torchtitan: it has every k-th layer run again, or every one, which it calls full."""
    mode, names, blocks = "--activation_checkpoint.mode", _common_modes(problem), _blocks(problem)
    yield [f"{mode} none"], KEPT
    if SELECTIVE in names:
        yield [f"{mode} full"], SELECTIVE
    seen = set()
    for frequency in range(2, (blocks or 1) + 1):
        name = f"{SELECTIVE}-{(blocks or 1) // frequency}"
        if name in names and name not in seen:
            seen.add(name)
            yield [f"{mode} selective", f"--activation_checkpoint.selective_ac_option {frequency}"], name


def _common_modes(problem: Problem) -> list[str]:
    """Names of modes that every stage has."""
    first, *others = problem.stages
    return [mode.name for mode in first.modes if all(mode.name in stage.choice_numbers for stage in others)]


def _blocks(problem: Problem) -> int | None:
    """Blocks of a stage where all have equally many: by the cut of a plan, or by modes for each number of them."""
    if (cut := cut_in_name(problem.name)) is not None:
        layout = layout_text([*map(int, cut.split(","))], predicted=predicted_in_name(problem.name))
        sizes = {stage.count("t") for stage in parse_layout(layout, "")}
        return sizes.pop() if len(sizes) == 1 else None
    counts = set()
    for stage in problem.stages:
        numbers = [found.blocks for mode in stage.modes if (found := parse_recomputed(mode.name)) and found.blocks]
        counts.add(max(numbers, default=0) + 1 if SELECTIVE in stage.choice_numbers and numbers else None)
    return counts.pop() if len(counts) == 1 else None


def _chosen(problem: Problem, mode: str) -> list[Variant] | None:
    """The variant of each stage in this mode, recomputed inside the backward; None where a stage has none."""
    chosen = []
    for stage in problem.stages:
        number = stage.choice_numbers.get(mode)
        found = [variant for variant in variants(stage) if variant.choice == number and not variant.ahead]
        if not found:
            return None
        chosen.append(found[0])
    return chosen


def _placing(problem: Problem) -> str | None:
    """The name of the schedule by which torchtitan places stages so, whichever order it runs; None if by none."""
    p, at = len(problem.devices), tuple(stage.device for stage in problem.stages)
    known = {
        "1F1B": placement("linear", p, 1),
        "Interleaved1F1B": placement("interleaved", p, max(2, len(at) // p)),
        "ZBVZeroBubble": placement("v", p, 2),
    }
    return next((name for name, places in known.items() if places == at), None)


def _torch_takes_microbatches(problem: Problem) -> bool:
    """True if torch's 1F1B, or its interleaved 1F1B, takes so many microbatches."""
    p, m = len(problem.devices), problem.microbatches
    return m >= p if len(problem.stages) == p else m % max(1, m // p) == 0


def _interleaved(problem: Problem) -> Orders:
    """Interleaved 1F1B in groups of the size in the flags of Megatron-LM."""
    return interleaved_1f1b(problem, group_size(len(problem.devices), problem.microbatches))


def _compute_orders(problem: Problem, planned: Orders, trainer: Trainer) -> Iterator[tuple[list[str], list[list[Op]]]]:
    """The compute ops of each device, without recomputation, in each order that a trainer runs, with flags for it."""
    built_in = None
    interleaved = _interleaved if trainer == "megatron" else interleaved_1f1b
    for make in (one_f_one_b, interleaved):
        with suppress(MethodError):
            built_in = [list(device.compute) for device in make(problem).devices]
            break
    placing = _placing(problem)
    if trainer == "torchtitan":
        if placing is None:
            detail = (
                "is placed as torchtitan does not: it runs one stage a device, chunks in a loop, or two along a V. "
                "Maybe train with PlannedSchedule."
            )
            raise InputError([Issue(("problem", "stages"), "placement", detail)])
        name = f"--parallelism.pipeline_parallel_schedule {placing}"
        own = [
            [op._replace(kind=PLAIN_BACKWARD.get(op.kind, op.kind)) for op in device.compute if op.kind != "C"]
            for device in planned.devices
        ]
        yield ["--parallelism.pipeline_parallel_schedule_csv schedule.csv", name], own
        if built_in is not None and _torch_takes_microbatches(problem):
            yield [name], built_in
    elif built_in is not None:
        yield [], built_in
    else:
        maybe = "train with PlannedSchedule" if placing is None else "use --to torchtitan"
        detail = f"is placed as Megatron-LM does not: it runs one stage a device, or chunks in a loop. Maybe {maybe}."
        raise InputError([Issue(("problem", "stages"), "placement", detail)])


def _with_copies(by_stage: ByStage, compute: Sequence[Sequence[Op]]) -> Orders | None:
    """Orders in which every activation leaves and comes back; None where a device has no room for that."""
    plain = by_stage.plain
    split = [
        [op._replace(kind=kind) for op in ops for kind in (("B", "W") if op.kind == "BW" else (op.kind,))]
        for ops in compute
    ]
    leaving = {(op.stage, op.microbatch) for ops in split for op in ops if plain.stages[op.stage].offload}
    budgets = [device.memory_bytes for device in plain.devices]
    orders = TransferPlanner(plain, split).plan(TransferRequest(leaving, LEAD), budgets)
    if orders is None:
        return None
    fused = {(op.stage, op.microbatch) for ops in compute for op in ops if op.kind == "BW"}

    def as_given(op: Op) -> Op:
        return op._replace(kind="BW") if op.kind in ("B", "W") and op[1:] in fused else op

    devices = [
        DeviceOrders(list(dict.fromkeys(map(as_given, device.compute))), device.offload, device.reload)
        for device in orders.devices
    ]
    waits = {as_given(op): list(map(as_given, others)) for op, others in orders.waits.items()}
    return Orders(devices, waits, orders.channels)


def _simulated(problem: Problem, orders: Orders, settings: Sequence[str], mode: str) -> Setting:
    value_us = simulate(problem, orders).value_us
    peaks = peak_budgets(problem, orders)
    budgets = [device.memory_bytes for device in problem.devices]
    short = [peak - budget for peak, budget in zip(peaks, budgets, strict=True) if budget is not None]
    works = zip(problem.work_us, problem.hidden_us(orders.blocks), strict=True)
    bubble = 1 - max(work_us - hidden_us for work_us, hidden_us in works) / value_us if value_us else 0.0
    return Setting(settings, mode, bool(orders.blocks), value_us, bubble, peaks, max([0, *short]))
