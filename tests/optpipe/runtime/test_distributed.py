"""One process group for each directed pair of devices, and the transport for GPUs on top, run over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import compile_schedule
from optpipe.runtime.distributed import directed_pairs
from optpipe.schedule import schedule_text
from tests.optpipe.runtime.chains import M
from tests.ranks import RunRanks

WORKER = Path(__file__).parent / "pair_groups_worker.py"


def test_both_directions_of_every_boundary_have_a_group() -> None:
    assert directed_pairs(compile_schedule(one_f_one_b(3, M))) == [(0, 1), (1, 0), (1, 2), (2, 1)]


def test_a_v_needs_no_group_where_it_turns() -> None:
    assert directed_pairs(compile_schedule(v_wave(2, M))) == [(0, 1), (1, 0)]


@pytest.mark.torchrun
def test_four_ranks_train_over_their_groups_one_pipeline_or_two_replicas(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A replica's ranks may stand in any order."""
    schedules = {
        "one pipeline": one_f_one_b(4, M, moved=[(s, i) for s in range(3) for i in range(M)]),
        "two replicas": one_f_one_b(2, M, fused=True),
    }
    for name, schedule in schedules.items():
        (tmp_path / f"{name}.schedule.json").write_text(schedule_text(schedule))
    run_ranks(WORKER, 4, str(tmp_path))
    for rank in range(4):
        found = json.loads((tmp_path / f"rank{rank}.results").read_text())
        assert len(found) == len(schedules)
        for result in found.values():
            assert result["parameters"] == 4, "those of the rank's own stage"
            assert result["error"] <= 1e-12
