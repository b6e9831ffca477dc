"""Checkpoints of models of transformers: resumed on another cut, and read by transformers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optpipe.cli import main
from optpipe.errors import CheckpointError
from optpipe.train import CheckpointConfig, ModelConfig, TrainingConfig, train
from optpipe.train.checkpoint.convert import to_hugging_face
from tests.optpipe.models import tiny_models
from tests.optpipe.models.cases import config_of
from tests.optpipe.models.tiny_models import plain_losses, plain_model, saved

HALF = 6
NAMES = ("tied llama", "qwen3-moe")


def run_of(name: str, way: str, folder: Path, cut: str | None = None) -> TrainingConfig:
    config = config_of(f"{name}, {way}")
    return replace(config, model=replace(config.model, cut=cut), checkpoints=CheckpointConfig(folder), steps=2 * HALF)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs that ended half way, by name of the model, beside a file of a tokenizer with its weights."""
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        (Path(saved(name).removeprefix("hf:")) / "tokenizer.json").write_text("{}")
        train(replace(run_of(name, "linear", folder / name), steps=HALF))
    return folder


@pytest.mark.parametrize(("way", "cut"), [("linear", "2,1,1,1"), ("in 2", "2,3"), ("V", "1,2,1,1"), ("in 2", "4,1")])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_where_it_is_cut_otherwise(runs: Path, tmp_path: Path, name: str, way: str, cut: str) -> None:
    shutil.copytree(runs / name, tmp_path / name)
    result = train(run_of(name, way, tmp_path / name, cut))
    assert result.first_step == HALF
    assert result.losses == pytest.approx(plain_losses(name)[HALF : 2 * HALF], rel=0, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_the_weights(
    runs: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["checkpoint", "to-hf", str(runs / name), "-o", str(tmp_path / "out"), "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(command)
    assert json.loads(capsys.readouterr().out) == {"step": HALF, "output": str(tmp_path / "out")}
    assert (tmp_path / "out" / "tokenizer.json").exists()
    model, plain = type(plain_model(name)).from_pretrained(tmp_path / "out"), plain_model(name)
    assert model.config.to_dict() == plain.config.to_dict() | {
        key: model.config.to_dict()[key] for key in ("_name_or_path", "architectures", "dtype", "transformers_version")
    }
    assert model.num_parameters() == plain.num_parameters()
    inputs, labels = tiny_models.batch(HALF)
    tokens = sum(int((row[:, 1:] != -100).sum()) for row in labels)
    with torch.no_grad():
        outputs = [model(**x, labels=y, num_items_in_batch=tokens) for x, y in zip(inputs, labels, strict=True)]
    extra = tiny_models.BALANCE * (1 - 1 / len(inputs)) if "moe" in name else 0.0
    loss = sum(float(output.loss) - extra * float(getattr(output, "aux_loss", None) or 0) for output in outputs)
    assert loss == pytest.approx(plain_losses(name)[HALF], rel=0, abs=1e-5)
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "which is there already. Maybe a new folder." in capsys.readouterr().err


def test_it_is_trained_on(runs: Path, tmp_path: Path) -> None:
    """Weights alone, with a new optimizer."""
    to_hugging_face(runs / "qwen3-moe" / f"step-{HALF:010d}", tmp_path / "out")
    config = config_of("qwen3-moe, linear")
    result = train(replace(config, model=replace(config.model, name=f"hf:{tmp_path / 'out'}"), steps=1))
    assert result.losses[0] < plain_losses("qwen3-moe")[0]


def test_what_is_no_such_checkpoint_is_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint\. Maybe it is another folder\."):
        to_hugging_face(tmp_path, tmp_path / "out")
    config = config_of("llama, linear")
    gpt = replace(
        config, model=ModelConfig("tiny", sequence=8), checkpoints=CheckpointConfig(tmp_path / "gpt"), steps=1
    )
    train(gpt)
    with pytest.raises(
        CheckpointError, match=re.escape("is not of a model of transformers (--model hf:FOLDER). Maybe")
    ):
        to_hugging_face(tmp_path / "gpt", tmp_path / "out")
    shutil.copytree(runs / "tied llama", tmp_path / "damaged")
    file = tmp_path / "damaged" / f"step-{HALF:010d}" / "stage-0001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"stage-0001\.safetensors has not the SHA-256 of what was written"):
        to_hugging_face(tmp_path / "damaged", tmp_path / "out")
    assert not (tmp_path / "out").exists()
