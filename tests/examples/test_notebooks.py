"""The cells of the notebooks run in their order, and what they show can be shown."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.sample import some

FOLDER = Path(__file__).parents[2] / "examples"
SHOWN = {
    "memory": ["<svg", "zb-h2", "GiB", "<Figure"],
    "plan": ["<svg", ", taken", "pretrain_gpt.py"],
    "trace": ["<svg", "gradients and memory are as planned", "re-timed", "times the planned step"],
}
"""Parts of what each notebook shows or prints."""


@pytest.mark.parametrize("path", some(sorted(FOLDER.glob("*.ipynb"))), ids=lambda path: path.stem)
def test_cells_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    shown: list[str] = []
    text = re.sub(r"time_limit_s=\d+", f"time_limit_s={1 if path.stem == 'plan' else 0.5}", path.read_text())
    text = text.replace("small", "tiny")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        assert not cell["outputs"], "outputs are made by running it"
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop()
        assert isinstance(last, ast.Expr), "a cell ends with what it shows"
        exec(compile(tree, path.name, "exec"), names)
        value = eval(compile(ast.Expression(last.value), path.name, "eval"), names)
        shown.append((hasattr(value, "_repr_html_") and value._repr_html_()) or repr(value))
    assert all(shown)
    everything = "\n".join((*shown, capsys.readouterr().out))
    assert [part for part in SHOWN[path.stem] if part not in everything] == []
