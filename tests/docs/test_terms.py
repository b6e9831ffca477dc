"""Identifiers and docstrings use the field's terms; what the page of terms names is there."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache

from tests.docs.blocks import ROOT

PACKAGES = ("api", "benchmarks", "instances", "optpipe", "solver")
UNUSED = re.compile(r"\b(ways?|beside|told|in vain|goes on|dolls?|stocks?|away)\b", re.IGNORECASE)
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

STILL = """
solver/bounds/unit_costs.py
solver/exact/cp_sat/memory_order.py
solver/exact/milp/constraints.py
solver/exact/milp/variables.py
solver/exact/progress.py
solver/exact/state_bound.py
solver/exact/states.py
solver/published/pipe_offload.py
solver/published/transfer_kernel.py
solver/published/v_family.py
solver/published/zb_auto.py
solver/published/zb_v.py
solver/search/annealing/kernel.py
solver/search/annealing/search.py
solver/search/in_flight.py
solver/search/lns/model.py
solver/lists/memory.py
solver/search/modulo/beam.py
solver/search/modulo/reservation_table.py
"""
"""Files that still use such words. A file without them is taken off; none is added."""


@dataclass
class Names:
    """The names that a module gives, of functions, classes, arguments, variables and attributes, and its docstrings."""

    identifiers: list[str] = field(default_factory=list)
    docstrings: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> Names:
        found = cls()
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                    found.identifiers.append(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.identifiers.append(name)
                case ast.Expr(value=ast.Constant(value=str(said))):
                    found.docstrings.append(" ".join(said.split()))
        return found

    def unused_words(self) -> list[str]:
        words = (" ".join(PARTS.findall(name)) for name in self.identifiers)
        return [found[0].lower() for text in (*words, *self.docstrings) for found in UNUSED.finditer(text)]


@cache
def modules() -> dict[str, Names]:
    """Names of every module of the packages by its path."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): Names.of(path.read_text()) for path in paths}


def test_words_that_are_not_the_fields_become_fewer() -> None:
    found = {path: words for path, names in modules().items() if (words := names.unused_words())}
    still = set(STILL.split())
    new = {path: words for path, words in found.items() if path not in still}
    assert not new, "docs/math/terms.md has the terms"
    done = sorted(still - set(found))
    assert not done, "take these off STILL"


def test_unused_words_are_found() -> None:
    names = Names.of('def keepStockAway(way_us):\n    """Is told so, and goes\n    on."""\n    self.beside = 1\n')
    assert sorted(names.unused_words()) == ["away", "beside", "goes on", "stock", "told", "way"]
    assert not Names.of('def always(railway):\n    """Stockpiles."""\n    told(beside=way)\n').unused_words()


def test_what_the_page_of_terms_names_is_there() -> None:
    known = {name for names in modules().values() for name in names.identifiers}
    rows = re.findall(r"^\|.*?\|.*?\| (`.*?`.*?) \|.*\|$", (ROOT / "docs/math/terms.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 25
    missing = [name for name in named if not ((ROOT / name).exists() if "/" in name else {*name.split(".")} <= known)]
    assert not missing
