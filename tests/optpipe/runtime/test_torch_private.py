"""Private names of torch stand in two files, which say why; and what an old version lacks is nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import optpipe

ROOT = Path(optpipe.__file__).parent
ALLOWED = {"runtime/torch_private.py", "pipelining/fsdp.py"}
DOCUMENTED = ("_foreach_",)
"""Names that torch's reference has, underscore or not."""


def private_names(text: str) -> Iterator[str]:
    """Names of torch with a part that begins with an underscore: imported, or looked up from its modules."""
    modules = {"torch"}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            modules |= {alias.asname or alias.name for alias in node.names if alias.name.islower()}
            yield from (name for alias in node.names if _private(name := f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch.") and _private(alias.name))
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if private and _private(name := ast.unparse(node)) and name.split(".")[0] in modules:
            yield name


def _private(name: str) -> bool:
    parts = [part for part in name.split(".") if not part.startswith(("__", *DOCUMENTED))]
    return all(part.isidentifier() for part in parts) and any(part.startswith("_") for part in parts)


def test_private_names_of_torch_are_in_two_files() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted(ROOT.rglob("*.py"))
        if (names := [*private_names(path.read_text())])
    }
    assert {file: names for file, names in found.items() if file not in ALLOWED} == {}
    assert "torch.autograd.graph._engine_run_backward" in found["runtime/torch_private.py"]


def test_names_that_are_found() -> None:
    text = (
        "import torch\nfrom torch import nn\nfrom torch.utils._pytree import tree_leaves\n"
        "nn.modules.dropout._DropoutNd\ntorch._foreach_add_\ntorch.__version__\nself._x\nf(torch._C._x)\n"
    )
    assert [*private_names(text)] == [
        "torch.utils._pytree.tree_leaves",
        "nn.modules.dropout._DropoutNd",
        "torch._C._x",
        "torch._C",
    ]
