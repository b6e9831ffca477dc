"""Users' callables: what is loaded, and what is said of those that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optpipe.errors import InputError
from optpipe.profile.subject import load_subject

GOOD = """
import torch
from torch import nn

def build():
    return [nn.Linear(3, 4), nn.Linear(4, 5)], torch.zeros(2, 3), torch.zeros(2, 5), nn.functional.mse_loss
"""


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, attribute: str = "build"):  # type: ignore[no-untyped-def]
    """Load from a file of that name, each test's its own: modules are imported once."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    return load_subject(f"{name}:{attribute}")


def test_a_callable_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(tmp_path, monkeypatch, GOOD, "good_model")
    assert [type(stage).__name__ for stage in found.stages] == ["Linear", "Linear"]
    assert found.microbatch_size == 2
    assert found.inputs.shape == (2, 3)
    assert found.loss is torch.nn.functional.mse_loss


RETURNING = "import torch\nfrom torch import nn\nx = torch.zeros(2, 3)\ndef build():\n    return "


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken_import", "import no_such_package", "cannot be imported: ModuleNotFoundError: No module named"),
        ("broken_syntax", "def build(:", "cannot be imported: SyntaxError"),
        ("misspelt", "def biuld(): ...", "module misspelt has no build. Maybe you meant biuld."),
        ("no_callable", "build = 3", "module no_callable has no callable build."),
        ("raising", "def build():\n    raise ValueError('no data.')", "raises ValueError: no data at raising.py:2."),
        ("a_list", RETURNING + "[nn.Linear(3, 3)]", "returns a list of 1, but must return the tuple (stages, inputs,"),
        ("nothing", RETURNING + "None", "returns a NoneType, but must return the tuple"),
        ("no_stages", RETURNING + "[], x, x, print", "returns list for stages, but must return a list of modules"),
        ("no_module", RETURNING + "[nn.Linear(3, 3), 5], x, x, print", "returns stages[1] of type int"),
        ("no_input", RETURNING + "[nn.Linear(3, 3)], 'x', x, print", "returns str in inputs, but a tensor"),
        ("empty_input", RETURNING + "[nn.Linear(3, 3)], (), x, print", "returns no tensor in inputs"),
        ("no_loss", RETURNING + "[nn.Linear(3, 3)], x, x, 'mse'", "returns str for loss, but must return a function"),
    ],
)
def test_bad_callables(name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, monkeypatch, text, name)
    assert message in str(caught.value)
    assert caught.value.source == f"model {name}:build"


def test_the_folder_s_absence_is_the_likely_reason() -> None:
    with pytest.raises(InputError, match="Maybe run from the folder that it is in"):
        load_subject("no_such_module:build")


@pytest.mark.parametrize("name", ["module:", ":build"])
def test_half_a_name(name: str) -> None:
    with pytest.raises(InputError, match=r"is not of the form package\.module:callable"):
        load_subject(name)
