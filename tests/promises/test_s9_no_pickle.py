"""S9. Between processes goes JSON, never pickle: whoever can write to a pipe or a database could else run code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for package in ("optpipe", "solver", "api") for path in sorted((ROOT / package).rglob("*.py"))]

PICKLING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "multiprocessing"}
PICKLING_CALLS = {
    "ProcessPoolExecutor",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def unsafe(source: str) -> Iterator[str]:
    """Places in a module that pickle, or read pickles."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.partition(".")[0] in PICKLING_MODULES)
            yield from (alias.name for alias in node.names if alias.name in PICKLING_CALLS)
        elif isinstance(node, ast.Attribute) and node.attr in PICKLING_CALLS:
            yield node.attr
        elif isinstance(node, ast.Call) and _reads_anything(node):
            yield ast.unparse(node)


def _reads_anything(call: ast.Call) -> bool:
    """True if a call stores or loads with torch without saying that weights are all there is."""
    with_torch = ast.unparse(call.func) in ("torch.load", "torch.save")
    return with_torch and not any(word.arg == "weights_only" for word in call.keywords)


def test_nothing_pickles() -> None:
    assert len(SOURCES) > 300
    assert [(path, place) for path in SOURCES for place in unsafe(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "torch.distributed.all_gather_object(found, value)",
        "torch.load(path)",
    ],
)
def test_what_pickles_is_seen(source: str) -> None:
    assert list(unsafe(source))
