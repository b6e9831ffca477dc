"""Measured stages: their figures are those of a real run, and become documents that hold together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optpipe.compile import compile_schedule
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.errors import InputError
from optpipe.layers import LayerProfile
from optpipe.problem import Problem
from optpipe.profile import measured as measured_module
from optpipe.profile.measured import Measured, StageFigures, measure
from optpipe.profile.ops import WARM_UP_ROUNDS, HostStopwatch, Spread, measure_op_times
from optpipe.profile.subject import Subject, build_chain
from optpipe.profile.transfers import Transfers, measure_transfers
from optpipe.runtime import Mailbox, MemoryMeter, Part, Pipeline
from optpipe.runtime.messages import size_bytes
from optpipe.runtime.probe import StageSizes, measure_stage
from optpipe.verify import verify
from solver.build import build_schedule
from solver.solve import solve
from tests.optpipe.profile.subjects import CPU, ROWS, WIDTH, experts, measured, perceptron
from tests.recomputing import one_f_one_b

BYTES = 4 * ROWS * WIDTH
"""Bytes of one activation."""


def spread(time_us: float, count: int = 3) -> Spread:
    return Spread(time_us, time_us - 1, time_us + 1, count)


def figures(**times: float) -> StageFigures:
    """A stage of a microbatch of 100 bytes."""
    sizes = StageSizes(100, 120, 80, {"F": 5, "B": 6, "W": 7, "BW": 8})
    return StageFigures({kind: spread(time_us) for kind, time_us in times.items()}, sizes, 1000)


SPLIT = figures(F=10.04, B=11.0, W=12.0, BW=20.0, O=4.0, R=2.0)
COMPILED = figures(F=10.0, BW=20.0, O=4.0, R=2.0)


def made(stages: list[StageFigures], placement: list[int]) -> Measured:
    """Measured figures of the test's choice, half a microsecond a boundary between devices."""
    measured_on, _ = measured(perceptron((3, 3)), [0], rounds=1)
    boundaries = len(stages) - 1
    crossings = [spread(0.5) if placement[b] != placement[b + 1] else None for b in range(boundaries)]
    return replace(
        measured_on,
        placement=placement,
        stages=stages,
        message_bytes=[50] * boundaries,
        transfers=Transfers("mailbox", crossings),
    )


@pytest.mark.parametrize(
    ("placement", "held"), [([0, 1, 0], [1, 1, 0]), ([0, 1, 2], [1, 1, 1]), ([0, 0, 0], [1, 0, 0])]
)
def test_what_stages_of_a_device_share_is_held_once(placement: list[int], held: list[int]) -> None:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    layers[1].weight = layers[2].weight = layers[0].weight
    stages: list[nn.Module] = list(layers)
    subject = Subject("mine", stages, torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), nn.functional.mse_loss)
    found = measure(subject, build_chain(subject, CPU, 2, [0, 1, 2]), placement, CPU, 1)
    weight_bytes = 4 * WIDTH * WIDTH
    assert [stage.parameter_bytes for stage in found.stages] == [4 * weight_bytes * times for times in held]


