"""The pages of the contract and of the promises say what the code and the tests have, all of it and nothing else."""

from __future__ import annotations

import ast
import re
from typing import get_args

import pytest

import api
import optpipe
import solver
from api import create_app
from api.jobs.records import EventKind, JobConfig, Reason, Status, StopReason
from api.models import JobAnswer
from api.routes.documents import Format as Served
from api.settings import Settings
from optpipe.cli import app as app_module
from optpipe.cli.app import COMMANDS, GROUPS
from optpipe.cli.export import Format as Exported
from solver.methods import METHODS
from tests.docs.blocks import ROOT

REFERENCE = ROOT / "docs" / "reference"
CONTRACT = (REFERENCE / "contract.md").read_text()
PROMISES = (REFERENCE / "promises.md").read_text()
TESTS = ROOT / "tests" / "promises"


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", CONTRACT, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `?([^|`]+?)`? \|", text, re.MULTILINE)


def quoted(pattern: str, text: str) -> list[str]:
    """The names in backticks of the passage that the pattern finds."""
    found = re.search(pattern, text, re.DOTALL)
    assert found, pattern
    return re.findall(r"`([^`]+)`", found[1])


def test_every_command() -> None:
    told = [cell for cell in first_cells(section("Commands")) if cell.startswith("optpipe ")]
    names = [*COMMANDS, *GROUPS]
    assert sorted(told) == sorted(f"optpipe {name}" for name in names)
    assert quoted(r"Formats of `export --to`: (.*?)\.\n", CONTRACT) == list(Exported)


def test_every_exit_code() -> None:
    told = {int(cell) for cell in first_cells(section("Commands")) if cell.isdigit()}
    assert told == {0} | {code for name, code in vars(app_module).items() if name.startswith("EXIT_")}


def test_every_method() -> None:
    assert sorted(re.findall(r"`([^`]+)`", section("Methods"))) == sorted(METHODS)


def test_every_name_that_a_package_offers() -> None:
    told = re.findall(r"^\| `from (\w+) import ([^`]+)`", section("Python"), re.MULTILINE)
    assert {package: names.split(", ") for package, names in told} == {
        package.__name__: package.__all__ for package in (optpipe, solver, api)
    }


def test_every_route() -> None:
    told = [cell for cell in first_cells(section("HTTP")) if " /" in cell]
    paths = create_app(Settings()).openapi()["paths"]
    routes = [f"{verb.upper()} {path}" for path, verbs in paths.items() for verb in verbs]
    assert sorted(told) == sorted([*routes, "GET /"])


def test_every_field_of_a_submission_and_of_a_job() -> None:
    text = section("HTTP").replace("\n", " ")
    assert quoted(r"`config` may have (.*?)\. A job", text) == list(JobConfig.model_fields)
    assert quoted(r"A job has (.*?)\. Its", text) == list(JobAnswer.model_fields)
    assert quoted(r"Its `status` is (.*?);", text) == list(get_args(Status))
    assert quoted(r"a `reason` \((.*?)\)", text) == list(get_args(Reason))
    assert quoted(r"a `limit` \(`null`, (.*?)\)", text) == list(get_args(StopReason))
    assert quoted(r"server-sent events (.*?);", text) == list(get_args(EventKind))
    assert quoted(r"`\?format=` (.*?) \|", text) == list(get_args(Served))


@pytest.mark.parametrize("letter", "RS")
def test_every_promise_has_one_test_file_which_begins_with_its_name(letter: str) -> None:
    rows = re.findall(rf"^\| ({letter}\d+) \|.*\| `([^`]+)` \|$", PROMISES, re.MULTILINE)
    assert [name for name, _ in rows] == [f"{letter}{k}" for k in range(1, len(rows) + 1)]
    assert sorted(file for _, file in rows) == sorted(path.name for path in TESTS.glob(f"test_{letter.lower()}[0-9]*"))
    for name, file in rows:
        tests = ast.parse((TESTS / file).read_text())
        assert re.match(rf"{name}\b", ast.get_docstring(tests) or ""), file
        assert any(_is_test(node) for node in tests.body), file


def test_every_test_of_the_service_that_is_named_is_there() -> None:
    named = re.findall(r"`([a-z0-9_/]+\.py)(?:::(\w+))?`", (REFERENCE / "service-tests.md").read_text())
    assert len(named) > 50
    for file, test in named:
        tests = ast.parse((ROOT / "tests" / file).read_text())
        names = [node.name for node in tests.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert not test or test in names, (file, test)


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
