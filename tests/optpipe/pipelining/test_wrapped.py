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

Case = tuple[list[int], dict[str, Any]]
ACROSS = {"tensor": "sequence", "boundary": True}
"""Stages send DTensors to one another."""
SHARDED = {"fsdp": "whole", "reshard": False}
GROUPS = {"fsdp": "nested", "mode": SELECTIVE | {"name": "selective-groups-2"}}

FOUR: dict[str, list[Case]] = {
    "fully shard": some(
        [
            (V, {"fsdp": "whole", "reshard": True, "tied": True}),  # embedding and head on one rank
            (LOOP, {"fsdp": "nested", "reshard": False, "tied": True}),  # on two
            (V, {"fsdp": "nested", "reshard": True}),
            (LINE, SHARDED),
        ]
    ),
    "compiled": [(LOOP, {"compiled": True, "fsdp": "nested", "reshard": True})],
    "tensor": some([(V, {"tensor": "plain"}), (LOOP, {"tensor": "sequence"}), (V, ACROSS), (LOOP, ACROSS)]),
    "groups": some([(LOOP, GROUPS | {"reshard": True}), (LOOP, GROUPS | {"reshard": False})]),
    "frozen": some(
        [
            (V, {"frozen": 2, "fsdp": "whole", "reshard": True}),
            (LOOP, {"frozen": 1, "fsdp": "nested", "reshard": False}),
            (V, {"frozen": 2, "ddp": True}),
            (LOOP, ACROSS | {"frozen": 2}),
        ]
    ),
    "context and experts": some([(V, SHARDED | {"context": True}), (LOOP, SHARDED | {"experts": True})]),
    "distributed data parallel": [(LOOP, {"ddp": True})],
}
"""Cases of four processes, which one start of them runs."""
EIGHT: list[Case] = some(
    [
        (V, {"fsdp": "nested", "reshard": True, "tensor": "plain"}),
        (LOOP, SHARDED | {"tensor": "sequence"}),
        (LINE, {"fsdp": "nested", "reshard": True, "replicate": True}),
    ]
)

Found = list[dict[str, Any]]
"""Findings of each rank."""


def results(run_ranks: RunRanks, folder: Path, cases: list[Case], processes: int) -> list[Found]:
    """Findings of each rank in each case."""
    wanted = []
    for k, (placement, how) in enumerate(cases):
        splits = not how.get("compiled")
        modes = [how["mode"]] if "mode" in how else EXECUTABLE
        schedule = random_executable(placement, MICROBATCHES, 0, modes, split_backward=splits)
        schedule = with_frozen(schedule, how.get("frozen", 0))
        (folder / f"{k}.json").write_text(schedule.to_json())
        wanted.append({"name": str(k), "how": how})
    (folder / "cases.json").write_text(json.dumps(wanted))
    run_ranks(WORKER, processes, str(folder))
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
    return [list(found) for found in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def four(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    cases = [case for some_cases in FOUR.values() for case in some_cases]
    found = iter(results(run_ranks, tmp_path_factory.mktemp("four"), cases, 4))
    return {name: [next(found) for _ in some_cases] for name, some_cases in FOUR.items()}


def assert_gradients_of_one_process(found: Found) -> None:
    assert all(one["error"] <= 1e-5 for one in found), [one["error"] for one in found]
    assert all(one["compared"] >= 12 for one in found)


@pytest.mark.parametrize("name", FOUR)
def test_gradients_are_those_of_one_process(four: dict[str, list[Found]], name: str) -> None:
    """Within F and B all ranks of a stage run the collectives of contexts and experts in one order, W has none.

    Frozen chunks run F alone: gathered for each if they reshard, once a step if not, and never reduced.
    """
    for found in four[name]:
        assert_gradients_of_one_process(found)


def test_eight_processes(run_ranks: RunRanks, tmp_path: Path) -> None:
    """FSDP of what tensor parallelism has cut, and FSDP within groups that are replicas (HSDP)."""
    for found in results(run_ranks, tmp_path, EIGHT, 8):
        assert_gradients_of_one_process(found)


def test_collectives_of_fully_shard(four: dict[str, list[Found]]) -> None:
    """Each group is reduced once a step, and gathered once, or for each F and B and each C if it reshards.

    C of single blocks gathers what is in them; and what is recomputed within the backward is gathered for that, but for
    whole stages, whose forward comes before it. Gradients of tied embeddings are summed behind the step.
    """
    for (placement, how), found in zip(FOUR["fully shard"], four["fully shard"], strict=True):
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


def test_compiled_blocks_run_again(four: dict[str, list[Found]]) -> None:
    [found] = four["compiled"]
    assert {way.split()[0] for one in found for ways in one["recomputed"].values() for way in ways} >= {"selective"}


def test_groups_of_blocks_run_again(four: dict[str, list[Found]]) -> None:
    """Parts that FSDP wraps are gathered for each block of a group."""
    for found in four["groups"]:
        assert any(ways for one in found for ways in one["recomputed"].values())


def test_distributed_data_parallel_sums_each_gradient_once(four: dict[str, list[Found]]) -> None:
    [found] = four["distributed data parallel"]
    assert all(rank["collectives"] == {"allreduce_": rank["compared"]} for rank in found)
