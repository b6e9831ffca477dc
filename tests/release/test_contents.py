"""Contents of the sdist and the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

from instances import INSTANCES
from tests.release.conftest import ROOT, Distributions, version_of

PACKAGES = ("api", "optpipe", "solver")
NOT_INSTALLED = {"api/web/tsconfig.json"}
"""For those who develop the page."""
NOT_RELEASED = {".gitignore"}


@pytest.fixture(scope="module")
def in_wheel(distributions: Distributions) -> frozenset[str]:
    with ZipFile(distributions.wheel) as wheel:
        return frozenset(wheel.namelist())


@pytest.fixture(scope="module")
def in_sdist(distributions: Distributions) -> frozenset[str]:
    with tarfile.open(distributions.sdist) as sdist:
        return frozenset(name.partition("/")[2] for name in sdist.getnames())


def metadata(distributions: Distributions) -> Message:
    with ZipFile(distributions.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(wheel.read(name))


@pytest.fixture(scope="module")
def unpacked(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a folder, as pip lays it out; what it asks for comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("unpacked")
    with ZipFile(distributions.wheel) as wheel:
        wheel.extractall(folder)
    return folder


def kept_in_git(*folders: str) -> Iterator[str]:
    """Files of the repository that are there; skips the test where this is none, as in an unpacked sdist."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository to compare with")
    return (name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def test_the_wheel_has_every_file_of_the_packages(in_wheel: frozenset[str]) -> None:
    assert set(kept_in_git(*PACKAGES)) - NOT_INSTALLED <= in_wheel


def test_both_have_the_site_where_it_was_built(in_wheel: frozenset[str], in_sdist: frozenset[str]) -> None:
    built = (ROOT / "out" / "docs" / "index.html").is_file()
    assert ("api/web/docs/index.html" in in_wheel, "out/docs/index.html" in in_sdist) == (built, built)


@pytest.mark.parametrize(
    "pattern",
    [
        "optpipe/py.typed",
        "solver/py.typed",
        "api/py.typed",
        "api/migrations/env.py",
        "api/migrations/versions/*.py",
        "api/demo_data/*.json",
        "api/web/templates/index.html",
        "api/web/static/js/main.js",
        "api/web/static/styles/base.css",
        "solver/instances/reference.json",
        "solver/instances/suites/small.json",
    ],
)
def test_the_wheel_has_what_runs_without_the_repository(in_wheel: frozenset[str], pattern: str) -> None:
    assert any(PurePosixPath(name).match(pattern) for name in in_wheel)


def test_the_wheel_has_the_packages_alone(in_wheel: frozenset[str]) -> None:
    tops = {name.split("/")[0] for name in in_wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not any(Path(name).name.startswith(("test_", "conftest")) for name in in_wheel)
    assert not any(Path(name).suffix in (".pyc", ".nbi", ".nbc") for name in in_wheel)


def test_the_suites_come_with_the_wheel(unpacked: Path) -> None:
    ours = {str(file.relative_to(INSTANCES)) for file in INSTANCES.rglob("*.json")}
    installed = unpacked / "solver" / "instances"
    assert {str(file.relative_to(installed)) for file in installed.rglob("*.json")} == ours
    assert not list(installed.rglob("*.py"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("published", "--plot", "x.bmp"), "x.bmp: has the suffix '.bmp'"),  # by then all problems have been read
        (("small", "--record"), "error: --record would change the installed suite"),
    ],
)
def test_suites_are_found_from_any_folder_and_not_recorded_where_they_are_installed(
    unpacked: Path, tmp_path: Path, words: Sequence[str], message: str
) -> None:
    command = [sys.executable, "-m", "optpipe", "bench", *words]
    variables = os.environ | {"PYTHONPATH": str(unpacked)}
    said = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert message in said.stderr


def test_the_sdist_has_the_repository(in_sdist: frozenset[str]) -> None:
    assert set(kept_in_git()) - NOT_RELEASED <= in_sdist


def test_the_sdist_has_nothing_that_was_left_lying_about(in_sdist: frozenset[str]) -> None:
    left = {"out", "build", "dist", ".venv", ".git", "__pycache__", ".hypothesis", ".mypy_cache"}
    assert not any(left & set(name.split("/")) for name in in_sdist)


def test_an_sdist_keeps_its_version(distributions: Distributions, tmp_path: Path) -> None:
    with tarfile.open(distributions.sdist) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"optpipe-{version_of(folder)}"


def test_an_extra_brings_what_its_name_says(distributions: Distributions) -> None:
    said = metadata(distributions)
    needs = [line.replace("'", '"') for line in said.get_all("Requires-Dist", [])]
    extra = {name: [need for need in needs if f'extra == "{name}"' in need] for name in ("train", "serve", "all")}
    assert any(need.startswith("torch>") for need in extra["train"])
    assert not any(need.startswith("torch>") for need in extra["serve"])
    assert any(need.startswith("fastapi>") for need in extra["serve"])
    assert not any("extra ==" not in need and need.startswith(("torch", "fastapi")) for need in needs)


def test_what_is_said_of_the_release(distributions: Distributions) -> None:
    said = metadata(distributions)
    assert said["Name"] == "optpipe"
    assert said["Requires-Python"] == ">=3.11"
    assert said["Description-Content-Type"] == "text/markdown"
    assert f"-{said['Version']}" in distributions.sdist.name
    assert f"-{said['Version']}-py3-none-any" in distributions.wheel.name
