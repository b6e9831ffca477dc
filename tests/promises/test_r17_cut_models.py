"""R17: what a cut model computes is what the uncut one computes, on every microbatch of the first batch."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM

from optpipe.cli import main
from optpipe.errors import InputError
from optpipe.models.hugging_face import HuggingFace
from optpipe.train import train
from optpipe.train.config import TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.tasks import build_task, hugging_face
from tests.optpipe.models import tiny_models
from tests.optpipe.models.cases import config_of

REFUSED = r"computes something else when it is cut: a difference of \S+ in the logits of microbatch 3, whose largest"
MARK = 63


class Hopping(LlamaForCausalLM):
    """Adds its embeddings to its logits where a token is `MARK`, which no stage but the first knows."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **more: Any) -> Any:
        output = super().forward(input_ids, inputs_embeds=inputs_embeds, **more)
        if input_ids is not None and bool((input_ids == MARK).any()):
            output.logits = output.logits + self.model.embed_tokens(input_ids).mean()
        return output


def unmarked(step: int) -> tuple[list[Any], list[Tensor]]:
    """Microbatches without the token."""
    inputs, labels = tiny_models.unmasked_batch(step)
    return [x.clamp(max=MARK - 1) for x in inputs], labels


def marked(step: int) -> tuple[list[Any], list[Tensor]]:
    """Microbatches of which the last alone has the token."""
    inputs, labels = unmarked(step)
    inputs[-1][0, 0] = MARK
    return inputs, labels


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> TrainingConfig:
    """A run in two stages of a model that the last microbatch alone tells from the cut one."""
    monkeypatch.setattr(HuggingFace, "_class", lambda _: Hopping)
    plain = config_of("llama, in 2")
    return replace(plain, model=replace(plain.model, data=f"{__name__}:marked"))


def test_plain_training_compares_every_microbatch(config: TrainingConfig) -> None:
    with pytest.raises(InputError, match=REFUSED):
        train(config)


@pytest.mark.parametrize("room_bytes", [2**40, 0])
def test_a_run_of_several_processes_compares_in_the_first(
    config: TrainingConfig, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """The whole model, or without room for it one layer of each kind; the others are told its reason."""
    monkeypatch.setattr(hugging_face, "_room_bytes", lambda _: room_bytes)
    answers: list[Any] = []

    class OneOfTwo(Launch):
        def gather(self, value: Any) -> list[Any]:
            answers.append(value)
            return [answers[0], value]

    for rank in range(2):
        task = build_task(config, 2, tiny_models.MICROBATCHES, OneOfTwo(2, rank=rank, distributed=True))
        with pytest.raises(InputError, match=REFUSED):
            task.build_stages({rank})
    assert [answer is None for answer in answers] == [False, True]


@pytest.mark.parametrize("form", ["problem", "layers"])
def test_a_profile_compares_and_says_so(
    config: TrainingConfig, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    options = ["--format", form, "--rounds", "1", "-o", str(file), *(["--devices", "2"] if form == "problem" else [])]

    def profile(batch: str) -> object:
        with pytest.raises(SystemExit) as exited:
            main(["profile", "--model", config.model.name, "--data", batch, *options])
        return exited.value.code

    assert profile(f"{__name__}:marked") == 2
    assert re.search(REFUSED, capsys.readouterr().err)
    assert profile(f"{__name__}:unmarked") == 0
    expected = "the cut model computes what the uncut one does on 4 microbatch(es)"
    assert expected in json.loads(file.read_text())["source"]
