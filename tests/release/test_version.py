"""The version comes from git where there is one, from the sdist otherwise, and from the fallback in the last resort."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.release.conftest import ROOT, version_of

QUIET = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
AUTHOR = {f"GIT_{who}_{what}": "nobody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *words: str) -> None:
    environment = os.environ | QUIET | AUTHOR
    subprocess.run(["git", *words], cwd=folder, env=environment, check=True, capture_output=True, timeout=60)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with the files alone that decide the version of a build."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def repository(sources: Path) -> Path:
    """Repository with two commits and no tag."""
    git(sources, "init", "--quiet")
    git(sources, "add", ".")
    git(sources, "commit", "--quiet", "--message=first")
    git(sources, "commit", "--quiet", "--allow-empty", "--message=second")
    return sources


def clone(repository: Path, *options: str) -> Path:
    folder = repository.parent / "clone"
    git(repository.parent, "clone", "--quiet", *options, f"file://{repository}", str(folder))
    return folder


def test_a_tagged_commit_has_the_version_of_its_tag(repository: Path) -> None:
    git(repository, "tag", "v0.4.0")
    assert version_of(repository) == "0.4.0"
    assert version_of(clone(repository, "--depth=1", "--branch=v0.4.0")) == "0.4.0"


def test_a_commit_after_a_tag_is_before_the_next_version(repository: Path) -> None:
    git(repository, "tag", "v0.4.0")
    git(repository, "commit", "--quiet", "--allow-empty", "--message=third")
    assert re.fullmatch(r"0\.4\.1\.dev1\+g[0-9a-f]+", version_of(repository))


def test_without_a_tag_commits_are_counted(repository: Path) -> None:
    assert re.fullmatch(r"0\.1\.dev2\+g[0-9a-f]+", version_of(repository))


def test_a_shallow_clone_without_a_tag_names_its_commit(repository: Path) -> None:
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]+", version_of(clone(repository, "--depth=1")))


def test_sources_without_git_have_the_fallback(sources: Path) -> None:
    assert version_of(sources) == "0.1.dev0"


def test_the_command_line_says_its_version() -> None:
    said = subprocess.run([sys.executable, "-m", "optpipe", "--version"], capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout) == (0, f"optpipe {version('optpipe')}\n")