class _Around(torch.autograd.Function):
    """The identity, with something to do before it in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[], None], backward: Callable[[], None]) -> Tensor:
        forward()
        ctx.backward_does = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.backward_does()
        return gradients[0], None, None


class Exchanging(nn.Module):
    """Computes, exchanges and computes, each for 5 us of its own clock; what follows an exchange waits for it."""

    now_us = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.until_us = {"F": 0.0, "B": 0.0}

    def _begin(self, direction: str) -> None:
        self.until_us[direction] = Exchanging.now_us + 5

    def _compute(self, direction: str) -> None:
        Exchanging.now_us = max(Exchanging.now_us, self.until_us[direction]) + 5

    def _part(self, run: Callable[[Tensor], Tensor], does: Callable[[str], None], *, exchanges: bool = False) -> Part:
        return Part(lambda x: _Around.apply(run(x), partial(does, "F"), partial(does, "B")), exchanges)

    def block_parts(self) -> list[Part]:
        dispatch = self._part(nn.Identity(), self._begin, exchanges=True)
        return [self._part(self.first, self._compute), dispatch, self._part(self.last, self._compute)]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.block_parts():
            x = part.run(x)
        return x


class _OwnClock(HostStopwatch):
    def __init__(self) -> None:
        super().__init__()
        self._clock_ns = lambda: round(1000 * Exchanging.now_us)


def test_pairs_of_stages_with_parts_are_measured_as_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they take 30 us; in a block one of them computes while the other exchanges: 20 us."""
    monkeypatch.setattr(measured_module, "stopwatch_for", lambda *_: _OwnClock())
    stages: list[nn.Module] = [Exchanging(), nn.Linear(WIDTH, WIDTH), Exchanging()]
    subject = Subject("mine", stages, torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), nn.functional.mse_loss)
    problem = measure(subject, build_chain(subject, CPU, 2, [0, 1, 2]), [0, 1, 0], CPU, 3).problem(4)
    assert [stage.duration_us("F") for stage in problem.stages] == [15, 0, 15]
    assert problem.block_us == dict.fromkeys([(0, 0), (0, 2), (2, 0), (2, 2)], 20)


def test_every_kind_is_timed_as_often_as_asked() -> None:
    subject = perceptron()
    chain = build_chain(subject, CPU, 4, [0, 1])
    told: list[tuple[int, int]] = []
    times = measure_op_times(chain, CPU, 3, on_round=lambda number, rounds: told.append((number, rounds)))
    total = 3 + WARM_UP_ROUNDS
    assert told == [(number, total) for number in range(total)]
    for stage in times.values():
        assert {kind: found.count for kind, found in stage.items()} == {"F": 6} | dict.fromkeys(
            ("B", "W", "BW", "O", "R"), 3
        )
        assert all(found.lower_us <= found.median_us <= found.upper_us for found in stage.values())


def test_a_compiled_stage_is_timed_without_b_and_w() -> None:
    subject = perceptron()
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    whole._modules["_orig_mod"] = nn.Identity()
    whole.forward = lambda x: whole[0](x)  # type: ignore[method-assign]
    found, _ = measured(replace(subject, stages=[subject.stages[0], whole]), [0, 1])
    assert [set(stage.times) for stage in found.stages] == [{"F", "B", "W", "BW", "O", "R"}, {"F", "BW", "O", "R"}]
    assert "stages [1] are compiled" in found.source
    assert found.problem(4).stages[1].backward_weight_us == 0


def test_stages_before_the_first_trained_parameter_have_no_backward() -> None:
    """The second is frozen too, but lies behind a trained one: its gradient passes through it."""
    for trained, backwards in ((1, ["none", "full", "full"]), (2, ["none", "none", "full"])):
        subject = perceptron((WIDTH,) * 4)
        for s, stage in enumerate(subject.stages):
            stage.requires_grad_(s == trained)
        found, chain = measured(subject, [0, 1, 2], modes=("offload", "full"))
        problem = found.problem(4)
        assert [stage.backward for stage in problem.stages] == backwards
        assert chain.first_trained == trained
        for stage in problem.stages[:trained]:
            assert (stage.backward_input_us, stage.backward_weight_us, stage.activation_bytes) == (0, 0, 0)
            assert (stage.offload, stage.modes) == (None, [])
            assert stage.workspace_bytes.F > 0
        solve(problem, "1f1b")  # verifies it


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "ada-offload"])
def test_bytes_are_the_meter_s_own_in_a_real_run(method: str) -> None:
    found, chain = measured(perceptron((WIDTH, 64, 32, WIDTH)), [0, 1, 2])
    schedule = solve(found.problem(6), method)
    assert verify(schedule).ok
    program, meter = compile_schedule(schedule), MemoryMeter()
    pipeline = Pipeline(program, chain.stages, range(3), Mailbox(), chain.messages)
    for _ in range(2):  # gradients are allocated, slabs take on their sizes
        pipeline.run([chain.inputs] * 6, [chain.targets] * 6, meter)
    planned = planned_peaks_bytes(program, schedule.problem, found.message_bytes)
    assert [meter.peak_bytes[d] for d in range(3)] == planned


