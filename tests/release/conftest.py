"""Fixtures: what would be released, built once for each process of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Distributions(NamedTuple):
    """The sdist, and the wheel that was built from it."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Both, by the installed build tools: an isolated build would fetch them again."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Distributions(sdist, wheel)


def version_of(folder: Path) -> str:
    """Version of a build of the sources in `folder`."""
    command = [sys.executable, "-m", "hatchling", "version"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    return said.stdout.strip()
