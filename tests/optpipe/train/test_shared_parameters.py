"""A parameter that stages share is one: losses are those of plain training of the uncut model, wherever stages are."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instances.schedules import one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.errors import InputError, TrainingError
from optpipe.schedule import schedule_text
from optpipe.train import CheckpointConfig, OptimizerConfig, train
from optpipe.train.checkpoint.files import final_path, read_tensors
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from tests.optpipe.train import shared_stages
from tests.optpipe.train.shared_cases import STEPS, config_of, plain
from tests.ranks import RunRanks
from tests.sample import RARELY, some

WORKER = Path(__file__).parent / "shared_worker.py"
MAIN = Path(__file__).parents[1] / "cli" / "main_worker.py"
NAMES = ("gpt2", "llama", "everywhere", "modules")

TWO = [f"{name}, V, {more}" for name in NAMES for more in ("checked", "clipped", "resumed")]
TWO = some([*TWO, "gpt2, online", "llama, online"], RARELY)
FOUR = [f"{name}, linear, {more}" for name in NAMES for more in ("checked", "clipped", "resumed")]
FOUR += [f"{name}, replicas of a V, clipped" for name in ("everywhere", "modules")]
FOUR += [f"{name}, replicas, {more}" for name in ("gpt2", "llama") for more in ("checked", "clipped")]
FOUR = some(FOUR, RARELY)


def near(losses: list[float]) -> Any:
    return pytest.approx(losses, rel=0, abs=1e-5)


ALONE = [f"{name}, {more}" for name in NAMES for more in ("linear", "V", "V, clipped")] + ["frozen, V"]


@pytest.mark.parametrize("case", some(ALONE))
def test_in_one_process(case: str) -> None:
    result = train(config_of(case))
    losses, parameters = plain(case)
    assert result.losses == near(losses)
    assert result.parameters == parameters
    assert result.check is None or result.check.failures == ()


def test_an_embedding_and_a_head_with_sgd() -> None:
    """Each stage's optimizer would update it a second time."""
    config = replace(config_of("ends, linear in 2"), optimizer=OptimizerConfig("sgd", learning_rate=0.5), steps=3)
    losses, _ = shared_stages.plain_losses("ends", config.optimizer, 3)
    assert train(config).losses == near(losses)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a checkpoint of half of each run, in one process."""
    folder = tmp_path_factory.mktemp("shared")
    for name in NAMES:
        config = replace(config_of(f"{name}, linear"), checkpoints=CheckpointConfig(folder / name), check=False)
        train(replace(config, steps=STEPS // 2))
    return folder


@pytest.fixture(scope="module")
def found(run_ranks: RunRanks, halves: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Findings of each rank for each case."""
    ranks: dict[str, list[Any]] = {}
    for processes, cases in ((2, TWO), (4, FOUR)):
        folder = tmp_path_factory.mktemp(f"of{processes}")
        for name in NAMES:
            shutil.copytree(halves / name, folder / name)
        run_ranks(WORKER, processes, str(folder), *cases)
        answers = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
        ranks |= {case: [answer[case] for answer in answers] for case in cases}
    return ranks


@pytest.mark.torchrun
@pytest.mark.parametrize("case", TWO + FOUR)
def test_in_several_processes(found: dict[str, list[Any]], case: str) -> None:
    losses, parameters = plain(case)
    values: dict[str, set[str]] = {}
    for rank in found[case]:
        assert rank["losses"] == near(losses[rank["first_step"] :])
        assert rank["parameters"] == parameters
        assert rank["failures"] == (None if "clipped" in case else [])
        assert rank["states"] == 0, "one optimizer state for each parameter of a process"
        for shared, value in rank["values"].items():
            values.setdefault(shared, set()).add(value)
    assert values
    assert all(len(different) == 1 for different in values.values()), "equal bits on every process"
    assert found[case][0]["first_step"] == (STEPS // 2 if "resumed" in case else 0)
    assert ("swapped" in found[case][0]["events"]) == ("online" in case)
    if "clipped" in case:
        assert found[case][0]["rolled back"]


@pytest.mark.parametrize("name", some(NAMES))
def test_a_checkpoint_has_it_once(halves: Path, name: str) -> None:
    path = final_path(halves / name, STEPS // 2)
    saved = [read_tensors(file) for file in path.glob("stage-*.safetensors")]
    assert len({name for tensors in saved for name in tensors}) == sum(map(len, saved))
    kinds = ("exp_avg", "exp_avg_sq", "step")
    entries = sum(t.numel() for tensors in saved for name, t in tensors.items() if not name.endswith(kinds[1:]))
    assert entries == 2 * plain(name)[1]


@pytest.mark.parametrize("case", some([f"{name}, {more}, resumed" for name in NAMES for more in ("linear", "V")]))
def test_a_resumed_run_goes_on_in_one_process(halves: Path, tmp_path: Path, case: str) -> None:
    name = case.partition(",")[0]
    shutil.copytree(halves / name, tmp_path / name)
    result = train(config_of(case, tmp_path))
    assert result.first_step == STEPS // 2
    assert result.losses == near(plain(case)[0][STEPS // 2 :])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sliced", "stages[0].weight and stages[1].weight lie in the same memory but are not one parameter"),
        ("buffered", "stages[0].weight and stages[1].table lie in the same memory but are not one parameter"),
        ("statistics", "stages[0].1.running_mean and stages[1].1.running_mean are the same running statistics"),
        ("counted", "stages[0].calls = stages[1].calls is one buffer, but the forward of stages[0] changes it, so"),
        ("averaged", "stages[0].calls = stages[1].calls is one buffer, but the forward of stages[1] changes it, so"),
        ("loss", "shared_stages:loss_in_2, whose loss has parameters to train (weight), which no stage has. Maybe"),
    ],
)
def test_what_cannot_be_kept_one_is_refused_before_anything_runs(name: str, message: str) -> None:
    with pytest.raises((TrainingError, InputError), match=re.escape(message)):
        train(config_of(f"{name}, linear in 2"))


def test_a_buffer_that_stages_share_and_read_is_no_matter() -> None:
    losses, _ = plain("constant, linear in 2")
    assert train(config_of("constant, linear in 2")).losses == near(losses)


@pytest.mark.torchrun
def test_a_buffer_that_one_process_changes_is_refused_in_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(schedule_text(one_f_one_b(2, shared_stages.MICROBATCHES)))
    stages = f"{shared_stages.__name__}:averaged_in_2"
    ranks = run_ranks.each(MAIN, 2, "train", "--schedule", str(path), "--model", stages, "--steps", "1")
    assert [rank.code for rank in ranks] == [2, 2]
    assert "the forward of stages[1] changes it on rank 1, so it cannot" in ranks[0].err


def test_processes_that_share_different_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("everywhere, V")
    assert config.schedule is not None
    launch = Launch(2, distributed=True)
    monkeypatch.setattr(Launch, "gather", lambda _, value: [value, {}])
    with pytest.raises(TrainingError, match=r"= stages\[3\]\.weight is one parameter on rank 0 but not on rank 1"):
        Model(config, compile_schedule(config.schedule), launch)
    monkeypatch.setattr(Launch, "gather", lambda _, value: [value, dict.fromkeys(value, "others")])
    with pytest.raises(TrainingError, match=r"its values on rank 1 are not those on rank 0\. Maybe draw"):
        Model(config, compile_schedule(config.schedule), launch)
