"""Picture of a plan: bars as long as the seconds and bytes that they stand for, and every strategy by its name."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from matplotlib.patches import Rectangle

from optpipe.errors import InputError
from optpipe.plot import render_plan
from optpipe.plot.figure import settings
from optpipe.plot.plan import CHOICES, MOST_BEATEN, MOST_SCHEDULED, plan_figure
from tests.optpipe.export.test_launch import planned

PLAN = planned("llama-3.1-8b", 16)


def rows(plan: dict[str, Any]) -> tuple[dict[int, float], list[str]]:
    """End of each row of the bars in seconds, and all texts beside them."""
    with settings():
        axes = plan_figure(plan, "a plan").axes[0]
    ends: dict[int, float] = {}
    for patch in axes.patches:
        assert isinstance(patch, Rectangle)
        row = round(patch.get_y() + 0.31)
        ends[row] = max(ends.get(row, 0.0), patch.get_x() + patch.get_width())
    return ends, [text.get_text() for text in axes.texts]


def test_bars_are_as_long_as_steps() -> None:
    ends, texts = rows(PLAN)
    scheduled = [one for one in PLAN["strategies"] if one["end"] == "solved"][:MOST_SCHEDULED]
    assert [ends[row] for row in range(MOST_SCHEDULED)] == pytest.approx([one["seconds"] for one in scheduled])
    beaten = sorted({one["bound_s"] for one in PLAN["strategies"] if one["end"] == "beaten"})[:MOST_BEATEN]
    assert [ends[row] for row in range(MOST_SCHEDULED, len(ends))] == pytest.approx(beaten)
    assert sum("at least" in text for text in texts) == len(beaten) == MOST_BEATEN
    assert {one["name"] for one in scheduled} <= {*texts}
    assert sum(", taken" in text for text in texts) == 1


def test_the_strategy_to_take_is_drawn_wherever_it_ranks() -> None:
    plan = deepcopy(PLAN)
    slow = [one for one in plan["strategies"] if "lost_s" in one][-1]
    plan["best"] |= {name: slow[name] for name in CHOICES}
    ends, texts = rows(plan)
    assert ends[MOST_SCHEDULED] == pytest.approx(slow["seconds"])
    (taken,) = (place for place, text in enumerate(texts) if ", taken" in text)
    assert texts[taken + 1] == slow["name"]


def test_bars_of_memory_have_every_byte() -> None:
    with settings():
        axes = plan_figure(PLAN, "a plan").axes[1]
    tops: dict[float, float] = {}
    for bar in axes.patches:
        assert isinstance(bar, Rectangle)
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
    totals = [sum(rank.values()) / 2**30 for rank in PLAN["best"]["ranks"]]
    assert list(tops.values()) == pytest.approx(totals)
    assert max(totals) <= PLAN["device_memory_bytes"] / 2**30


def test_the_same_plan_gives_the_same_bytes() -> None:
    picture = render_plan(PLAN, "svg")
    assert picture == render_plan(PLAN, "svg")
    assert b"llama-3.1-8b on 16 h100" in picture
    assert render_plan(PLAN, "png").startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"no strategy fits\. Maybe plan for more GPUs"):
        render_plan(PLAN | {"best": None}, "svg")