def test_sizes_of_a_stage_by_hand() -> None:
    """A linear layer keeps its input, a GELU its own; B replaces that by the gradient of the linear layer's output."""
    found, chain = measured(perceptron(), [0, 1])
    sizes = found.stages[1].sizes
    assert sizes == measure_stage(chain.stages[1], (chain.inputs, chain.targets), chain.messages[0], None)
    assert found.stages[0].sizes.activation_bytes == BYTES, "the batch is the caller's, the GELU's input is kept"
    assert found.stages[0].parameter_bytes == 4 * 4 * (WIDTH * WIDTH + WIDTH)
    assert found.message_bytes == [BYTES]


def test_offloading_a_real_stage_frees_what_the_problem_says() -> None:
    found, _ = measured(perceptron(), [0, 1])
    stage = found.problem(4).stages[0]
    assert stage.offload is not None
    assert stage.offload.bytes == BYTES


def test_the_problem_holds_medians_and_sizes() -> None:
    problem = made([SPLIT, SPLIT, SPLIT], [0, 1, 1]).problem(4, memory_bytes=5000)
    assert problem.transfer_us == [0.5, 0]
    assert [device.memory_bytes for device in problem.devices] == [4000, 3000]
    stage = problem.stages[0]
    assert (stage.forward_us, stage.backward_input_us, stage.backward_weight_us) == (10.0, 11.0, 12.0)
    assert (stage.activation_bytes, stage.backward_weight_bytes) == (100, 120), "more may be held after B than before"
    assert stage.workspace_bytes.to_data() == {"F": 5, "B": 6, "W": 7, "BW": 8}
    assert stage.offload is not None
    assert stage.offload.to_data() == {"bytes": 80, "offload_us": 4.0, "reload_us": 2.0}
    assert Problem.from_json(problem.to_json()) == problem


def test_a_compiled_stage_s_b_stands_for_both() -> None:
    problem = made([COMPILED, SPLIT], [0, 1]).problem(4)
    assert (problem.stages[0].backward_input_us, problem.stages[0].backward_weight_us) == (20.0, 0)
    assert [stage.split_backward for stage in problem.stages] == [False, True]


def test_parameters_beyond_memory_are_refused() -> None:
    with pytest.raises(InputError, match=r"--memory is 1.95 KiB, but .* alone take 1.95 KiB on device 1, 1 B too few"):
        made([SPLIT, SPLIT, SPLIT], [0, 1, 1]).problem(4, memory_bytes=1999)


def test_layers_hold_the_same() -> None:
    layers = made([SPLIT, SPLIT], [0, 1]).layers(memory_bytes=5000)
    assert LayerProfile.from_json(layers.to_json()) == layers
    assert [layer.output_bytes for layer in layers.layers] == [50, 0]
    assert [layer.parameter_bytes for layer in layers.layers] == [1000, 1000]
    assert layers.link.bytes_per_us == 100
    assert layers.copies is not None
    assert (layers.copies.offload_bytes_per_us, layers.copies.reload_bytes_per_us) == (20, 40)


def test_ratios() -> None:
    found = made([SPLIT, COMPILED], [0, 1])
    assert found.copy_to_compute_ratio == pytest.approx(12 / (33.04 + 30))
    assert found.fused_over_split == pytest.approx(20 / 23)
    assert made([COMPILED], [0]).fused_over_split is None


def test_only_boundaries_between_devices_are_measured() -> None:
    chain = build_chain(perceptron((4, 4, 4, 4)), CPU, 1, range(3))
    found = measure_transfers([0, 1, 1], chain.messages, torch.device("cpu"))
    assert found.transport == "mailbox copies within one process"
    assert [one is None for one in found.spreads] == [False, True]


