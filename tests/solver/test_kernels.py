"""Compiled kernels are never of other sources than those that are there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba.core.caching import UserProvidedCacheLocator

import solver
from solver import kernels
from solver.kernels import _sources

ROOT = Path(solver.__path__[0]).parent
PROGRAM = """
from solver.kernels import forget_stale
forget_stale()
from solver.search.toy import answer
print(answer())
"""


def test_sources_are_kernels_and_the_constants_and_tables_that_they_use() -> None:
    sources = _sources()
    assert {
        "solver.search.annealing.kernel",
        "solver.search.annealing.sequence",
        "solver.search.annealing.table",
        "solver.search.modulo.pattern",
        "optpipe.kinds",
    } <= sources
    assert not {"solver.solve", "solver.kernels", "optpipe.verify"} & sources


def test_a_changed_constant_is_not_answered_with_old_machine_code(tmp_path: Path) -> None:
    """Numba alone would: the file of the kernel is the same."""
    for package in ("optpipe", "solver"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.nb?"))
    toy, constants = (tmp_path / "solver" / "search" / name for name in ("toy.py", "toy_constants.py"))
    toy.write_text(
        "from numba import njit\nfrom solver.search.toy_constants import ANSWER\n\n\n"
        "@njit(cache=True)\ndef answer():\n    return ANSWER\n"
    )
    constants.write_text("ANSWER = 1\n")
    assert _run(tmp_path) == "1"
    constants.write_text("ANSWER = 22\n")
    assert _run(tmp_path) == "22"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kernels, "_folders", lambda: [tmp_path])
    return tmp_path


def test_a_stage_is_ready_when_it_is_compiled_or_nobody_does(folder: Path) -> None:
    assert kernels.are_ready("search")
    lock = kernels.compiler_lock(wait=False)
    assert lock is not None
    with lock:
        assert kernels.compiler_lock(wait=False) is None
        assert not kernels.are_ready("search")
        kernels.mark("pattern")
        assert kernels.are_ready("pattern")
        assert not kernels.are_ready("search")
    assert kernels.are_ready("search")


def test_the_lock_is_that_of_the_process_that_it_was_passed_to(folder: Path) -> None:
    lock = kernels.compiler_lock(wait=False)
    assert lock is not None
    with lock:
        process = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()])
    try:
        assert not kernels.are_ready("search")
    finally:
        process.kill()
        process.wait()
    assert kernels.are_ready("search")


def test_marks_of_other_sources_are_forgotten_with_their_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an installation that goes back to a version would take it for compiled."""
    monkeypatch.setattr(kernels, "_indexes", lambda source: ())
    before = folder / "warm-0123456789abcdef"
    before.touch()
    kernels.mark("search")
    kernels.forget_stale.__wrapped__()
    assert not before.exists()
    assert kernels.is_marked("search")
    assert kernels.is_marked("fresh")


def test_a_process_with_a_cache_of_its_own_forgets_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, beside, own = tmp_path / "kernel.py", tmp_path / "__pycache__", tmp_path / "own"
    source.touch()
    beside.mkdir()
    shared = beside / "kernel.answer-1.py311.nbi"
    shared.touch()
    assert list(kernels._indexes(source)) == [shared]
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(own))
    locator = UserProvidedCacheLocator.from_function(kernels._indexes, str(source))
    private = Path(locator.get_cache_path()) / shared.name
    private.parent.mkdir(parents=True, exist_ok=True)
    private.touch()
    assert list(kernels._indexes(source)) == [private]


def test_where_nothing_can_be_written_nobody_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernels, "_folders", lambda: [tmp_path / "file" / "folder"])
    assert kernels.compiler_lock(wait=True) is None
    assert kernels.are_ready("search")


INTERRUPTED = """
import os, signal, sys
from numba.core import extending
from instances import uniform
from solver import solve

overload = extending.overload

def interrupting(*args, **named):
    "As overload; the first time that numba's module of texts calls it, Ctrl-C comes."
    global interrupted
    if not interrupted and sys._getframe(1).f_globals["__name__"] == "numba.cpython.unicode":
        interrupted = True
        os.kill(os.getpid(), signal.SIGINT)
    return overload(*args, **named)

interrupted, extending.overload = False, interrupting
try:
    solve(uniform(2, 3), "1f1b")
except KeyboardInterrupt:
    assert interrupted
    print(solve(uniform(2, 3), "1f1b").method)
"""


def test_an_interrupt_while_numba_loads_spoils_no_later_solve() -> None:
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-P", "-c", INTERRUPTED], env=own, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == "1f1b\n", run.stderr


def _run(folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env=environment | {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout.strip()
