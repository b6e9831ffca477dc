"""Fixtures of all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks import RunRanks, ranks

# No deadline: a first example may compile a kernel or wait for a busy core. The same examples in every run, so that a
# failure is that of a change; `HYPOTHESIS_PROFILE=explore` looks for new ones.
settings.register_profile("same_everywhere", parent=settings(), deadline=None, derandomize=True)
settings.register_profile("explore", parent=settings(), deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same_everywhere"))

SLOW_TEST_S = 3600
"""A limit for tests that are marked as slow; that of all others is in pyproject.toml."""


def pytest_runtest_setup() -> None:
    """Let tests interrupt themselves and what they start.

    All that a script runs in the background ignores SIGINT. OR-Tools takes it for the time of a solve, unless it is
    told not to, and then leaves it to the system, which ends the process.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give what takes minutes more time than all else has."""
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("chaos"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_S))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests and fixtures run in asyncio, as the service does."""
    return "asyncio"


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """Runs the ranks of a training without torchrun, and sooner; see `tests.ranks`."""
    with ranks() as run:
        yield run
