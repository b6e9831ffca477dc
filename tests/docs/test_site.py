"""The site builds without a warning: every link and anchor resolves, every name of the reference exists."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docutils.nodes import document
from markdown_it import MarkdownIt

from optpipe.cli.app import COMMANDS
from solver.methods import METHODS
from tests.docs.blocks import ROOT

BUILD_S = 300
OUTSIDE = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")
"""Pages that the site does not read as they are."""


@pytest.fixture(scope="module")
def doctrees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all pages as Sphinx has read them, every reference resolved: half of what the site takes."""
    return build("dummy", tmp_path_factory.mktemp("site")) / "doctrees"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built site."""
    return build("html", tmp_path_factory.mktemp("site")) / "html"


def build(builder: str, folder: Path) -> Path:
    """Fill and return the folder; no warning is let through."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", builder]
    built = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), "docs", str(folder / builder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def page_of(doctrees: Path, name: str) -> document:
    found: document = pickle.loads((doctrees / f"{name}.doctree").read_bytes())
    return found


def test_the_command_line_reference_has_every_command(doctrees: Path) -> None:
    page = page_of(doctrees, "reference/command-line")
    assert len(COMMANDS) > 10
    assert {f"optpipe-{name}" for name in COMMANDS} <= page.ids.keys()


def test_the_reference_has_the_names_that_callers_use(doctrees: Path) -> None:
    known = pickle.loads((doctrees / "environment.pickle").read_bytes()).domaindata["py"]["objects"]
    for name in (
        "optpipe.problem.Problem",
        "optpipe.schedule.Schedule",
        "optpipe.simulate.simulate",
        "optpipe.verify.verify",
        "optpipe.client.Client.solve",
        "optpipe.compile.compile_schedule",
        "optpipe.runtime.Pipeline",
        "optpipe.train.train",
        "optpipe.plot.draw_schedule",
        "optpipe.trace.Trace",
        "optpipe.errors.InfeasibleError",
        "solver.solve.solve",
        *(f"{method.orders.__module__}.{method.orders.__name__}" for method in METHODS.values() if method.orders),
    ):
        assert name in known, name
    assert "├── InputError" in page_of(doctrees, known["optpipe.errors.InputError"].docname).astext()


@pytest.mark.slow
def test_the_search_finds_what_people_look_for(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    terms = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["terms"]
    assert {"70b", "gqa", "mfu", "bubbl", "oom"} <= terms.keys()  # as Sphinx stems them


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="([^"]+)"|<link[^>]*\bhref="([^"]+)"', page.read_text())
        assert not [where for where in map("".join, loaded) if "//" in where], page


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_between_files_lead_somewhere(name: str) -> None:
    for token in MarkdownIt().parse((ROOT / name).read_text()):
        for part in token.children or ():
            where = str(part.attrs.get("href") or part.attrs.get("src") or "")
            if where and not re.match(r"https?:|#", where):
                assert (ROOT / where.partition("#")[0]).exists(), where
