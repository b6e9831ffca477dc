"""Models of transformers whose vocabulary layer lies on all devices, tied to the embedding or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optpipe.errors import TrainingError
from optpipe.train import CheckpointConfig, TrainingConfig, train
from optpipe.train.checkpoint.convert import from_hugging_face, to_hugging_face
from tests.optpipe.models import tiny_models
from tests.optpipe.models.cases import config_of
from tests.optpipe.models.tiny_models import STEPS, plain_losses, plain_model, saved
from tests.optpipe.train.cases import assert_plain_step
from tests.ranks import RunRanks
from tests.sample import some

WORKER = Path(__file__).parent / "worker.py"
HALF = STEPS // 2


def kept(name: str, way: str, folder: Path, steps: int) -> TrainingConfig:
    return replace(config_of(f"{name}, {way}"), checkpoints=CheckpointConfig(folder), steps=steps)


@pytest.mark.parametrize(
    "case",
    some(["llama, rows on 3", "tied llama, rows on 2", "tied llama, rows on 3", "gpt2, rows on 3", "gemma, rows on 2"]),
)
def test_losses_are_those_of_transformers(case: str) -> None:
    """64 words on three devices, with masks and labels that are ignored."""
    result = train(config_of(f"{case}, checked"))
    assert_plain_step(result.check, "float32")
    name = case.partition(", ")[0]
    assert result.losses == pytest.approx(plain_losses(name), rel=0, abs=1e-5)
    assert result.parameters == plain_model(name).num_parameters()


def test_gradients_that_are_rounding_alone_are_compared_by_their_size() -> None:
    """Softmax cancels what the biases of OPT's keys add, so each order of sums leaves another remainder."""
    result = train(config_of("opt, rows on 3, checked"))
    assert_plain_step(result.check, "float32")
    assert result.losses == pytest.approx(plain_losses("opt"), rel=0, abs=1e-5)


@pytest.mark.parametrize("name", some(["llama", "tied llama"]))
def test_transformers_reads_the_whole_weight(name: str, tmp_path: Path) -> None:
    train(kept(name, "rows on 3", tmp_path / "run", HALF))
    assert to_hugging_face(tmp_path / "run", tmp_path / "out") == HALF
    model = type(plain_model(name)).from_pretrained(tmp_path / "out")
    assert model.num_parameters() == plain_model(name).num_parameters()
    inputs, labels = tiny_models.batch(HALF)
    tokens = sum(int((row[:, 1:] != -100).sum()) for row in labels)
    with torch.no_grad():
        outputs = [model(**x, labels=y, num_items_in_batch=tokens) for x, y in zip(inputs, labels, strict=True)]
    assert sum(float(output.loss) for output in outputs) == pytest.approx(plain_losses(name)[HALF], rel=0, abs=1e-5)


def test_rows_begin_with_the_weights_of_a_folder(tmp_path: Path) -> None:
    """A configuration alone, whose drawn weights are others."""
    name = "tied llama"
    folder = Path(saved(name).removeprefix("hf:"))
    from_hugging_face(str(folder), tmp_path / "run", torch.float32)
    config = kept(name, "rows on 3", tmp_path / "run", 3)
    result = train(replace(config, model=replace(config.model, name=f"hf:{folder / 'config.json'}")))
    assert result.losses == pytest.approx(plain_losses(name)[:3], rel=0, abs=1e-5)


@pytest.mark.torchrun
def test_two_processes_with_rows_and_one_without_go_on_from_one_another(run_ranks: RunRanks, tmp_path: Path) -> None:
    name, run = "tied llama", tmp_path / "run"
    losses = list(train(kept(name, "in 2", run, 2)).losses)
    run_ranks(WORKER, 2, str(tmp_path), "recut", saved(name), str(run), "rows on 2", "2,3", "4")
    found = json.loads((tmp_path / "rank0.json").read_text())
    assert found["first_step"] == 2
    losses += found["losses"]
    losses += train(kept(name, "linear", run, STEPS)).losses
    assert losses == pytest.approx(plain_losses(name), rel=0, abs=1e-5)


@pytest.mark.parametrize("name", ["granite", "mixtral"])
def test_logits_that_are_more_than_the_layers_output_are_refused(name: str) -> None:
    """Granite scales them, and Mixtral sends the loss that balances its experts with them."""
    with pytest.raises(TrainingError, match=r"0 modules in the last stage of .* have vocabulary_layer"):
        train(config_of(f"{name}, rows on 2"))
