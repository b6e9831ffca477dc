"""Several processes: they write one checkpoint together, end at one step, and go on from it in any number."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from instances.schedules import one_f_one_b
from optpipe.compile import compile_schedule
from optpipe.errors import CheckpointError
from optpipe.train.checkpoint.files import buffers_file, final_path, read_tensors, stage_file, steps_in
from optpipe.train.checkpoint.resume import resume
from optpipe.train.checkpoint.write import stage_buffers, stage_names
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from tests.optpipe.train.checkpoint import normed_stages
from tests.optpipe.train.checkpoint.runs import NORMED, STEPS, config_of, run
from tests.ranks import RunRanks
from tests.torchrun import end, start

WORKER = Path(__file__).parent / "torchrun_worker.py"
ENDLESS = Path(__file__).parent / "endless_worker.py"

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(run_ranks: RunRanks, folder: Path) -> Ranks:
    run(config_of(folder / "alone"), until=4)
    run_ranks(WORKER, 2, str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.torchrun
@pytest.mark.parametrize("name", ["two devices", "two replicas"])
def test_a_signal_to_one_process_ends_all_before_the_same_step(ranks: Ranks, name: str) -> None:
    """And together the two runs have the losses of one that nothing ended, bit for bit."""
    whole, first, second = (ranks[0][name][part] for part in ("whole", "first", "second"))
    assert ranks[0][name] == ranks[1][name]
    ended = len(first["losses"])
    assert 3 <= ended < STEPS
    assert first["stopped"].startswith(f"SIGTERM: ended after {ended} of {STEPS} steps; all is in ")
    assert second["first_step"] == ended
    assert first["losses"] + second["losses"] == whole["losses"]


@pytest.mark.torchrun
def test_each_stage_is_written_once(ranks: Ranks, folder: Path) -> None:
    for name, stages in (("devices", 2), ("replicas", 1)):
        files = {path.name for path in final_path(folder / name, STEPS).iterdir() if path.name.startswith("stage")}
        assert files == {f"stage-{s:04d}.safetensors" for s in range(stages)}


@pytest.mark.torchrun
def test_each_replica_goes_on_from_its_own_running_statistics(ranks: Ranks) -> None:
    """Training normalises by the microbatch and does not show them; evaluation does."""
    whole, first, second = (ranks[0]["statistics"][part] for part in ("whole", "first", "second"))
    assert second["first_step"] == len(first["losses"]) < STEPS
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["evaluation_loss"] == whole["evaluation_loss"]


@pytest.mark.torchrun
@pytest.mark.usefixtures("ranks")
def test_another_number_of_replicas_goes_on_from_the_statistics_of_the_first(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(final_path(folder / "statistics", STEPS), final_path(tmp_path, STEPS))
    saved = [read_tensors(final_path(tmp_path, STEPS) / name) for name in (stage_file(0), buffers_file(0, 1))]
    assert saved[1].keys() == {
        f"replica-1.0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert not torch.equal(saved[0]["0.1.running_mean"], saved[1]["replica-1.0.1.running_mean"])
    alone = {**NORMED, "schedule": one_f_one_b(1, normed_stages.BATCH_MICROBATCHES)}
    model = run(config_of(tmp_path, **alone)).model
    buffers = stage_buffers(model.stages[0].module, stage_names(model, 0))
    assert all(torch.equal(tensor, saved[0][name]) for name, tensor in buffers.items())
    assert [text for text in caplog.messages if text.startswith("resumed with the buffers of replica 0")]


@pytest.mark.torchrun
@pytest.mark.usefixtures("ranks")
def test_damaged_statistics_of_a_replica_are_found_by_that_replica(folder: Path, tmp_path: Path) -> None:
    path = final_path(tmp_path, STEPS)
    shutil.copytree(final_path(folder / "statistics", STEPS), path)
    config = config_of(tmp_path, data_parallel=2, **NORMED)
    assert config.schedule is not None
    program = compile_schedule(config.schedule, reduce_gradients=True)
    first, second = (Model(config, program, Launch(1, replicas=2, rank=rank)) for rank in range(2))
    (path / buffers_file(0, 1)).write_bytes(b"")
    assert resume(tmp_path, config, first) == (STEPS, [])
    with pytest.raises(CheckpointError, match="none that is whole"):
        resume(tmp_path, config, second)


@pytest.mark.torchrun
def test_two_processes_go_on_from_what_one_has_written(ranks: Ranks) -> None:
    found = ranks[0]["from one process"]
    assert found["first_step"] == 4
    assert found["losses"] == pytest.approx(list(run(config_of(None)).losses.values())[4:], rel=1e-12)


@pytest.mark.torchrun
@pytest.mark.parametrize("name", ["full disk", "full disk, asynchronous"])
def test_a_disk_that_fails_one_process_fails_the_checkpoint_and_not_the_run(ranks: Ranks, name: str) -> None:
    """The checkpoint of step 4 is missing, and nobody waits for it."""
    for rank in ranks:
        assert len(rank[name]["losses"]) == 5
        assert rank[name]["there"] == ["step-0000000005"]


@pytest.mark.torchrun
def test_an_asynchronous_checkpoint_is_there_when_all_processes_have_written_theirs(ranks: Ranks) -> None:
    """And not before: the next one that is due waits for it."""
    for rank in ranks:
        assert rank["one slow"]["in step 3"] == [".partial-step-0000000002"]
        assert rank["one slow"]["there"] == [f"step-{step:010d}" for step in (2, 4, 6)]


@pytest.mark.torchrun
def test_torch_loads_it_into_the_layout_of_fsdp(ranks: Ranks) -> None:
    assert [rank["sharded"] for rank in ranks] == [{"equal": True}] * 2


@pytest.mark.torchrun
def test_a_signal_to_the_launcher_ends_all_at_one_step_with_a_checkpoint(tmp_path: Path, forked: Path) -> None:
    with start(forked, ENDLESS, 2, str(tmp_path)) as launcher:
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "begun").exists() and launcher.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            launcher.send_signal(signal.SIGINT)
            launcher.communicate(timeout=240)
        except BaseException:
            end(launcher)
            raise
    told = {(tmp_path / f"rank{rank}.txt").read_text() for rank in range(2)}
    [step] = steps_in(tmp_path / "checkpoints")
    assert told == {
        f"SIGINT: ended after {step} of 1000000 steps; all is in {final_path(tmp_path / 'checkpoints', step)}. "
        "The same command goes on from there."
    }


def test_restarts_that_would_look_for_the_dead_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for restarts in ("0", "2"):
        caplog.clear()
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        run(config_of(tmp_path), until=0)
        assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == (restarts == "2")
