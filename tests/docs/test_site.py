"""The site builds without a warning: every link and anchor resolves, every name of the reference exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from optpipe.cli.app import COMMANDS
from solver.methods import METHODS
from tests.docs.blocks import ROOT
from tests.sample import FULL

BUILD_S = 300
OUTSIDE = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")
"""Pages that the site does not read as they are."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built site; at full size with what takes half of the time, and no test looks at."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    command += [] if FULL else ["-t", "quick"]
    built = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), "docs", str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_the_command_line_reference_has_every_command(site: Path) -> None:
    page = (site / "reference" / "command-line.html").read_text()
    assert len(COMMANDS) > 10
    for name in COMMANDS:
        assert f'id="optpipe-{name}"' in page


def test_the_search_finds_what_people_look_for(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    terms = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["terms"]
    assert {"70b", "gqa", "mfu", "bubbl", "oom"} <= terms.keys()  # as Sphinx stems them


def test_the_reference_has_the_names_that_callers_use(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
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
        assert f'id="{name}"' in pages, name
    assert "├── InputError" in pages


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
