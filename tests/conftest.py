"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.durations import Durations, known_s, longest_first
from tests.forked import SERVICES, forking
from tests.ranks import RunRanks
from tests.sample import FULL, SEED, examples
from tests.torchrun import LOOPBACK

# Threads of two processes that wait for one another on two processors take several times as long as one of each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline, and nothing judged by its time: a first example may compile a kernel or wait for a busy core.
settings.register_profile(
    "sample",
    parent=settings(),
    max_examples=examples(100),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("sample")

SLOW_TEST_S = 3600
"""A limit for tests that are marked as slow; that of all others is in pyproject.toml."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of `make durations`."""
    parser.addoption("--write-durations", action="store_true", help="keep the seconds of each file")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis draw by the seed of this run, unless another one is given; measure files where that is asked."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = SEED
    if config.option.write_durations and not _shares_a_run(config):
        config.pluginmanager.register(Durations())


def _shares_a_run(config: pytest.Config) -> bool:
    """True in a process that pytest-xdist has started."""
    return hasattr(config, "workerinput")


def pytest_report_header() -> str:
    """The seed and the size."""
    return _size()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seed once more, where somebody who reads of a failure looks."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"{_size()} Repeat with OPTPIPE_TEST_SEED={SEED}.")


def _size() -> str:
    return f"Enumerations: {'whole' if FULL else 'a tenth'}, seed {SEED}."


def pytest_runtest_setup() -> None:
    """Let tests interrupt themselves and what they start.

    All that a script runs in the background ignores SIGINT. OR-Tools takes it for the time of a solve, unless it is
    told not to, and then leaves it to the system, which ends the process.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give what takes minutes more time than all else has, and begin with what takes long where processes share it."""
    if _shares_a_run(config):
        longest_first(items, known_s())
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_S))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is loaded: all of it stays, and each look would take a second of a core."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests and fixtures run in asyncio, as the service does."""
    return "asyncio"


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The address of a PostgreSQL for all tests of this process."""
    from tests.postgresql import migrated_postgresql  # slow to load, and rarely needed where few tests run

    with migrated_postgresql() as url:
        yield url


@pytest.fixture(scope="session")
def forked() -> Iterator[Path]:
    """A folder with commands whose processes are forked, and for which warnings are errors; see `tests.forked`."""
    with forking("-W", "error", environment=LOOPBACK) as folder:
        yield folder


@pytest.fixture(scope="session")
def forked_services() -> Iterator[Path]:
    """A folder with a `python` whose processes have loaded what those of a service need."""
    with forking(loaded=SERVICES) as folder:
        yield folder


@pytest.fixture(scope="module")
def forked_pool(forked_services: Path) -> Iterator[None]:
    """Let the processes of a service's pool be forked: each would take longer to load than to do its tasks."""
    python = str(forked_services / "python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.process_pool.module_command", lambda *arguments: [python, "-P", "-m", *arguments])
        yield


@pytest.fixture
def forked_children(forked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let solves and plans in a process of their own begin in one that is forked."""
    monkeypatch.setattr(sys, "executable", str(forked / "python"))


@pytest.fixture(scope="session")
def run_ranks(forked: Path) -> RunRanks:
    """Runs the ranks of a training without torchrun, and sooner; see `tests.ranks`."""
    return RunRanks(forked)
