"""Messages that hold names are of a length that can be read."""

from __future__ import annotations

import pytest

from optpipe.errors import MOST_NAMES, DeadlockError, circle_text


@pytest.mark.parametrize(("names", "text"), [(["F0.0"], "F0.0 -> F0.0"), (["B0.0", "W0.0"], "B0.0 -> W0.0 -> B0.0")])
def test_a_circle_ends_where_it_begins(names: list[str], text: str) -> None:
    assert circle_text(names) == text


def test_a_long_circle_is_cut_in_the_message_alone() -> None:
    names = [f"F0.{i}" for i in range(1000)]
    error = DeadlockError(names, 1000)
    assert len(error.cycle) == 1000
    assert f"F0.{MOST_NAMES - 1} -> ... -> F0.0. Maybe" in str(error)
