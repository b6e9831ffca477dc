"""The prediction beside real steps. What is compared is checked here; how close it is, depends on the machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from optpipe.compile import compile_schedule
from optpipe.kinds import KINDS
from optpipe.profile.check import STEPS, check_prediction, serial_us
from optpipe.profile.measured import Measured
from solver.solve import solve
from tests.optpipe.profile.subjects import CPU, experts, measured, perceptron
from tests.recomputing import random_in_modes

MICROBATCHES = 4


@pytest.mark.parametrize("method", ["1f1b", "ada-offload"])
def test_a_step_is_predicted_as_the_sum_of_its_ops_and_messages(method: str) -> None:
    found, _ = measured(perceptron(), [0, 1])
    schedule = solve(found.problem(MICROBATCHES), method)
    expected = 2 * MICROBATCHES * sum(spread.median_us for spread in found.transfers.spreads if spread)
    for device in schedule.devices:
        for _, ops in device.streams():
            expected += sum(found.stages[op.stage].times[op.kind].median_us for op in ops.ops)
    assert serial_us(found, compile_schedule(schedule)) == pytest.approx(expected)


def test_recomputations_and_copies_are_predicted_in_their_mode() -> None:
    found, chain = measured(perceptron((16, 32, 16)), [0, 1], modes=["full", "full+offload", "offload"])
    schedule = random_in_modes(found.problem(2 * MICROBATCHES), seed=2)
    assert schedule.modes is not None
    expected, seen = 4 * MICROBATCHES * sum(spread.median_us for spread in found.transfers.spreads if spread), set()
    for op in schedule.orders.ops():
        mode = schedule.problem.stages[op.stage].choices[schedule.modes[op.stage, op.microbatch]].name
        seen.add(f"{op.kind} {mode}")
        times = found.stages[op.stage].times
        copied = op.kind in ("O", "R") and mode == "full+offload"
        expected += 0 if op.kind == "C" else times[f"{op.kind} full" if copied else op.kind.removeprefix("C")].median_us
        expected += times["C full"].median_us if op.kind in ("C", "CB", "CBW") else 0
    assert {kind for kind, _ in map(str.split, seen)} == {*KINDS}
    assert seen >= {"C full", "O full+offload", "R full+offload", "O offload", "R offload"}
    check = check_prediction(found, [chain], schedule, CPU)
    assert check.serial_us == pytest.approx(expected)
    assert sum(share.predicted_us or 0.0 for share in check.shares) == pytest.approx(expected)


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_the_schedule_really_runs(clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, chain = measured(perceptron((16, 32, 16)), [0, 1])
    object.__setattr__(found, "clock", clock)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    schedule = solve(found.problem(MICROBATCHES), "1f1b")
    check = check_prediction(found, [chain], schedule, CPU)
    assert check.step.count == STEPS
    assert check.ratio == check.step.median_us / check.serial_us
    assert check.comparison.basis == "re-timed"
    assert check.trace.schedule == schedule
    by_kind = {share.kind: share for share in check.shares}
    assert by_kind["F"].actions == by_kind["BW"].actions == 2 * MICROBATCHES
    assert by_kind["RECV_F"].predicted_us is None
    assert sum(share.predicted_us or 0.0 for share in check.shares) == pytest.approx(check.serial_us)
    recorded = [action for device in check.trace.devices for action in device.actions]
    assert sum(share.recorded_us for share in check.shares) == pytest.approx(sum(a.duration_us for a in recorded))
    for device in check.comparison.devices:
        assert device.peak_bytes == device.planned_peak_bytes
    for device in check.trace.devices:
        assert all(a.end_us <= b.end_us for a, b in pairwise(device.actions))


def smaller(found: Measured, stage: int) -> Measured:
    """The same figures with the activation of one stage taken for half of what it is."""
    figures = found.stages[stage]
    sizes = replace(figures.sizes, activation_bytes=figures.sizes.activation_bytes // 2, offload_bytes=0)
    stages = [*found.stages[:stage], replace(figures, sizes=sizes), *found.stages[stage + 1 :]]
    return replace(found, stages=stages)


def test_a_peak_above_the_prediction_is_named_with_device_and_bytes() -> None:
    found, chain = measured(perceptron((16, 32, 16)), [0, 1])
    problem = smaller(found, 0).problem(MICROBATCHES, 10**6)
    schedule = solve(problem, "1f1b")
    check = check_prediction(found, [chain], schedule, CPU)
    [failure] = check.failures
    peak, predicted = check.comparison.devices[0].peak_bytes, check.comparison.devices[0].expected_peak_bytes
    assert failure.startswith(f"device 0 held {peak:,} bytes at its peak, but {predicted:,} are planned and its budget")
    assert check_prediction(found, [chain], schedule, CPU, margin=0.6).failures == []


def test_a_peak_below_the_prediction_differs_too() -> None:
    found, chain = measured(perceptron((16, 32, 16)), [0, 1])
    schedule = solve(found.problem(MICROBATCHES), "1f1b")
    figures = found.stages[0]
    larger = replace(figures.sizes, activation_bytes=2 * figures.sizes.activation_bytes)
    problem = replace(found, stages=[replace(figures, sizes=larger), found.stages[1]]).problem(MICROBATCHES)
    assert check_prediction(found, [chain], schedule, CPU).failures == []
    [failure] = check_prediction(found, [chain], solve(problem, "1f1b"), CPU).failures
    assert "device 0 held" in failure
    assert "were predicted" in failure


def test_stages_whose_sizes_depend_on_the_data_may_stay_below() -> None:
    found, chain = measured(experts([2, 6]), [0, 1])
    check = check_prediction(found, [chain], solve(found.problem(MICROBATCHES), "1f1b"), CPU)
    assert check.failures == []
    few, _ = measured(experts([2]), [0, 1])
    [failure] = check_prediction(few, [chain], solve(few.problem(MICROBATCHES), "1f1b"), CPU).failures
    assert "device 1 held" in failure
