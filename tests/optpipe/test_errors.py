"""Messages that hold names are of a length that can be read."""

from __future__ import annotations

import pickle
import sys

import pytest

from optpipe import cli
from optpipe.errors import (
    MOST_NAMES,
    DeadlockError,
    InfeasibleError,
    InputError,
    Issue,
    MissingExtraError,
    NoSolutionError,
    OptPipeError,
    ServiceError,
    cycle_text,
    needs_extra,
)
from solver.process import SolverDiedError


@pytest.mark.parametrize(("names", "text"), [(["F0.0"], "F0.0 -> F0.0"), (["B0.0", "W0.0"], "B0.0 -> W0.0 -> B0.0")])
def test_a_cycle_ends_where_it_begins(names: list[str], text: str) -> None:
    assert cycle_text(names) == text


def test_a_long_cycle_is_cut_in_the_message_alone() -> None:
    names = [f"F0.{i}" for i in range(1000)]
    error = DeadlockError(names, 1000)
    assert len(error.cycle) == 1000
    assert f"F0.{MOST_NAMES - 1} -> ... -> F0.0. Maybe" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        InputError([Issue(("stages", 3), "out_of_range", "is 0.")], "a.json"),
        DeadlockError(["F0.0", "B0.0"], 2),
        InfeasibleError("No schedule fits.", [None, 7]),
        ServiceError("The service is busy.", status=503, passing=True, retry_after_s=2.0),
        NoSolutionError("Nothing was found."),
        SolverDiedError("was killed", None),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pass_between_processes(error: OptPipeError) -> None:
    """A pool of processes ends with the first one that does not."""
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_a_missing_package_is_named_with_its_extra() -> None:
    message = r"^the service needs not_there, .*'optpipe\[serve\]'\.$"
    with pytest.raises(MissingExtraError, match=message), needs_extra("serve", "the service"):
        import not_there  # type: ignore[import-not-found]  # noqa: F401


def test_other_errors_pass() -> None:
    with pytest.raises(ImportError, match="cannot import name"), needs_extra("serve", "the service"):
        from math import not_there  # type: ignore[attr-defined]  # noqa: F401


def test_the_command_line_ends_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "api.server", raising=False)  # which another test may have loaded
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: the service needs uvicorn, which is not installed. Maybe pip install 'optpipe[serve]'.\n"
    )