def test_a_stage_is_measured_with_what_the_stage_before_really_sends() -> None:
    """Random rows would spread over the experts; these all go to the wide one."""
    found, chain = measured(experts([ROWS]), [0, 1])
    all_wide = chain.stages[1].module.wide[0].out_features * ROWS * 4
    assert found.stages[1].sizes.activation_bytes > 2 * all_wide, "the inputs of GELU and of the layer after it"
    assert torch.equal(chain.received(1, CPU), chain.inputs)
    assert found.varying == []


def test_of_sizes_that_depend_on_the_data_the_largest_counts_and_the_spread_is_kept() -> None:
    few, many, both = (measured(experts(rows), [0, 1])[0] for rows in ([2], [6], [2, 6]))
    assert few.stages[1].sizes.activation_bytes < many.stages[1].sizes.activation_bytes
    assert both.stages[1].sizes == many.stages[1].sizes
    assert both.stages[1].smallest is not None
    assert both.stages[1].smallest.activation_bytes == few.stages[1].sizes.activation_bytes
    assert (both.stages[1].samples, both.varying) == (2, [1])
    assert "sizes of stages [1] depend on the data" in both.source
    again = StageFigures.from_data(asdict(both.stages[1]))
    assert again == both.stages[1]


def test_other_messages_for_another_microbatch_are_refused() -> None:
    class Shrinking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x[:, 0] > 0]

    subject = experts()
    with pytest.raises(
        InputError, match=r"stages\[0\] returns float32\[2, 16\] for one microbatch but float32\[6, 16\]"
    ):
        measured(replace(subject, stages=[Shrinking(), *subject.stages[1:]]), [0, 1])


def test_modes_are_measured_where_they_are_asked_for() -> None:
    """Widths of 16, 64 and 16: what a stage receives is much less than all it keeps, but for the first: the batch."""
    subject = perceptron((WIDTH, 64, 32, WIDTH))
    chain = build_chain(subject, CPU, 6, [0, 1, 2])
    found = measure(subject, chain, [0, 1, 2], CPU, 1, modes=["full", "full+offload"])
    problem = found.problem(6)
    first, second, _ = problem.stages
    assert first.offload is None, "offload was not asked for"
    assert [mode.name for mode in first.modes] == ["full"], "nothing of the first stage can leave: it keeps nothing"
    assert first.modes[0].kept_bytes == 0
    assert [mode.name for mode in second.modes] == ["full", "full+offload"]
    assert {mode.kept_bytes for mode in second.modes} == {found.message_bytes[0]}
    assert second.modes[1].offload is not None
    assert second.modes[1].offload.bytes == found.message_bytes[0]
    assert all(mode.recompute_us > 0 for stage in problem.stages for mode in stage.modes)
    assert not any(stage.modes for stage in measured(subject, [0, 1, 2])[0].problem(6).stages)


def test_copies_in_low_precision_are_measured_where_they_are_asked_for() -> None:
    subject = perceptron((WIDTH, 64, 32, WIDTH))
    chain = build_chain(subject, CPU, 6, [0, 1, 2])
    found = measure(subject, chain, [0, 1, 2], CPU, 1, modes=["offload", "offload-bf16", "offload-fp8"])
    for stage in found.problem(6).stages:
        assert stage.offload is not None
        assert [mode.name for mode in stage.modes] == ["offload-bf16", "offload-fp8"]
        for mode in stage.choices[2:]:
            assert mode.offload is not None
            assert mode.offload.bytes == stage.offload.bytes, "as much is free on the device"
            assert not mode.recomputes


def layered() -> Subject:
    """Two stages of three and of two blocks, with a layer before and one behind them."""
    torch.manual_seed(0)

    def blocks(count: int) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(count)]

    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks(3)), nn.Sequential(*blocks(2), nn.Linear(WIDTH, WIDTH))]
    return Subject("layered", stages, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), nn.functional.mse_loss)


