"""Compiled stages: a split is refused before the compiler runs, and its own failure is not taken for wrong sizes."""

from __future__ import annotations

import pytest
import torch

from instances.schedules import one_f_one_b
from optpipe.errors import InputError, TrainingError
from optpipe.profile.subject import build_chain, load_subject
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, TrainingConfig, train
from solver.solve import solve
from tests.optpipe.train import compiled_stages

STAGES = "tests.optpipe.train.compiled_stages"
SPLIT = one_f_one_b(2, 2)
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


def test_a_failing_compiler_is_named_in_training() -> None:
    with pytest.raises(TrainingError, match=COMPILER_FAILS) as raised:
        train(TrainingConfig(fused(), ModelConfig(f"{STAGES}:failing"), steps=1))
    assert "sizes" not in str(raised.value)


def test_a_failing_compiler_is_named_in_a_profile() -> None:
    with pytest.raises(InputError, match=COMPILER_FAILS) as raised:
        build_chain(load_subject(f"{STAGES}:failing"), torch.device("cpu"), 2, range(2))
    assert "sizes" not in str(raised.value)
