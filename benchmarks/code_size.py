"""Sizes of the code: lines, short files, functions used once, files that name kinds. `python -m benchmarks.code_size`.

With folders of other packages as arguments, the same figures of those, to compare with. With ``--since REVISION``, the
lines of each room of the packages then and now.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from optpipe.kinds import KINDS

SHORT_FILE_LINES = 40
LONG_BODY_LINES = 12
PACKAGES = ("optpipe", "solver", "api")
KIND_LETTERS = re.compile(f"[{''.join({*''.join(KINDS)})}]+")
"""A string that names kinds of op, such as ``CB`` or ``FBW``."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class UsedOnce:
    """A function that is named in exactly one place, and how: what decides whether it can be inlined."""

    location: str
    how: str


@dataclass(frozen=True)
class CodeSize:
    """Figures of a group of packages.

    `lines` are all lines of all files, `code_lines` those that are not blank, a comment or in a docstring. A file that
    is only a package's `__init__` counts as neither file nor short file. `functions` are functions and methods that
    code calls by name: no decorated ones, which a framework calls, and no special methods; `used_once` of them are
    named in exactly one place, their definition aside. `kind_files` name kinds of op by a literal, one or several in a
    string: a new kind may concern each of them.
    """

    lines: int
    code_lines: int
    files: int
    short_files: int
    median_lines: float
    functions: int
    used_once: tuple[UsedOnce, ...]
    kind_files: tuple[Path, ...]


def measure(folders: Iterable[Path]) -> CodeSize:
    """Measure all Python files below the folders."""
    sources = {path: path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    lengths = [len(text.splitlines()) for path, text in sources.items() if path.name != "__init__.py"]
    uses: defaultdict[str, list[tuple[Path, bool]]] = defaultdict(list)
    for path, tree in trees.items():
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                uses[node.id if isinstance(node, ast.Name) else node.attr].append((path, id(node) in called))
    functions = [(path, node) for path, tree in trees.items() for node in _called_by_name(tree)]
    return CodeSize(
        lines=sum(len(text.splitlines()) for text in sources.values()),
        code_lines=sum(_count_code(text, trees[path]) for path, text in sources.items()),
        files=len(lengths),
        short_files=sum(length < SHORT_FILE_LINES for length in lengths),
        median_lines=median(lengths),
        functions=len(functions),
        used_once=tuple(
            UsedOnce(f"{path}:{node.lineno} {node.name}", _how(node, path, *uses[node.name][0]))
            for path, node in functions
            if len(uses[node.name]) == 1
        ),
        kind_files=tuple(path for path, tree in trees.items() if any(map(_names_kinds, ast.walk(tree)))),
    )


def _names_kinds(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(KIND_LETTERS.fullmatch(node.value))


def _called_by_name(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function) and not node.decorator_list and not node.name.startswith("__"):
            yield node


def _how(function: Function, defined: Path, used: Path, is_called: bool) -> str:
    body = function.body[ast.get_docstring(function) is not None :]
    lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
    if not is_called:
        return "passed as a value"
    if used != defined:
        return "called from another file"
    return f"{LONG_BODY_LINES} lines or more" if lines >= LONG_BODY_LINES else f"fewer than {LONG_BODY_LINES} lines"


def _count_code(text: str, tree: ast.AST) -> int:
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in docstrings for number, line in lines)


def room_lines(revision: str) -> Counter[str]:
    """Lines of Python in each folder of the packages in a commit; a file in no folder counts for its package."""
    lines: Counter[str] = Counter()
    names = _git("ls-tree", "-r", "--name-only", revision, *PACKAGES).splitlines()
    for name in names:
        if name.endswith(".py"):
            folders = Path(name).parts[:-1]
            lines["/".join(folders[:2])] += len(_git("show", f"{revision}:{name}").splitlines())
    return lines


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def _rooms(since: str) -> Table:
    """Lines of each room then and now, what grew most first."""
    then, now = room_lines(since), room_lines("HEAD")
    growth = {room: now[room] - then[room] for room in {*then, *now}}
    table = Table("", since, "now", "more", title="lines by room")
    for room in sorted(growth, key=lambda room: (-growth[room], room)):
        table.add_row(room, f"{then[room]:,}", f"{now[room]:,}", f"{growth[room]:+,}")
    table.add_row("all", f"{then.total():,}", f"{now.total():,}", f"{now.total() - then.total():+,}")
    return table


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help=f"default: {', '.join(PACKAGES)}, and all three")
    parser.add_argument(
        "--list", action="store_true", help="name functions that are used once, and how, and files with kinds"
    )
    parser.add_argument("--since", metavar="REVISION", help="compare the lines of each room with those of a commit")
    options = parser.parse_args()
    console = Console(width=120)
    if options.since:
        console.print(_rooms(options.since))
        return
    each = [[folder] for folder in options.folders or map(Path, PACKAGES)]
    groups = each if len(each) == 1 else [*each, [folder for [folder] in each]]
    columns = (
        "lines",
        "of code",
        "files",
        "median lines",
        f"under {SHORT_FILE_LINES} lines",
        "functions",
        "used once",
        "name kinds",
    )
    table = Table("", *columns)
    for group in groups:
        size = measure(group)
        short, once = size.short_files / size.files, len(size.used_once) / size.functions
        names = ", ".join(folder.name for folder in group)
        table.add_row(
            names, f"{size.lines:,}", f"{size.code_lines:,}", f"{size.files}", f"{size.median_lines:g}",
            f"{size.short_files} ({short:.1%})", f"{size.functions:,}", f"{len(size.used_once)} ({once:.1%})",
            f"{len(size.kind_files)}",
        )  # fmt: skip
    console.print(table)
    kinds = Counter(one.how for one in size.used_once)
    console.print("used once: " + ", ".join(f"{count} {how}" for how, count in kinds.most_common()))
    if options.list:
        print(*(f"{one.location}  {one.how}" for one in size.used_once), sep="\n")
        print("files that name kinds of op:", *size.kind_files, sep="\n")


if __name__ == "__main__":
    main()
