"""The fenced blocks of a Markdown page, and what a comment directly above one says about it.

<!-- not run: why -->    a command that cannot run in a test; the reason is for the reader of the page's source
<!-- file: name.py -->   the block is the content of a file that later commands use
<!-- exit: 3 -->         the last command of the block ends with this exit code
<!-- output -->          what the block before printed: these lines, in this order, with other numbers perhaps
<!-- output: exact -->   the same, number for number
<!-- given: command -->  no block: a command that the page's reader has run before it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
COMMANDS = ("sh", "bash", "python")
"""Languages of blocks that are run."""
OTHERS = ("csv", "ini", "json", "text", "toml", "yaml")
"""Languages of blocks that are to be read."""
MARK = re.compile(r"<!--\s*(not run|file|exit|output|given)(?::\s*(.+?))?\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fence of a page, at a line counted from 1, with the mark above it (empty: none) and what the mark says."""

    line: int
    language: str
    text: str
    mark: str = ""
    says: str = ""

    @property
    def is_directive(self) -> bool:
        """True if it is Sphinx's, not the reader's."""
        return self.language.startswith("{")


def pages() -> Sequence[Path]:
    """Every page of the documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> Sequence[Block]:
    """The blocks of a page in order; one that is indented, and a mark above no block, have no known language."""
    return blocks_in(page.read_text())


def blocks_in(text: str) -> Sequence[Block]:
    """The blocks of a page's text."""
    return list(_blocks(text))


def spans_of(page: Path) -> Iterator[tuple[int, str]]:
    """Code within sentences and tables, with the line where its paragraph begins."""
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        line = token.map[0] + 1 if token.map else 0
        yield from ((line, child.content) for child in token.children or [] if child.type == "code_inline")


def _blocks(text: str) -> Iterator[Block]:
    mark, says = "", ""
    for token in MarkdownIt().disable("inline").parse(text):
        line = token.map[0] + 1 if token.map else 0
        found = MARK.fullmatch(token.content.strip()) if token.type == "html_block" else None
        if token.type == "fence":
            yield Block(line, token.info.strip(), token.content, mark, says)
        elif token.type == "code_block":
            yield Block(line, "indented, without a fence", token.content)
        elif mark:
            yield Block(line, f"nothing that <!-- {mark} --> could be about", "")
        mark, says = (found[1], found[2] or "") if found else ("", "")
        if mark == "given":
            yield Block(line, "sh", says + "\n", mark)
            mark, says = "", ""
