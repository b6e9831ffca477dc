"""The interpreter on a small chain of layers: equal gradients, exact sizes, errors that show where."""

from __future__ import annotations

import copy
import operator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import Program, compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.errors import TrainingError
from optpipe.problem import Problem
from optpipe.runtime import Mailbox, MemoryMeter, Pipeline, Stage
from optpipe.runtime.parts import run_whole
from optpipe.runtime.probe import StageSizes, measure_stage, with_measured_sizes
from optpipe.schedule import Schedule
from solver.blocks import joined_orders
from solver.build import build_schedule
from tests.optpipe.runtime.chains import InParts, M, batch, chain, gradients, plain_gradients, specs, stages_of
from tests.recomputing import random_executable, with_frozen


def pipeline(program: Program, modules: list[nn.Module], *, gradient_scale: float = 1 / M) -> Pipeline:
    stages = stages_of(modules, gradient_scale=gradient_scale)
    return Pipeline(program, stages, range(len(program.devices)), Mailbox(), specs(len(modules)))


def blocks_along_a_v() -> Schedule:
    """Forwards and backwards along a V of which neighbours are blocks; they run one after the other here."""
    fused = v_wave(2, M, fused=True)
    pairs = [{"forward_stage": s, "backward_stage": b, "us": 20} for s in range(4) for b in (s, 3 - s)]
    problem = Problem.from_data(fused.problem.to_data() | {"overlaps": pairs})
    orders = joined_orders(problem, fused.orders)
    assert orders.blocks
    return build_schedule(problem, orders, 0.0, "joined", 0.0)


EVERYTHING = [(s, i) for s in range(3) for i in range(M)]
SCHEDULES = {
    "linear": one_f_one_b(4, M),
    "linear, fused": one_f_one_b(4, M, fused=True),
    "linear, offload": one_f_one_b(4, M, moved=EVERYTHING),
    "V": v_wave(2, M),
    "V, offload": v_wave(2, M, moved=EVERYTHING),
    "half is frozen": with_frozen(one_f_one_b(4, M), 2),
    "all but the last are frozen": with_frozen(one_f_one_b(4, M, fused=True), 3),
    "the first and one behind a trained one are frozen": with_frozen(one_f_one_b(4, M), 1),
    "V, a chunk of each device is frozen": with_frozen(v_wave(2, M, moved=EVERYTHING), 2),
    "loop, the first chunk is frozen": with_frozen(random_executable([0, 1, 0, 1], M, 0), 1),
    "V, blocks": blocks_along_a_v(),
}
FROZEN = {"the first and one behind a trained one are frozen": (0, 2)}


def modules_of(name: str) -> list[nn.Module]:
    """The chain of a schedule, in which the stages without a backward are frozen, or those of `FROZEN`."""
    stages = SCHEDULES[name].problem.stages
    without_backward = [s for s, stage in enumerate(stages) if stage.backward == "none"]
    return chain(4, frozen=FROZEN.get(name, without_backward))


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_plain_step(name: str) -> None:
    modules, (inputs, targets) = modules_of(name), batch(4)
    plain = plain_gradients(modules, inputs, targets)
    losses = pipeline(compile_schedule(SCHEDULES[name]), modules).run(inputs, targets)
    torch.testing.assert_close(gradients(modules), plain, rtol=1e-5, atol=1e-7)
    assert (losses > 0).all()


def test_passes_of_a_block_run_up_to_their_exchanges_in_turn() -> None:
    """Gradients are those of the plain step, and the peak is at most that of ops that run one after the other."""
    schedule, (inputs, targets), begun = SCHEDULES["V, blocks"], batch(4), list[str]()
    modules: list[nn.Module] = [InParts(str(s), begun, *layers) for s, layers in enumerate(chain(4))]
    meter = MemoryMeter()
    pipeline(compile_schedule(schedule), modules).run(inputs, targets, meter)
    torch.testing.assert_close(gradients(modules), plain_gradients(chain(4), inputs, targets), rtol=1e-5, atol=1e-7)
    assert not any(meter.live_bytes.values())
    planned = planned_peaks(schedule, [InParts(str(s), [], *layers) for s, layers in enumerate(chain(4))])
    assert all(meter.peak_bytes[d] <= peak for d, peak in enumerate(planned)), (meter.peak_bytes, planned)
    forward, backward = next(pair for pair in schedule.orders.blocks.items() if pair[0].stage in (0, 3))
    f, b = forward.stage, backward.stage
    together = [f"B{b}.3", f"F{f}.0", f"F{f}.1", f"B{b}.2", f"B{b}.1", f"F{f}.2", f"F{f}.3", f"B{b}.0"]
    assert any(begun[k : k + 8] == together for k in range(len(begun)))


