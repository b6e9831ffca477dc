"""The kernels are compiled once for an installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

from instances import instance
from optpipe.problem import Problem
from solver import kernels, warm_up
from solver.limits import Limits
from solver.solve import solve
from tests.optpipe.test_spread import vocabulary


def signatures() -> dict[str, int]:
    """Number of signatures of each kernel in this process."""
    kernels = [
        kernel
        for name, module in list(sys.modules.items())
        if name.startswith(("solver.", "optpipe."))
        for kernel in vars(module).values()
        if isinstance(kernel, Dispatcher)
    ]
    return {f"{kernel.__module__}.{kernel.__name__}": len(kernel.signatures) for kernel in kernels}


@pytest.fixture(scope="module")
def is_warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, bool]:
    """True if an installation counts as warm: before and after the warm-up of this process."""
    folder = tmp_path_factory.mktemp("marks")
    (folder / "no").write_text("a file where a folder is wanted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_folders", lambda: [folder / "no" / "such", folder])
        patch.setattr(warm_up, "WORK", warm_up.WORK / 4)  # what less work calls, more does too
        patch.setattr(warm_up, "forget_stale", lambda: None)  # it would forget what other tests need
        before = warm_up.is_warm()
        warm_up.warm_up()
        return before, warm_up.is_warm()


def test_is_done_once_for_an_installation(is_warm: tuple[bool, bool]) -> None:
    assert is_warm == (False, True)


@pytest.mark.usefixtures("is_warm")
def test_leaves_no_kernel_to_compile() -> None:
    """No kernel gains a signature in a solve of another problem after the warm-up."""
    before = signatures()
    assert len(before) > 20
    for method in ("auto", "pattern", "search"):
        for problem in (instance("d-p4-m8-o1-mo1-b1o2-vshape-make"), instance("zb-1.5b-p8-m24-mem2")):
            solve(problem, method, Limits(workers=1, deterministic_limit=0.05))
    solve(Problem.from_data(vocabulary(2, 4)), "search", Limits(workers=1, deterministic_limit=0.05))
    assert signatures() == before


def test_in_the_background_one_process_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call meanwhile starts no other, and reports that one is running."""
    monkeypatch.setattr(kernels, "_folders", lambda: [tmp_path])
    monkeypatch.setattr(warm_up, "forget_stale", lambda: None)
    started = []
    begin = subprocess.Popen

    def noted(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(begin(["sleep", "60"], **options))
        assert command[-1] == "--background"
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    assert warm_up.warm_up_in_background()
    assert warm_up.warm_up_in_background()
    (process,) = started
    process.kill()
    process.wait()
    kernels.mark(kernels.WARM)
    assert not warm_up.warm_up_in_background()
    assert started == [process]
