"""The pages whose commands a run of the tests takes: what they say or run has changed, or it is their turn.

Commands of all pages take minutes. `make test-slow` runs all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.docs.blocks import ROOT, pages
from tests.sample import FULL, some

ALWAYS = ("README.md", "docs/tutorial.md")
"""Pages that a newcomer runs first."""

LANDING_S = 24 * 3600
"""Commits that are tested together are made within so long."""


def chosen_pages() -> Sequence[Path]:
    """README, the tutorial, the pages that a change concerns, and a fifth of the others."""
    changed = _changed_files()
    if FULL or changed is None:
        return pages()
    concerned = [page for page in pages() if name_of(page) in ALWAYS or is_concerned(page, changed)]
    others = [page for page in pages() if page not in concerned]
    return sorted(concerned + some(others))


def name_of(page: Path) -> str:
    """The page's path from the root."""
    return str(page.relative_to(ROOT))


def is_concerned(page: Path, changed: Iterable[str]) -> bool:
    """True if a changed file is the page, a command or an example that it names, or what runs every command."""
    text = page.read_text()
    for path in changed:
        folder, _, name = path.rpartition("/")
        if path == name_of(page):
            return True
        if folder == "optpipe/cli":
            command = name.removesuffix(".py").partition("_")[0]  # train_report.py is a part of `optpipe train`
            if f"optpipe {command}" in text or not _is_command(command):
                return True
        elif path.startswith("examples/") and (path in text or path.removesuffix(".py").replace("/", ".") in text):
            return True
    return False


def _is_command(name: str) -> bool:
    from optpipe.cli.app import app

    groups = [str(group.name) for group in app.registered_groups]
    return name in groups or name in [str(command.name) for command in app.registered_commands]


def _changed_files() -> Sequence[str] | None:
    """Files that differ from what stood before the last day's commits; None where git does not know."""
    try:
        head_s = int(_git("log", "-1", "--format=%ct"))
        base = _git("rev-list", "-1", f"--before={head_s - LANDING_S}", "HEAD").strip()
        return _git("diff", "--name-only", base).splitlines() if base else None
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
