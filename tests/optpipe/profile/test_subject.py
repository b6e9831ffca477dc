"""Users' callables: what is loaded, and what is said of those that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe.profile.subject import Subject, build_chain, load_subject
from optpipe.runtime import MessageSpec
from tests.optpipe.profile.subjects import CPU, ROWS, WIDTH, Masked, perceptron

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
        ("no_callable", "build = 3", "module no_callable has no callable build. Maybe it is in another"),
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
    with pytest.raises(InputError, match=r"is not of the form package\.module:callable\. Maybe my_module:"):
        load_subject(name)


def masked_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0], target)


def subject(stages: list[nn.Module], loss: Callable[..., Any] = nn.functional.mse_loss) -> Subject:
    return Subject("mine", stages, torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), loss)


def test_messages_are_learnt_from_the_stages() -> None:
    chain = build_chain(perceptron((3, 4, 5)), CPU, 4, [0, 1])
    assert chain.messages == [MessageSpec((ROWS, 4), torch.float32)]
    assert chain.before(0) is None
    assert chain.after(0) == chain.before(1) == chain.messages[0]
    assert chain.after(1) is None
    assert chain.received(0, CPU) is chain.inputs
    assert chain.received(1, CPU).shape == chain.gradient(0, CPU).shape == (ROWS, 4)
    assert chain.gradient(1, CPU) is None


def test_under_autocast_stages_pass_on_what_they_compute() -> None:
    chain = build_chain(perceptron((3, 4, 5)), CPU, 4, [0, 1], autocast=torch.bfloat16)
    assert chain.messages == [MessageSpec((ROWS, 4), torch.bfloat16)]


def test_a_process_keeps_its_own_stages() -> None:
    assert list(build_chain(perceptron((3, 4, 5, 6)), CPU, 4, [1]).stages) == [1]


def test_messages_of_several_tensors() -> None:
    inputs = torch.zeros(ROWS, WIDTH), torch.ones(ROWS, WIDTH, dtype=torch.bool)
    chain = build_chain(
        Subject("m", [Masked(), Masked()], inputs, torch.zeros(ROWS, WIDTH), masked_loss), CPU, 1, [0, 1]
    )
    x, mask = chain.received(1, CPU)
    assert (x.dtype, mask.dtype) == (torch.float32, torch.bool)
    assert chain.gradient(0, CPU)[1] is None


def test_stages_that_do_not_fit() -> None:
    with pytest.raises(InputError) as caught:
        build_chain(subject([nn.Linear(WIDTH, 4), nn.Linear(5, WIDTH)]), CPU, 4, [0, 1])
    assert "stages[1] (Linear) fails on what stages[0] returns, float32[8, 4]: RuntimeError: mat1 and mat2" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("stages", "loss", "message"),
    [
        ([nn.Linear(7, 7)], nn.functional.mse_loss, r"stages\[0\] \(Linear\) fails on the inputs, float32\[8, 16\]"),
        ([nn.Linear(16, 16)], lambda _output, _target: 0.5, "loss returns float, but must return one number"),
        (
            [nn.Linear(16, 16)],
            lambda output, _target: output,
            r"loss returns a tensor of shape \[8, 16\], but must return one",
        ),
        ([nn.Linear(16, 16)], nn.functional.cross_entropy, None),
        ([nn.Linear(16, 16)], nn.functional.nll_loss, r"loss fails on float32\[8, 16\] and float32\[8, 16\]"),
    ],
)
def test_bad_ends(stages: list[nn.Module], loss: Callable[..., Any], message: str | None) -> None:
    if message is None:
        assert build_chain(subject(stages, loss), CPU, 4, [0]).messages == []
        return
    with pytest.raises(InputError, match=message):
        build_chain(subject(stages, loss), CPU, 4, [0])


class Words(nn.Module):
    def forward(self, x: Tensor) -> object:
        return x, "words"


def test_a_stage_returns_tensors() -> None:
    with pytest.raises(InputError, match=r"returns str in the output of stages\[0\], but a tensor"):
        build_chain(subject([Words(), nn.Linear(16, 16)]), CPU, 4, [0, 1])
