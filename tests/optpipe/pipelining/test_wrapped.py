"""Stages that FSDP2, tensor parallelism or DistributedDataParallel have wrapped: gradients of one process.

All by schedules that keep, offload and recompute, ahead and inside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RunRanks
from tests.recomputing import EXECUTABLE, SELECTIVE, random_executable, with_frozen
from tests.sample import some

pytestmark = pytest.mark.torchrun

WORKER = Path(__file__).parent / "wrapped_worker.py"
V, LOOP, LINE = [0, 1, 1, 0], [0, 1, 0, 1], [0, 1]
MICROBATCHES = 3


def results(
    run_ranks: RunRanks, folder: Path, cases: list[tuple[list[int], dict[str, Any]]], processes: int = 4
) -> list[list[Any]]:
    """Findings of each rank in each case."""
    for k, (placement, how) in enumerate(cases):
        splits = not how.get("compiled")
        modes = [how["mode"]] if "mode" in how else EXECUTABLE
        schedule = random_executable(placement, MICROBATCHES, k, modes, split_backward=splits)
        schedule = with_frozen(schedule, how.get("frozen", 0))
        (folder / f"{k}.json").write_text(schedule.to_json())
    wanted = [{"name": str(k), "how": how} for k, (_, how) in enumerate(cases)]
    (folder / "cases.json").write_text(json.dumps(wanted))
    run_ranks(WORKER, processes, str(folder))
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
    for found in zip(*ranks, strict=True):
        assert all(one["error"] <= 1e-5 for one in found), [one["error"] for one in found]
        assert all(one["compared"] >= 12 for one in found)
    return [list(found) for found in zip(*ranks, strict=True)]


def test_fully_shard(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Each group is reduced once a step, and gathered once, or for each F and B and each C if it reshards.

    C of single blocks gathers what is in them; and what is recomputed within the backward is gathered for that, but for
    whole stages, whose forward comes before it. Gradients of tied embeddings are summed behind the step.
    """
    cases = some(
        [
            (V, {"fsdp": "whole", "reshard": True, "tied": True}),  # embedding and head on one rank
            (LOOP, {"fsdp": "nested", "reshard": False, "tied": True}),  # on two
            (V, {"fsdp": "nested", "reshard": True}),
            (LINE, {"fsdp": "whole", "reshard": False}),
        ]
    )
    for (placement, how), found in zip(cases, results(run_ranks, tmp_path, cases), strict=True):
        for one in found:
            assert sum(sum(ways.values()) for ways in one["recomputed"].values()) > 0, "each rank recomputes"
            groups, gathers = 0, 0
            for s, ways in one["recomputed"].items():
                # Nested: each block and a layer of it; what is left to the stage's own group is at the model's ends.
                of_blocks = 1 if how["fsdp"] == "whole" else 4
                own = of_blocks + (how["fsdp"] == "nested" and int(s) in (0, len(placement) - 1))
                groups += own
                again = own * (ways.get("full ahead", 0) + ways.get("full inside", 0))
                again += of_blocks * ways.get("selective ahead", 0)
                gathers += own * 2 * MICROBATCHES + again if how["reshard"] else own
            assert one["collectives"] == {"_allgather_base_": gathers, "_reduce_scatter_base_": groups}, (how, one)


def test_compiled_blocks_under_fully_shard(run_ranks: RunRanks, tmp_path: Path) -> None:
    [found] = results(run_ranks, tmp_path, [(LOOP, {"compiled": True, "fsdp": "nested", "reshard": True})])
    assert {way.split()[0] for one in found for ways in one["recomputed"].values() for way in ways} >= {"selective"}


def test_tensor_and_sequence_parallel(run_ranks: RunRanks, tmp_path: Path) -> None:
    """And stages that send DTensors to one another, over V and over a loop."""
    across = {"tensor": "sequence", "boundary": True}
    cases = [(V, {"tensor": "plain"}), (LOOP, {"tensor": "sequence"}), (V, across), (LOOP, across)]
    results(run_ranks, tmp_path, some(cases))


def test_groups_of_blocks_under_fully_shard(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Parts that FSDP wraps are gathered for each block of a group that runs again."""
    groups = SELECTIVE | {"name": "selective-groups-2"}
    cases = [(LOOP, {"fsdp": "nested", "reshard": reshard, "mode": groups}) for reshard in (True, False)]
    for found in results(run_ranks, tmp_path, cases):
        assert any(ways for one in found for ways in one["recomputed"].values())


def test_stages_without_a_backward(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Frozen chunks run F alone: gathered for each if they reshard, once a step if not, and never reduced."""
    cases = [
        (V, {"frozen": 2, "fsdp": "whole", "reshard": True}),
        (LOOP, {"frozen": 1, "fsdp": "nested", "reshard": False}),
        (V, {"frozen": 2, "ddp": True}),
        (LOOP, {"frozen": 2, "tensor": "sequence", "boundary": True}),
    ]
    results(run_ranks, tmp_path, cases)


def test_context_and_expert_parallelism(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Collectives within F and B: they run in one order on all ranks of a stage, W has none."""
    fsdp = {"fsdp": "whole", "reshard": False}
    results(run_ranks, tmp_path, some([(V, {"context": True, **fsdp}), (LOOP, {"experts": True, **fsdp})]))


def test_eight_processes(run_ranks: RunRanks, tmp_path: Path) -> None:
    """FSDP of what tensor parallelism has cut, and FSDP within groups that are replicas (HSDP)."""
    cases = [
        (V, {"fsdp": "nested", "reshard": True, "tensor": "plain"}),
        (LOOP, {"fsdp": "whole", "reshard": False, "tensor": "sequence"}),
        (LINE, {"fsdp": "nested", "reshard": True, "replicate": True}),
    ]
    results(run_ranks, tmp_path, some(cases), processes=8)


def test_distributed_data_parallel(run_ranks: RunRanks, tmp_path: Path) -> None:
    (found,) = results(run_ranks, tmp_path, [(LOOP, {"ddp": True})])
    assert all(rank["collectives"] == {"allreduce_": rank["compared"]} for rank in found)
