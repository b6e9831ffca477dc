"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RunRanks, ranks


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """Runs the ranks of a training without torchrun, and sooner; see `tests.ranks`."""
    with ranks() as run:
        yield run
