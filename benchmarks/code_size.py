"""Sizes of the code: lines, short files, functions used exactly once. `python -m benchmarks.code_size`.

With folders of other packages as arguments, the same figures of those, to compare with.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

SHORT_FILE_LINES = 40
PACKAGES = ("optpipe", "solver", "api")


@dataclass(frozen=True)
class CodeSize:
    """Figures of a group of packages.

    `lines` are all lines of all files. A file that is only a package's `__init__` counts as neither file nor short
    file. `functions` are functions and methods that code calls by name: no decorated ones, which a framework calls, and
    no special methods; `used_once` of them are named in exactly one place, their definition aside.
    """

    lines: int
    files: int
    short_files: int
    median_lines: float
    functions: int
    used_once: tuple[str, ...]


def measure(folders: Iterable[Path]) -> CodeSize:
    """Measure all Python files below the folders."""
    sources = {path: path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))}
    lengths = [len(text.splitlines()) for path, text in sources.items() if path.name != "__init__.py"]
    uses: Counter[str] = Counter()
    functions: list[tuple[str, str]] = []
    for path, text in sources.items():
        tree = ast.parse(text)
        uses.update(_names(tree))
        functions += [(node.name, f"{path}:{node.lineno} {node.name}") for node in _called_by_name(tree)]
    return CodeSize(
        lines=sum(len(text.splitlines()) for text in sources.values()),
        files=len(lengths),
        short_files=sum(length < SHORT_FILE_LINES for length in lengths),
        median_lines=median(lengths),
        functions=len(functions),
        used_once=tuple(location for name, location in functions if uses[name] == 1),
    )


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _called_by_name(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.decorator_list and not node.name.startswith("__"):
            yield node


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help=f"default: {', '.join(PACKAGES)}, and all three")
    parser.add_argument("--list", action="store_true", help="name every function that is used exactly once")
    options = parser.parse_args()
    each = [[folder] for folder in options.folders or map(Path, PACKAGES)]
    groups = each if len(each) == 1 else [*each, [folder for [folder] in each]]
    table = Table("", "lines", "files", "median lines", f"under {SHORT_FILE_LINES} lines", "functions", "used once")
    for group in groups:
        size = measure(group)
        short, once = size.short_files / size.files, len(size.used_once) / size.functions
        names = ", ".join(folder.name for folder in group)
        table.add_row(
            names, f"{size.lines:,}", f"{size.files}", f"{size.median_lines:g}", f"{size.short_files} ({short:.1%})",
            f"{size.functions:,}", f"{len(size.used_once)} ({once:.1%})",
        )  # fmt: skip
    Console(width=120).print(table)
    if options.list:
        print(*size.used_once, sep="\n")


if __name__ == "__main__":
    main()
