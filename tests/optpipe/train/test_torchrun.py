"""One process a device, over gloo on the loopback: what one process shows holds there too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from instances.schedules import one_f_one_b
from optpipe.errors import TrainingError
from optpipe.schedule import schedule_text
from optpipe.train import ModelConfig, TrainingConfig, train
from tests.optpipe.train.cases import MAX_ERROR, everything, schedules
from tests.ranks import RunRanks

Ranks = list[dict[str, Any]]


def config_of(case: str) -> TrainingConfig:
    """Two checked steps. Each schedule trains in one precision; those with offload and without it in the same."""
    schedule = one_f_one_b(3, 4, moved=everything(3)) if case == "linear in 3" else schedules(2)[case.split("; ")[0]]
    model = ModelConfig("tiny", dtype="float32" if "linear" in case else "float64")
    seed = int(os.environ["RANK"]) if "other seeds" in case else 0
    return TrainingConfig(schedule, model, steps=2, check=True, seed=seed)


@pytest.fixture(scope="module")
def two_ranks(run_ranks: RunRanks) -> Ranks:
    return run_ranks.train(__name__, 2, [*schedules(2), "linear; other seeds"])


@pytest.mark.torchrun
@pytest.mark.parametrize("name", schedules(2))
def test_two_ranks_do_what_one_process_does(two_ranks: Ranks, name: str) -> None:
    """Equal to the plain step; and loss by loss and byte by byte what one process measures."""
    found, config = two_ranks[0][name], config_of(name)
    assert found["processes"] == 2
    assert found["check"]["max_gradient_error"] <= MAX_ERROR[config.model.dtype]
    alone = train(config)
    assert found["losses"] == list(alone.losses)
    assert alone.check is not None
    assert alone.check.max_gradient_error == found["check"]["max_gradient_error"]
    for device, ours in zip(found["check"]["devices"], alone.check.devices, strict=True):
        assert device["live_bytes"] == [0, 0]
        assert device["peak_bytes"] == ours.peak_bytes
        assert device["planned_peak_bytes"] == ours.planned_peak_bytes
        assert device["host_peak_bytes"] == ours.host_peak_bytes


@pytest.mark.torchrun
@pytest.mark.parametrize("placement", ["linear", "V"])
def test_offload_lowers_the_measured_peak(two_ranks: Ranks, placement: str) -> None:
    def peak(name: str) -> int:
        result: int = two_ranks[0][name]["check"]["devices"][0]["peak_bytes"]
        return result

    assert peak(f"{placement}, offload") < peak(placement)


@pytest.mark.torchrun
def test_rank_0_alone_reports_and_all_have_the_result(two_ranks: Ranks) -> None:
    first, second = (rank["linear"] for rank in two_ranks)
    assert [report["step"] for report in first["reports"]] == [0, 1]
    assert second["reports"] == []
    assert first["losses"] == second["losses"]
    assert first["check"] == second["check"]


@pytest.mark.torchrun
def test_ranks_with_different_options_refuse_to_start(two_ranks: Ranks) -> None:
    errors = {rank["linear; other seeds"]["error"] for rank in two_ranks}
    assert len(errors) == 1
    assert "seed is 1 on rank 1 but 0 on rank 0. Maybe" in errors.pop()


@pytest.mark.torchrun
def test_three_ranks_start_and_end_their_own_group(run_ranks: RunRanks) -> None:
    found = run_ranks.train(__name__, 3, ["linear in 3"])[0]["linear in 3"]
    assert found["check"]["max_gradient_error"] <= MAX_ERROR["float32"]
    assert [device["live_bytes"] for device in found["check"]["devices"]] == [[0, 0]] * 3


@pytest.mark.torchrun
def test_a_rank_that_fails_says_why_itself(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Rank 0, which prints for all otherwise, knows only that another has ended."""
    schedule = tmp_path / "schedule.json"
    schedule.write_text(schedule_text(one_f_one_b(2, 4)))
    main = Path(__file__).parents[1] / "cli" / "main_worker.py"
    first, last = run_ranks.each(
        main, 2, "train", "--schedule", str(schedule), "--model", "tests.optpipe.train.odd_stages:breaking"
    )
    assert (first.code, last.code) == (1, 1)
    assert "error: rank 1: device 1 failed at F1.2, action " in last.err
    assert ": ValueError: the layer broke" in last.err
    assert "error: device 0 could not exchange messages with another process" in first.err


def test_another_number_of_processes_than_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    expected = r"WORLD_SIZE is 3 but the schedule has 2 devices\. Maybe start it with torchrun --nproc-per-node 2"
    with pytest.raises(TrainingError, match=expected):
        train(TrainingConfig(one_f_one_b(2, 2), ModelConfig("tiny")))
