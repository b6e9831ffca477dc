"""Numbers for people, and ink that can be read."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_rgb

from optpipe.kinds import KIND
from optpipe.plot.style import Rgb, ink_on, op_colour
from optpipe.units import (
    budget_text,
    bytes_text,
    change_text,
    count_text,
    difference_text,
    memory_unit,
    percent_text,
    share_text,
    time_text,
    time_unit,
    times_text,
)


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (0, "0 µs"),
        (-3.6e-12, "0 µs"),
        (-1e9, "-1,000 s"),
        (float("inf"), "inf s"),
        (151, "151.0 µs"),
        (999, "999.0 µs"),
        (1000, "1.000 ms"),
        (1.31e6, "1.310 s"),
        (1e9, "1,000 s"),
    ],
)
def test_times(time_us: float, text: str) -> None:
    assert time_text(time_us) == time_text(time_us, time_unit(time_us)) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (400, "400 B"), (1609728, "1.54 MiB"), (2**34, "16.0 GiB"), (-24_000, "-23.4 KiB")],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert bytes_text(size_bytes) == bytes_text(size_bytes, memory_unit(size_bytes)) == text


def test_times_that_are_compared_have_one_unit() -> None:
    assert times_text([None, 2500, 400]) == ["-", "2.500 ms", "0.400 ms"]
    assert [change_text(other, 2) for other in (2.0004, 1, 3)] == ["the same", "-50.0 %", "+50.0 %"]
    assert [difference_text(time_us) for time_us in (2500, -400, 1e-12)] == ["+2.500 ms", "-400.0 µs", "0 µs"]


def test_what_is_left_of_a_budget() -> None:
    used = [budget_text(3 * 2**20, budget) for budget in (2**22, 2**21, None)]
    assert used == [
        "3.00 MiB of 4.00 MiB, 1.00 MiB left",
        "3.00 MiB of 2.00 MiB, 1.00 MiB too few",
        "3.00 MiB, no limit",
    ]


def test_sizes_in_a_larger_unit() -> None:
    assert [bytes_text(size, memory_unit(2**30)) for size in (2**29, 2**20)] == ["0.50 GiB", "0 GiB"]


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0.0 %"), (1e-9, "< 0.01 %"), (0.0042, "0.42 %"), (0.2, "20.0 %"), (-0.5, "-50.0 %")]
)
def test_shares(share: float, text: str) -> None:
    assert percent_text(share) == text


@pytest.mark.parametrize(
    ("count", "name", "text"),
    [(1, "device", "1 device"), (0, "device", "0 devices"), (1024, "microbatch", "1,024 microbatches")],
)
def test_counts(count: int, name: str, text: str) -> None:
    assert count_text(count, name) == text


def test_exact_shares_have_two_decimals() -> None:
    assert [share_text(share) for share in (0, 0.00004, -1e-9, 1 / 3, -0.5)] == [
        *["0.00 %"] * 3,
        "33.33 %",
        "-50.00 %",
    ]


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("rank", range(5))
def test_numbers_contrast_with_their_box(kind: str, rank: int) -> None:
    colour = op_colour(kind, rank, 5)
    light, dark = sorted((_luminance(colour), _luminance(to_rgb(ink_on(colour)))), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def _luminance(colour: Rgb) -> float:
    """WCAG 2."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
