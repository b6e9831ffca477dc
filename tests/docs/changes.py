"""The pages whose commands a run of the tests takes: they have changed, or it is their turn.

Commands of all pages take minutes. `make test-slow` runs all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.docs.blocks import COMMANDS, ROOT, Block, blocks_in, pages
from tests.sample import FULL, SEED, examples

ALWAYS = ("README.md", "docs/tutorial.md")
"""Pages that a newcomer runs first."""

LAST = 2
"""So many pages, or all of one commit, run because their commands changed last. Each was among them when it changed."""


def chosen_pages() -> Sequence[Path]:
    """README, the tutorial, pages whose commands changed last, and a tenth of the others: first what a change concerns.

    All pages where git does not know.
    """
    found = [page for page in pages() if _commands(page.read_text())]
    if FULL:
        return found
    try:
        last, changed = _last_changes(found)
    except (OSError, subprocess.CalledProcessError):
        return found
    others = [page for page in found if page not in last and name_of(page) not in ALWAYS]
    turns = sorted(Random(SEED).sample(others, len(others)), key=lambda page: not is_concerned(page, changed))
    return sorted({*found} - {*others} | {*turns[: examples(len(others))]})


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


def _last_changes(found: Collection[Path]) -> tuple[Collection[Path], Collection[str]]:
    """The pages whose commands changed last, and all files that changed with them.

    They are those of what is not committed, of commits that no remote has, and of the last commits of all.
    """
    own = _git("rev-list", "HEAD", "--not", "--remotes").split() if _git("for-each-ref", "refs/remotes") else ()
    last: set[Path] = set()
    changed: set[str] = set()
    for commit in ("", *_git("rev-list", "HEAD").split()):
        if len(last) >= LAST and commit not in own:
            break
        before = f"{commit}^" if commit else "HEAD"
        names = {*_git("diff", "--name-only", *filter(None, (before, commit))).splitlines()}
        touched = [page for page in found if name_of(page) in names]
        last |= {page for page in touched if _commands_at(before, page) != _commands_at(commit, page)}
        changed |= names
    return last, changed


def _commands_at(commit: str, page: Path) -> Sequence[Block]:
    """Those of a page as it stood, or stands where there is no commit; none before it was written."""
    try:
        return _commands(_git("show", f"{commit}:{name_of(page)}") if commit else page.read_text())
    except subprocess.CalledProcessError:
        return []


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
