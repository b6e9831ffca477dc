"""Training by schedules that keep, offload and recompute: the plain step's gradients, within the planned memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from instances.schedules import one_f_one_b
from optpipe.errors import TrainingError
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, TrainingConfig, train
from optpipe.train.launch import Launch
from optpipe.train.result import TrainingResult
from solver.build import build_schedule
from tests.optpipe.train.checkpoint.runs import NORMED, config_of, run
from tests.optpipe.train.update_cases import config_of as updating
from tests.optpipe.train.update_cases import facts, noisy_model, same_bits, state_of
from tests.optpipe.train.update_cases import run as run_model
from tests.recomputing import EXECUTABLE, FULL, OFFLOAD, random_executable, recomputing
from tests.recomputing import one_f_one_b as recomputing_one_f_one_b
from tests.sample import some

SEEDS = (0, 1, 2)


def executable(seed: int) -> Schedule:
    return random_executable(range(3), 4, seed, EXECUTABLE)


def kinds(schedule: Schedule) -> set[str]:
    return {op.kind for op in schedule.orders.ops()}


def test_the_schedules_hold_every_form() -> None:
    found = [executable(seed) for seed in SEEDS]
    assert set.union(*map(kinds, found)) == {"F", "B", "W", "BW", "O", "R", "C", "CB", "CBW"}
    assert set.union(*({*schedule.modes.flat} for schedule in found if schedule.modes is not None)) == set(range(6))


@pytest.mark.parametrize(("seed", "tied"), some([*product(SEEDS, (False, True))]))
def test_gradients_are_the_plain_steps_and_peaks_are_as_planned(seed: int, tied: bool) -> None:
    check = train(TrainingConfig(executable(seed), ModelConfig("tiny", tied=tied), steps=1, check=True)).check
    assert check is not None
    assert check.max_gradient_error < 1e-5
    assert check.failures == ()
    for device in check.devices:
        assert device.live_bytes == (0, 0)
        assert device.peak_bytes == pytest.approx(device.planned_peak_bytes, rel=0.02)


SELECTIVE = ("selective", "selective-2", "selective-groups-2", "selective+offload")


@pytest.mark.parametrize(("mode", "backward"), some([*product(SELECTIVE, ("CBW", "CB W", "C BW"))]))
def test_blocks_that_run_again_give_the_same_bits_within_the_planned_memory(mode: str, backward: str) -> None:
    """Three layers a stage; losses of two steps of training, and every device's peak within 2 % of the plan."""

    def run(backward: str) -> TrainingResult:
        problem = recomputing(2, 3, [FULL | {"name": mode}])
        orders = recomputing_one_f_one_b(problem, lambda _s, _i: backward)
        schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
        return train(TrainingConfig(schedule, ModelConfig("tiny", layers=6), steps=2, check=True))

    kept, found = run(backward.removeprefix("C ").replace("CB", "B")), run(backward)
    assert found.losses == kept.losses
    assert found.check is not None
    assert found.check.failures == ()
    for device in found.check.devices:
        assert device.live_bytes == (0, 0)
        assert device.peak_bytes == pytest.approx(device.planned_peak_bytes, rel=0.02)


@pytest.mark.parametrize(("name", "most"), [("offload-bf16", 2.0**-8), ("offload-fp8", 2.0**-4)])
def test_copies_in_low_precision_change_gradients_by_less_than_the_rounding_of_an_entry(name: str, most: float) -> None:
    """And take half or a quarter of the host memory; measured: 7e-4 and 0.04 of the largest entry of a gradient."""
    lossy = random_executable(range(3), 4, 0, [{"name": name, "offload": OFFLOAD}])
    host_bytes, errors = [], []
    for schedule in (without_low_precision(lossy, name), lossy):
        check = train(TrainingConfig(schedule, ModelConfig("tiny"), steps=1, check=True)).check
        assert check is not None
        assert check.failures == ()
        for device in check.devices:
            assert device.live_bytes == (0, 0)
            assert device.peak_bytes == pytest.approx(device.planned_peak_bytes, rel=0.02)
        host_bytes.append(sum(device.host_peak_bytes for device in check.devices))
        errors.append(check.max_gradient_error)
    assert errors[0] < 1e-5 < errors[1] < most
    assert host_bytes[1] < host_bytes[0]


def without_low_precision(schedule: Schedule, name: str) -> Schedule:
    """The same orders with copies of full precision."""
    problem, orders = schedule.problem, schedule.orders
    assert orders.modes is not None
    modes = orders.modes.copy()
    for s, stage in enumerate(problem.stages):
        modes[s][modes[s] == stage.choice_numbers[name]] = stage.choice_numbers["offload"]
    return build_schedule(problem, replace(orders, modes=modes), 0.0, "by hand", 0.0)


def test_recomputation_lowers_the_peak() -> None:
    def peak(backward: str) -> int:
        problem = recomputing(2, 4)
        orders = recomputing_one_f_one_b(problem, lambda _s, _i: backward)
        schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
        check = train(TrainingConfig(schedule, ModelConfig("tiny"), steps=1, check=True)).check
        assert check is not None
        return check.devices[0].peak_bytes

    assert peak("CBW") == peak("C BW") < peak("BW")


@pytest.mark.parametrize("seed", some(SEEDS))
def test_steps_that_are_undone_and_repeated_equal_the_synchronous_ones(seed: int) -> None:
    found = []
    for optimistic in (False, True):
        config = updating(executable(seed), steps=8, clip_norm=4.0)
        model = noisy_model(config, Launch(3), optimistic=optimistic, without_loss=[3])
        found.append((facts(run_model(model)), state_of(model)))
    assert found[0][0] == found[1][0]
    assert same_bits(found[0][1], found[1][1])


def recomputed_on_one_device() -> Schedule:
    problem = recomputing(1, 4)
    orders = recomputing_one_f_one_b(problem, lambda _s, i: ("C BW", "CBW", "BW", "C BW")[i])
    return build_schedule(problem, orders, 0.0, "by hand", 0.0)


def test_a_run_that_recomputes_and_resumes_equals_one_that_keeps(tmp_path: Path) -> None:
    """Losses and running statistics, which a checkpoint holds and a recomputation must not move."""
    kept = run(config_of(None, **NORMED | {"schedule": one_f_one_b(1, 4, fused=True)}))
    recomputed = NORMED | {"schedule": recomputed_on_one_device()}
    first = run(config_of(tmp_path, **recomputed), until=2)
    rest = run(config_of(tmp_path, resume="must", **recomputed))
    assert first.losses | rest.losses == kept.losses
    assert sorted(rest.losses) == [2, 3, 4, 5]
    assert same_bits(state_of(rest.model), state_of(kept.model))


def with_mode(**mode: object) -> Schedule:
    problem = recomputing(1, 2, [FULL | mode])
    orders = recomputing_one_f_one_b(problem, lambda _s, _i: "CBW")
    return build_schedule(problem, orders, 0.0, "by hand", 0.0)


def test_modes_that_the_executor_does_not_have_are_refused_by_name() -> None:
    with pytest.raises(TrainingError, match=r"stages\[0\] has the mode 'sparse', which .* offload-bf16, .* Maybe"):
        train(TrainingConfig(with_mode(name="sparse"), ModelConfig("tiny")))
    with pytest.raises(TrainingError, match=r"stages\[0\] has 2 block\(s\) \(1, 2\), but 3 are to be recomputed"):
        train(TrainingConfig(with_mode(name="selective-3"), ModelConfig("tiny", layers=2)))
