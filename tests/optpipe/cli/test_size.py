"""Sizes and shares as people write them."""

from __future__ import annotations

import pytest
import typer

from optpipe.cli.size import parse_share, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("8GiB", 8 * 2**30), ("8G", 8 * 2**30), ("1.5 GB", 1_500_000_000), ("512M", 2**29), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "8Gi", "GiB", "1e9", "8 G B", "nan", "\u0661"])
def test_other_things(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is not a size\. Maybe write it as 8GiB"):
        parse_size(text)


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.1", 0.1), ("0", 0.0), ("12.5 %", 0.125), ("90%", 0.9)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "10", "91%", "-1%", "%", "1e-1", "nan"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is not a share from 0% to 90%\. Maybe write it as 10%"):
        parse_share(text)
