"""Checkpoints of models of transformers: resumed on another cut, and read by transformers."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

from instances.schedules import one_f_one_b
from optpipe.cli import main
from optpipe.errors import CheckpointError
from optpipe.train import CheckpointConfig, ModelConfig, TrainingConfig, train
from optpipe.train.checkpoint.convert import from_hugging_face, to_hugging_face
from tests.optpipe.models import tiny_models
from tests.optpipe.models.cases import config_of
from tests.optpipe.models.tiny_models import STEPS, plain_losses, plain_model, saved
from tests.ranks import RunRanks
from tests.sample import some

WORKER = Path(__file__).parent / "worker.py"
HALF = STEPS // 2
NAMES = ("tied llama", "qwen3-moe")


def run_of(name: str, way: str, folder: Path, cut: str | None = None) -> TrainingConfig:
    config = config_of(f"{name}, {way}")
    return replace(config, model=replace(config.model, cut=cut), checkpoints=CheckpointConfig(folder))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs that ended half way, by name of the model."""
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        train(replace(run_of(name, "linear", folder / name), steps=HALF))
    return folder


CUTS = [("linear", "2,1,1,1"), ("in 2", "2,3"), ("V", "1,2,1,1"), ("in 2", "4,1")]


@pytest.mark.parametrize(("name", "way", "cut"), some([(name, *cut) for name in NAMES for cut in CUTS]))
def test_a_run_goes_on_where_it_is_cut_otherwise(runs: Path, tmp_path: Path, name: str, way: str, cut: str) -> None:
    shutil.copytree(runs / name, tmp_path / name)
    result = train(run_of(name, way, tmp_path / name, cut))
    assert result.first_step == HALF
    assert result.losses == pytest.approx(plain_losses(name)[HALF:], rel=0, abs=1e-5)


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


def test_infinity_in_a_configuration_is_written(tmp_path: Path) -> None:
    """As in the limits of a Mamba-2's time step, which a JSON value cannot hold."""
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "n_groups": 1}
    mamba = transformers.Mamba2Config(**sizes, num_heads=4, head_dim=8, chunk_size=8)
    mamba.save_pretrained(tmp_path / "mamba")
    model = ModelConfig(f"hf:{tmp_path / 'mamba'}", sequence=8, microbatch_size=1)
    train(TrainingConfig(one_f_one_b(2, 2), model, checkpoints=CheckpointConfig(tmp_path / "run"), steps=1))
    to_hugging_face(tmp_path / "run", tmp_path / "out")
    assert [*transformers.Mamba2Config.from_pretrained(tmp_path / "out").time_step_limit] == [0.0, math.inf]
    assert str(tmp_path.parent) not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_copy_in_its_own_files(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["checkpoint", "to-dcp", str(runs / "tied llama"), "-o", str(tmp_path / "dcp")])
    assert f"the state after {HALF} steps" in capsys.readouterr().out
    to_hugging_face(runs / "tied llama", tmp_path / "hf")
    weights = type(plain_model("tied llama")).from_pretrained(tmp_path / "hf").state_dict()
    own = {name: torch.empty_like(tensor) for name, tensor in weights.items() if name != "lm_head.weight"}
    moments = {f"optimizer.state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in own.items()}
    dcp.load(own | moments, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in own.items())
    assert all(moment.any() for moment in moments.values())


@pytest.mark.parametrize("name", some(NAMES))
def test_a_run_begins_with_the_weights_of_a_folder(
    runs: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Which the configuration that it is started with does not have."""
    to_hugging_face(runs / name, tmp_path / "trained")
    with pytest.raises(SystemExit, match="0"):
        main(["checkpoint", "from-hf", str(tmp_path / "trained"), "-o", str(tmp_path / "run")])
    assert "a run with --checkpoint" in capsys.readouterr().out
    config = run_of(name, "in 2", tmp_path / "run", "3,2")
    bare = replace(config.model, name=f"hf:{tmp_path / 'trained' / 'config.json'}")
    result = train(replace(config, model=bare, steps=3, seed=7))
    from_folder = replace(config.model, name=f"hf:{tmp_path / 'trained'}")
    assert result.losses == train(replace(config, model=from_folder, checkpoints=CheckpointConfig(), steps=3)).losses
    assert not [record for record in caplog.records if record.message.startswith("resumed with")]
    again = train(replace(config, model=bare, steps=4, seed=7))
    assert again.first_step == 3
    another = run_of(next(other for other in NAMES if other != name), "in 2", tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"task\.configuration is .* in .*step-0000000004 but"):
        train(another)
    with pytest.raises(CheckpointError, match=r"run has checkpoints already\. Maybe another folder\."):
        from_hugging_face(str(tmp_path / "trained"), tmp_path / "run", torch.float32)


@pytest.mark.torchrun
def test_two_processes_one_and_four_go_on_from_one_another(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Each on a cut of its own, tied weights in the first and the last process included."""
    name = "tied llama"
    run_ranks(WORKER, 2, str(tmp_path), "recut", saved(name), str(tmp_path / "run"), "in 2", "2,3", "2")
    found = json.loads((tmp_path / "rank1.json").read_text())
    losses = list(found["losses"])
    config = replace(run_of(name, "V", tmp_path / "run", "1,2,1,1"), steps=4)
    losses += train(config).losses
    run_ranks(WORKER, 4, str(tmp_path), "recut", saved(name), str(tmp_path / "run"), "linear", "1,1,1,2", "6")
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert {rank["first_step"] for rank in ranks} == {4}
    losses += ranks[0]["losses"]
    assert losses == pytest.approx(plain_losses(name), rel=0, abs=1e-5)


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
