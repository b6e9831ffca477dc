"""The cells of the notebooks run in their order, and what they show can be shown."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_cells_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    shown: list[str] = []
    text = path.read_text().replace("time_limit_s=6", "time_limit_s=3")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        assert not cell["outputs"], "outputs are made by running it"
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop()
        assert isinstance(last, ast.Expr), "a cell ends with what it shows"
        exec(compile(tree, path.name, "exec"), names)
        value = eval(compile(ast.Expression(last.value), path.name, "eval"), names)
        shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    assert "<svg" in shown[0]
    assert "(taken)" in shown[0]
    assert "pretrain_gpt.py" in capsys.readouterr().out
    assert all(shown)
