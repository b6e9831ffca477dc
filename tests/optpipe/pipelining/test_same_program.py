"""One program under torch's schedule classes and under PlannedSchedule: equal gradients, losses and outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instances import uniform
from instances.schedules import OFFLOAD, one_f_one_b
from optpipe.export.torch_csv import torch_csv
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from solver.build import build_schedule
from solver.published.dualpipe_v import dualpipe_v
from tests.optpipe.runtime.schedules import random_schedule
from tests.ranks import RunRanks
from tests.recomputing import EXECUTABLE, random_executable

pytestmark = pytest.mark.torchrun

WORKER = Path(__file__).parent / "same_program_worker.py"
FAILING = Path(__file__).parent / "failing_worker.py"
MOST = {"float32": 1e-6, "float64": 1e-12}


def planned(placement: list[int], microbatches: int, seed: int) -> Schedule:
    """A random schedule of a placement that offloads, with backwards split, some of them fused, and recomputes none."""
    stage = {
        "forward_us": 2,
        "backward_input_us": 2,
        "backward_weight_us": 2,
        "activation_bytes": 4,
        "backward_weight_bytes": 2,
        "offload": OFFLOAD,
    }
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": microbatches,
            "devices": [{"memory_bytes": None}] * (max(placement) + 1),
            "stages": [stage | {"device": device} for device in placement],
        }
    )
    schedule = random_schedule(problem, seed)
    assert any(device.offload for device in schedule.devices), "an activation leaves"
    assert {"B", "W"} <= {op.kind for device in schedule.devices for op in device.compute.ops}
    return schedule


def with_blocks(microbatches: int) -> Schedule:
    """DualPipeV on two devices."""
    pairs = [{"forward_stage": s, "backward_stage": 3 - s, "us": 25} for s in range(4)]
    problem = uniform(2, microbatches, v_shape=True, transfer_us=0, overlaps=pairs)
    return build_schedule(problem, dualpipe_v(problem), 0.0, "dualpipe-v", 0.0)


CASES: dict[int, list[tuple[list[int], int, str, str, bool]]] = {
    2: [
        ([0, 1], 4, "1f1b", "float64", True),
        ([0, 1, 0, 1], 4, "interleaved", "float64", False),
        ([0, 1, 1, 0], 4, "zbv", "float32", True),
        ([1, 0, 0], 3, "csv", "float64", True),
        ([0, 1, 1, 0], 6, "blocks", "float64", True),
    ],
    4: [
        ([0, 1, 2, 3], 6, "1f1b", "float64", True),
        ([0, 1, 2, 3, 3, 2, 1, 0], 5, "csv", "float32", False),
    ],
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_losses_and_outputs_are_those_of_torchs_classes(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    cases: list[dict[str, Any]] = []
    kinds: set[str] = set()
    for k, (placement, microbatches, torch_class, dtype, scale) in enumerate(CASES[ranks]):
        if torch_class in ("csv", "blocks"):
            schedule = planned(placement, microbatches, seed=k) if torch_class == "csv" else with_blocks(microbatches)
            assert [stage.device for stage in schedule.problem.stages] == placement
            assert bool(schedule.orders.blocks) == (torch_class == "blocks")
            torch_class = "csv"
            (tmp_path / f"{k}.csv").write_text(torch_csv(schedule, drop_offload=True))
        else:
            schedule = random_executable(placement, microbatches, seed=k, modes=EXECUTABLE)
            kinds |= {op.kind for op in schedule.orders.ops()}
        (tmp_path / f"{k}.json").write_text(schedule.to_json())
        cases.append({"name": str(k), "torch_class": torch_class, "dtype_name": dtype, "scale_grads": scale})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    assert kinds >= {"O", "C", "CB", "CBW", "B", "W"}
    run_ranks(WORKER, ranks, str(tmp_path))
    for rank in range(ranks):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for case, errors in zip(cases, results, strict=True):
            assert errors.keys() == {"whole", "in_lists"}
            assert max(errors.values()) <= MOST[case["dtype_name"]], (rank, case, errors)


def test_a_rank_that_fails_in_the_first_call_is_named_by_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    """First rank 1 raises, then it ends: the others neither wait for it nor blame their own stages."""
    path = tmp_path / "schedule.json"
    path.write_text(schedule_text(one_f_one_b(3, 3)))
    ended = run_ranks.each(FAILING, 3, str(path), str(tmp_path), timeout_seconds=60)
    assert [rank.code for rank in ended] == [0, 9, 0]
    found = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*-[0-2].json")}
    assert {name: error["kind"] for name, error in found.items()} == {
        "raises-0": "TrainingError",
        "raises-1": "TrainingError",
        "raises-2": "TrainingError",
        "dies-0": "RunFailedError",
        "dies-2": "RunFailedError",
    }
    for other in ("raises-0", "raises-2"):
        text = "stages[1] of rank 1 failed at the first microbatch: ValueError: the layer broke"
        assert found[other]["text"] == text
    assert found["raises-1"]["text"].startswith("a stage of rank 1 failed at the first microbatch")
    for other in ("dies-0", "dies-2"):
        assert found[other]["text"].startswith("what all processes tell one another did not come:")
        assert found[other]["text"].endswith("Maybe another process has ended: see what it printed.")
