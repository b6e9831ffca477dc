"""The learning rate of each step."""

from __future__ import annotations

import pytest

from optpipe.train.config import OptimizerConfig
from optpipe.train.update import learning_rate


def rates(steps: int, **chosen: object) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **chosen)  # type: ignore[arg-type]
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_it_stays_without_warm_up_and_decay() -> None:
    assert rates(4) == [1.0] * 4


def test_it_rises_in_equal_parts_to_the_whole_after_the_warm_up() -> None:
    assert rates(6, warm_up_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(2, warm_up_steps=3) == [0.25, 0.5], "a run that ends within"


def test_it_falls_as_half_a_cosine_that_ends_after_the_last_step() -> None:
    falling = rates(6, warm_up_steps=2, decay="cosine")
    assert falling == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5])


def test_what_falls_ends_above_its_floor() -> None:
    falling = rates(1001, decay="cosine", decay_floor=0.1)
    assert falling[500] == pytest.approx(0.55, abs=1e-3)
    assert falling[-1] == pytest.approx(0.1, abs=1e-5)
    assert min(falling) > 0.1


def test_it_is_stable_and_decays_in_a_line_over_the_last_steps() -> None:
    assert rates(8, warm_up_steps=1, decay="wsd", decay_steps=3) == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates(4, decay="wsd", decay_steps=1, decay_floor=0.5) == [1, 1, 1, 0.75]
    assert rates(10, decay="wsd") == pytest.approx([1.0] * 8 + [2 / 3, 1 / 3]), "a fifth of them"
