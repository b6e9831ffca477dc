"""A hundred steps with dropout, running means, clipping and skipped steps: one curve whatever the schedule."""

from __future__ import annotations

import pytest

from optpipe.train.launch import Launch
from tests.optpipe.train.updates.cases import config_of, noisy_model, run, schedules, synchronous

OTHERS = [name for name in schedules() if name != "1F1B"]


@pytest.mark.parametrize("name", OTHERS)
def test_the_losses_of_a_hundred_steps_are_those_of_1f1b(name: str) -> None:
    expected, found = (synchronous(schedule)[0] for schedule in ("1F1B", name))
    assert [o.skipped for o in found] == [o.skipped for o in expected]
    assert [o.clipped for o in found] == [o.clipped for o in expected]
    kept = [(a.loss, b.loss) for a, b in zip(found, expected, strict=True) if not a.skipped]
    assert [loss for loss, _ in kept] == pytest.approx([loss for _, loss in kept], rel=1e-9)
    assert kept[0][0] - kept[-1][0] > 1, "it learns"


def test_in_float32_they_are_equal_to_what_rounding_grows_to() -> None:
    """Sums are added in another order where BW is fused; a hundred steps of training make differences larger."""
    curves = []
    for name in ("1F1B", "V"):
        schedule = schedules()[name]
        config = config_of(schedule, dtype="float32")
        outcomes = run(noisy_model(config, Launch(len(schedule.devices)), optimistic=False, without_loss=[]))
        curves.append([outcome.loss for outcome in outcomes])
    assert curves[0] == pytest.approx(curves[1], rel=2e-3)
