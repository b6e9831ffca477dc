"""Compiled stages: a split is refused before the compiler runs, and its own failure is not taken for wrong sizes."""

from __future__ import annotations

import pytest
import torch

from instances.schedules import one_f_one_b
from optpipe.errors import InputError, TrainingError
from optpipe.profile.subject import build_chain, load_subject
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, OnlineConfig, TrainingConfig, train
from solver.solve import solve
from tests.optpipe.train import compiled_stages
from tests.optpipe.train.resolve.solvers import Scripted
from tests.recomputing import EXECUTABLE, OFFLOAD, random_in_modes, recomputing

STAGES = "tests.optpipe.train.compiled_stages"
SPLIT = one_f_one_b(2, 2)
ONLINE = OnlineConfig("online", devices=2, rounds=1, first_step=1, record_steps=2, least_gain=0)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it

COMPILER_FAILS = r"torch\.compile fails.*no working C\+\+ compiler.*Maybe train without torch\.compile"


def fused() -> Schedule:
    """B and W of every microbatch as one."""
    return solve(SPLIT.problem, "1f1b")


def test_a_split_is_refused_before_anything_is_compiled() -> None:
    compiled_stages.compiled.clear()
    with pytest.raises(TrainingError, match=r"stages\[0\]: module is compiled by torch.compile"):
        train(TrainingConfig(SPLIT, ModelConfig(f"{STAGES}:counted"), steps=1))
    assert not compiled_stages.compiled
    train(TrainingConfig(fused(), ModelConfig(f"{STAGES}:counted"), steps=1))
    assert compiled_stages.compiled


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (SPLIT, r"stages\[0\]: module is compiled by torch.compile"),
        (
            None,
            r"stages\[0\] is compiled by torch.compile, .* Maybe give a schedule that fuses them, .* or use --solve",
        ),
    ],
)
def test_a_split_is_refused_before_anything_is_measured(schedule: Schedule | None, message: str) -> None:
    compiled_stages.compiled.clear()
    with pytest.raises(TrainingError, match=message):
        train(TrainingConfig(schedule, ModelConfig(f"{STAGES}:counted"), online=ONLINE, steps=1), solver=Scripted([]))
    assert not compiled_stages.compiled


def test_compiled_blocks_keep_offload_and_recompute_by_schedule() -> None:
    """The gradients of the plain step, and the planned memory; peaks are those of the same blocks uncompiled."""
    problem = recomputing(2, 6, EXECUTABLE, offload=OFFLOAD, split_backward=False)
    schedule = random_in_modes(problem, seed=2)
    forms = {op.kind for op in schedule.orders.ops()}
    assert forms == {"F", "BW", "O", "R", "C", "CBW"}
    assert {"selective", "full"} <= set(schedule.mode_names)
    before = compiled_stages.graphs.frame_count
    found = train(TrainingConfig(schedule, ModelConfig(f"{STAGES}:blocks"), steps=1, check=True)).check
    assert found is not None
    assert found.failures == ()
    assert compiled_stages.graphs.frame_count > before


def test_what_splits_a_compiled_stage_is_not_switched_to() -> None:
    solver = Scripted(["zb-h1"])
    config = TrainingConfig(fused(), ModelConfig(f"{STAGES}:counted"), online=ONLINE, steps=12)
    result = train(config, solver=solver)
    assert len(result.losses) == 12
    assert result.schedule == config.schedule
    kept = "training goes on as it is: zb-h1 has B and W apart, but stages[0] is compiled"
    assert [event.text for event in result.events if event.kind in ("kept", "swapped")] == [kept]


def test_a_search_before_training_may_find_a_schedule_that_splits_nothing() -> None:
    online = OnlineConfig("first", devices=2, microbatches=2, rounds=1)
    config = TrainingConfig(None, ModelConfig(f"{STAGES}:counted"), online=online, steps=1)
    result = train(config, solver=Scripted(["1f1b"]))
    assert result.schedule is not None
    assert result.schedule.method == "1f1b"


def test_a_failing_compiler_is_named_in_training() -> None:
    with pytest.raises(TrainingError, match=COMPILER_FAILS) as raised:
        train(TrainingConfig(fused(), ModelConfig(f"{STAGES}:failing"), steps=1))
    assert "sizes" not in str(raised.value)


def test_a_failing_compiler_is_named_in_a_profile() -> None:
    with pytest.raises(InputError, match=COMPILER_FAILS) as raised:
        build_chain(load_subject(f"{STAGES}:failing"), torch.device("cpu"), 2, range(2))
    assert "sizes" not in str(raised.value)