def test_selective_modes_are_measured_block_by_block() -> None:
    """A block holds GELU's input and output, 8 x 64 floats each, or its own input, 8 x 16."""
    subject, asked = layered(), ["blocks", "full", "selective+offload", "selective-3", "groups"]
    chain = build_chain(subject, CPU, 4, [0, 1])
    problem = measure(subject, chain, [0, 1], CPU, 1, modes=asked, splits=False).problem(4)
    first, second = problem.stages
    assert [mode.name for mode in first.modes] == [
        *("selective-1", "selective-2", "selective", "full", "selective+offload", "selective-3"),
        *("selective-groups-2", "selective-groups-3"),
    ]
    assert [mode.name for mode in second.modes] == [
        *("selective-1", "selective", "full", "selective+offload", "selective-groups-2")
    ]
    assert not first.split_backward
    block, message = 2 * ROWS * 64 * 4, ROWS * WIDTH * 4
    some = {mode.name: mode for mode in first.choices}
    assert some["kept"].kept_bytes - some["selective-1"].kept_bytes == block
    assert some["selective-1"].kept_bytes - some["selective-2"].kept_bytes == block
    assert some["selective-3"].kept_bytes == some["selective"].kept_bytes
    assert some["selective"].kept_bytes == 3 * message, "of the layer before them autograd keeps the batch alone"
    assert [some[f"selective-groups-{group}"].kept_bytes for group in (2, 3)] == [2 * message, message]
    one, stage = some["selective"].segment_bytes, some["full"].segment_bytes
    assert one is not None
    assert stage is not None
    two, three = (some[f"selective-groups-{group}"].segment_bytes for group in (2, 3))
    assert two is not None
    assert three is not None
    assert 0.9 * block < one < 2 * block < two < three <= stage
    assert some["selective+offload"].offload is not None
    assert some["selective+offload"].offload.bytes == 3 * message


@pytest.mark.parametrize(
    ("asked", "reason"), [("selective-4", "which no stage of layered has"), ("selective:mlp", "which no stage")]
)
def test_modes_that_no_stage_has_are_refused(asked: str, reason: str) -> None:
    subject = layered()
    with pytest.raises(InputError, match=reason):
        measure(subject, build_chain(subject, CPU, 4, [0, 1]), [0, 1], CPU, 1, modes=["offload", asked])


@pytest.mark.parametrize(("mode", "compiled"), [("full", False), ("selective", False), ("selective", True)])
def test_bytes_of_a_schedule_that_recomputes_are_the_meter_s_own_in_a_real_run(mode: str, compiled: bool) -> None:
    """Stages recomputed whole, and block by block; those of compiled blocks too."""
    if mode == "full":
        subject = perceptron((WIDTH, 64, 32, WIDTH))
    else:
        subject = layered()
        subject = replace(subject, stages=[*subject.stages, copy.deepcopy(subject.stages[0])])
    for block in [block for stage in subject.stages for block in stage.children() if compiled]:
        block.compile(backend="aot_eager")
    chain = build_chain(subject, CPU, 6, [0, 1, 2])
    splits = mode == "full"  # of several blocks CB holds more than CBW: with both the plan is not exact
    problem = measure(subject, chain, [0, 1, 2], CPU, 1, modes=[mode], splits=splits).problem(6)
    message_bytes = [size_bytes(spec) for spec in chain.messages]
    orders = one_f_one_b(problem, lambda s, i: ("BW", "C BW", "CBW", "CB W" if splits else "CBW")[(s + i) % 4])
    schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
    program, meter = compile_schedule(schedule), MemoryMeter()
    pipeline = Pipeline(program, chain.stages, range(3), Mailbox(), chain.messages)
    for _ in range(2):
        pipeline.run([chain.inputs] * 6, [chain.targets] * 6, meter)
    planned = planned_peaks_bytes(program, problem, message_bytes)
    assert [meter.peak_bytes[d] for d in range(3)] == pytest.approx(planned, rel=0.02)
