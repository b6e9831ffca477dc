"""The pages whose commands a run of the tests takes: they have changed, or it is their turn.

Commands of all pages take minutes. `make test-slow` runs all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.docs.blocks import COMMANDS, ROOT, Block, blocks_in, pages
from tests.sample import FULL, SEED, examples

ALWAYS = ("README.md", "docs/tutorial.md")
"""Pages that a newcomer runs first."""

LANDING_S = 24 * 3600
"""Commits that are tested together are made within so long."""


def chosen_pages() -> Sequence[Path]:
    """README, the tutorial, pages with changed commands, and a fifth of the others: first what a change concerns."""
    found = {page: commands for page in pages() if (commands := _commands(page.read_text()))}
    base = _base()
    if FULL or base is None:
        return list(found)
    certain = [p for p in found if name_of(p) in ALWAYS or found[p] != _commands(_text_at(base, p))]
    others = [page for page in found if page not in certain]
    changed = _git("diff", "--name-only", base).splitlines()
    turns = sorted(Random(SEED).sample(others, len(others)), key=lambda page: not is_concerned(page, changed))
    return sorted(certain + turns[: examples(len(others))])


def name_of(page: Path) -> str:
    """The page's path from the root."""
    return str(page.relative_to(ROOT))


def is_concerned(page: Path, changed: Iterable[str]) -> bool:
    """True if a changed file is a command or an example that the page names, or what runs every command."""
    text = page.read_text()
    for path in changed:
        folder, _, name = path.rpartition("/")
        if folder == "optpipe/cli":
            command = name.removesuffix(".py").partition("_")[0]  # train_report.py is a part of `optpipe train`
            if f"optpipe {command}" in text or not _is_command(command):
                return True
        elif path.startswith("examples/") and (path in text or path.removesuffix(".py").replace("/", ".") in text):
            return True
    return False


def _is_command(name: str) -> bool:
    from optpipe.cli.app import COMMANDS, GROUPS

    return name in GROUPS or name in COMMANDS


def _commands(text: str) -> Sequence[Block]:
    """Parts of a page that are run, wherever they stand there."""
    return [
        replace(block, line=0)
        for block in blocks_in(text)
        if block.mark == "file" or (block.language in COMMANDS and block.mark != "not run")
    ]


def _base() -> str | None:
    """Text before the last day's commits; None where git does not know."""
    try:
        head_s = int(_git("log", "-1", "--format=%ct"))
        return _git("rev-list", "-1", f"--before={head_s - LANDING_S}", "HEAD").strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _text_at(base: str, page: Path) -> str:
    """A page as it stood; empty before it was written."""
    try:
        return _git("show", f"{base}:{name_of(page)}")
    except subprocess.CalledProcessError:
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