def test_parts_draw_the_random_numbers_of_the_whole_module() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6), nn.Dropout()]
    whole, parted = nn.Sequential(*layers), InParts("", [], *layers)
    outputs = []
    for module in (whole, parted):
        stage = Stage(copy.deepcopy(module), first=True, seed=3)
        x = torch.ones(2, 6)
        outputs.append(stage.forward(0, x, None, offloads=False, fused=True))
        if stage.parts:
            outputs.append(run_whole(stage.forward_in_parts(1, x, None, fused=True)))
            outputs.append(run_whole(stage.forward_in_parts(0, x, None, fused=True)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[3])
    assert not torch.equal(outputs[0], outputs[2])


def test_a_frozen_stage_runs_f_alone_and_gets_no_gradient() -> None:
    actions = [*compile_schedule(SCHEDULES["half is frozen"]).actions()]
    assert {action.kind for action in actions if action.stage < 2} == {"F", "SEND_F", "RECV_F"}
    assert {action.stage for action in actions if action.kind == "SEND_B"} == {3}


def test_a_stage_with_a_parameter_to_train_needs_its_backward() -> None:
    modules = chain(4, frozen=[0])
    with pytest.raises(TrainingError, match=r"stages\[1\].backward is 'none' but 0.weight is to be trained. Maybe"):
        pipeline(compile_schedule(SCHEDULES["half is frozen"]), modules)


def test_a_wrong_scale_would_be_noticed() -> None:
    """The comparison can fail: without the division by the number of microbatches gradients are M times as large."""
    modules, (inputs, targets) = chain(4), batch(4)
    plain = plain_gradients(modules, inputs, targets)
    pipeline(compile_schedule(SCHEDULES["linear"]), modules, gradient_scale=1.0).run(inputs, targets)
    torch.testing.assert_close([g / M for g in gradients(modules)], plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("without", "with_offload"), [("linear", "linear, offload"), ("V", "V, offload")])
def test_offload_changes_no_bit_and_lowers_the_peak(without: str, with_offload: str) -> None:
    found, peaks = [], []
    for name in (without, with_offload):
        modules, (inputs, targets) = chain(4), batch(4)
        meter = MemoryMeter()
        pipeline(compile_schedule(SCHEDULES[name]), modules).run(inputs, targets, meter)
        found.append(gradients(modules))
        peaks.append(meter.peak_bytes[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert peaks[1] < peaks[0]


def planned_peaks(schedule: Schedule, modules: list[nn.Module]) -> list[int]:
    """Planned peak of each device, by the measured sizes of the modules."""
    program, (inputs, targets), sizes = compile_schedule(schedule), batch(4), []
    for (s, stage), around in zip(stages_of(modules).items(), pairwise([None, *specs(4), None]), strict=True):
        stage.join(s, (), program.first_trained)
        modes = {mode.name: ("CB", "CBW") for mode in schedule.problem.stages[s].modes if not mode.offload}
        sizes.append(measure_stage(stage, (inputs[0], targets[0]), *around, modes=modes))
    problem = with_measured_sizes(schedule.problem, sizes)
    return planned_peaks_bytes(program, problem, [spec.size_bytes for spec in specs(4)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_lives_after_a_step_and_the_peak_is_the_planned_one(name: str) -> None:
    schedule, (inputs, targets) = SCHEDULES[name], batch(4)
    pipe = pipeline(compile_schedule(schedule), modules_of(name))
    planned = planned_peaks(schedule, modules_of(name))
    for _ in range(2):
        meter = MemoryMeter()
        pipe.run(inputs, targets, meter)
        assert not any(meter.live_bytes.values())
        peaks = [meter.peak_bytes[d] for d in range(len(planned))]
        assert peaks == planned or (schedule.orders.blocks and all(map(operator.le, peaks, planned)))
        assert all(slabs.in_use_bytes == 0 for slabs in pipe.host_slabs.values())


def test_measured_sizes_are_those_counted_by_hand() -> None:
    """Linear 6 -> 10 in float32 on 2 rows, the loss last.

    F saves x (48, but it is the batch: not counted) and the prediction (80). B drops the prediction and leaves x and
    the output gradient (80) to W.
    """
    stage = Stage(nn.Linear(6, 10), first=True, loss=nn.functional.mse_loss)
    found = measure_stage(stage, (torch.randn(2, 6), torch.randn(2, 10)), None, None)
    assert isinstance(found, StageSizes)
    assert (found.activation_bytes, found.backward_weight_bytes, found.offload_bytes) == (80, 80, 80)


@pytest.mark.parametrize("name", ["linear", "V, offload"])
def test_an_action_that_fails_is_shown_in_its_program_and_nothing_stays(name: str) -> None:
    modules, (inputs, targets) = chain(4), batch(4)
    plain = plain_gradients(modules, inputs, targets)
    pipe, meter = pipeline(compile_schedule(SCHEDULES[name]), modules), MemoryMeter()
    fragile = modules[1][-1]  # type: ignore[index]
    fragile.calls_left = 2
    with pytest.raises(TrainingError, match=r"device 1 failed at F1\.1, action \d+ of \d+: ValueError: the layer") as e:
        pipe.run(inputs, targets, meter)
    assert "] F1.1\n" in str(e.value)
    assert isinstance(e.value.__cause__, ValueError)
    assert not any(meter.live_bytes.values())
    assert all(slabs.in_use_bytes == 0 for slabs in pipe.host_slabs.values())
    pipe.run(inputs, targets)
    torch.testing.assert_close(gradients(modules), plain, rtol=1e-5, atol=1e-7)


def test_a_program_that_waits_for_ever_ends_with_an_error() -> None:
    """Only a program that was not checked can do that."""
    program = compile_schedule(SCHEDULES["linear"])
    silent = [tuple(a for a in actions if a.kind != "SEND_B") for actions in program.devices]
    modules, (inputs, targets) = chain(4), batch(4)
    with pytest.raises(TrainingError, match=r"nothing can go on: B0\.0, .* wait for messages that nobody sends"):
        pipeline(replace(program, devices=tuple(silent)), modules).run(inputs, targets)
