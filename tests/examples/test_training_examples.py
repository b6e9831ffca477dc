"""The examples of training run as they say, with little time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from datasets import load_from_disk
from transformers import LlamaConfig

from examples import dataset, own_stages
from instances.schedules import one_f_one_b
from optpipe.export.torch_csv import torch_csv
from optpipe.schedule import schedule_text
from tests.optpipe.cli.conftest import Cli, cli, own_cache
from tests.ranks import RunRanks

__all__ = ["cli", "own_cache"]

EXAMPLES = Path(own_stages.__file__).parent
STAGES = 4


def test_gpt(cli: Cli, tmp_path: Path) -> None:
    little = ("--steps", 3, "--model", "tiny", "--rounds", 1, "--time-limit", 1)
    outputs = ("--checkpoint", tmp_path / "c", "--metrics", tmp_path / "m.jsonl", "--plot", tmp_path / "run.png")
    run = cli("train", "--config", EXAMPLES / "gpt.toml", *little, *outputs, "--json")
    assert run.code == 0, run.err
    assert len(run.document["losses"]) == len((tmp_path / "m.jsonl").read_text().splitlines()) == 3
    assert run.document["events"][0]["kind"] == "measured"
    assert (tmp_path / "run.png").exists()
    assert list((tmp_path / "c").iterdir())


def test_own_stages_as_their_docstring_says(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands, one after the other, in a folder of their own, with fewer rounds and steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    commands = [line.split()[1:] for line in (own_stages.__doc__ or "").splitlines() if line.startswith("optpipe")]
    assert [command[0] for command in commands] == ["profile", "solve", "train"]
    less = {"profile": ("--rounds", "1"), "solve": ("--time-limit", "1"), "train": ("--steps", "3")}
    for command in commands:
        run = cli(*command, *less[command[0]])
        assert run.code == 0, run.err
    assert "3 steps of 1,058,049 parameters in 1 process(es)" in run.out


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_data_set_as_its_docstring_says(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends in the middle of a document goes on there: losses to the bit, and other ones from the start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    monkeypatch.setattr(dataset, "MODULES", 4)
    dataset.main()
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None).save_pretrained("tiny-llama")
    Path("schedule.json").write_text(schedule_text(one_f_one_b(2, 2)))
    commands = [line.split()[1:] for line in (dataset.__doc__ or "").splitlines() if line.startswith("optpipe")]
    parts = [cli(*command, "--json").document for command in commands]
    assert [part["first_step"] for part in parts] == [0, 4]
    whole = cli(*commands[1][: commands[1].index("--checkpoint")], "--json").document
    assert parts[0]["losses"] + parts[1]["losses"] == whole["losses"]
    assert len({*whole["losses"]}) == 8
    documents = [bytes(row) for row in load_from_disk(dataset.CORPUS)["input_ids"]]
    first = next(iter(dataset.build(0, 1)))["input_ids"]
    assert bytes(first.flatten().tolist()) == documents[0][: first.numel()]


@pytest.mark.torchrun
def test_torch_trains_the_same(cli: Cli, run_ranks: RunRanks, tmp_path: Path) -> None:
    """The exported order in torch's runtime gives the losses that it gives in ours."""
    schedule = one_f_one_b(STAGES, own_stages.MICROBATCHES)
    (tmp_path / "schedule.csv").write_text(torch_csv(schedule))
    (tmp_path / "schedule.json").write_text(schedule_text(schedule))
    printed = run_ranks(EXAMPLES / "torch_runtime.py", STAGES, str(tmp_path / "schedule.csv"))
    theirs = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    own = ("--model", "examples.own_stages:build", "--data", "examples.own_stages:batch", "--steps", len(theirs))
    ours = json.loads(cli("train", "--schedule", tmp_path / "schedule.json", *own, "--json").out)["losses"]
    assert len(theirs) == 20
    assert theirs == pytest.approx(ours, abs=2e-3)
