"""Tables of benchmarks: times of a table have one unit, which the heads of their columns name."""

from __future__ import annotations

import pytest

from benchmarks.markdown import Time, table


@pytest.mark.parametrize(
    ("times_us", "head", "texts"),
    [
        ((1_218_515, 14_000_000), "value, s", ("1.2185", "14")),
        ((1_218_515, 29_000), "value, ms", ("1,218.515", "29")),
        ((0.0, 95_388.2), "value, ms", ("0", "95.3882")),
        ((282, 64_900), "value, ms", ("0.282", "64.9")),
        ((282, 356.5), "value, µs", ("282", "356.5")),
        ((float("inf"), 2e6), "value, s", ("inf", "2")),
    ],
)
def test_times_have_one_unit_that_suits_all(times_us: tuple[float, float], head: str, texts: tuple[str, str]) -> None:
    first, second = texts
    assert table(["name", "value"], [["a", Time(times_us[0])], ["b", Time(times_us[1])]], 1).splitlines() == [
        f"| name | {head} |",
        "| --- | ---: |",
        f"| a | {first} |",
        f"| b | {second} |",
    ]


def test_a_column_may_lack_times() -> None:
    assert table(["value", "text"], [["-", "x"], [Time(3), "y"]], 0).splitlines()[0] == "| value, µs | text |"
    assert table(["value"], [["-"]], 0).splitlines()[0] == "| value |"
