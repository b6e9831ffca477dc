"""The file has every compute op in its order, in torch's letters; what torch cannot run is refused, and all is read."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import uniform
from instances.schedules import one_f_one_b
from optpipe.cli import main
from optpipe.errors import DeadlockError, InputError, OrderError
from optpipe.export.torch_csv import checkpointed_stages, peak_bytes_without_offload, read_torch_csv, torch_csv
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.verify import verify
from solver.build import build_schedule
from solver.published.dualpipe_v import dualpipe_v
from solver.published.seq1f1b import seq1f1b
from tests.optpipe.compile.vocabulary import vocabulary_schedule
from tests.optpipe.plot.schedules import all_forwards_first, pair
from tests.optpipe.runtime.schedules import random_schedule
from tests.problems import problems
from tests.recomputing import LEAVES, ops, recomputing
from tests.recomputing import one_f_one_b as recomputing_orders
from tests.unequal import times, unequal

OURS = {"F": "F", "I": "B", "W": "W", "B": "BW"}


def read(text: str) -> list[list[Op]]:
    """The ops of each row, in our words."""
    rows = []
    for row in csv.reader(text.splitlines()):
        letter_at = [next(k for k, char in enumerate(cell) if char.isalpha()) for cell in row]
        cells = zip(row, letter_at, strict=True)
        rows.append([Op(OURS[cell[k]], int(cell[:k]), int(cell[k + 1 :])) for cell, k in cells])
    return rows


def with_compute(schedule: Schedule, device: int, names: str) -> Schedule:
    """The schedule with other ops on the compute stream of a device, all at once."""
    data = schedule.to_data() | {"problem": schedule.problem.to_data()}
    ops = [Op.parse(name) for name in names.split()]
    data["devices"][device]["compute"] = [
        {"op": op.kind, "stage": op.stage, "microbatch": op.microbatch, "start_us": 0, "end_us": 0} for op in ops
    ]
    return Schedule.from_data(data)


def test_split_and_fused_backwards_keep_their_letters() -> None:
    rows = torch_csv(pair(), drop_offload=True).splitlines()
    assert rows == [
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0I3,0W2,0W3",
        "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3",
    ]


def test_v_placement_has_both_stages_in_the_row_of_their_device() -> None:
    assert torch_csv(all_forwards_first(uniform(2, 1, v_shape=True))).splitlines() == [
        "0F0,3F0,3I0,0I0,3W0,0W0",
        "1F0,2F0,2I0,1I0,2W0,1W0",
    ]


@settings(deadline=None)
@given(problems().filter(lambda problem: all(problem.stages_of)), st.integers(0, 10**6))
def test_every_compute_op_is_there_in_its_order(problem: Problem, seed: int) -> None:
    no_limits = {"devices": [{"memory_bytes": None}] * len(problem.devices), "host_memory_bytes": None}
    schedule = random_schedule(Problem.from_data(problem.to_data() | no_limits), seed)
    assert read(torch_csv(schedule, drop_offload=True)) == [list(device.compute.ops) for device in schedule.devices]


def test_offload_is_refused_with_what_its_absence_needs() -> None:
    schedule = one_f_one_b(2, 3, moved=[(0, 0), (0, 1)])
    expected = (
        r"^devices\[0\]\.offload has 2 ops, but torch's runtime has none for offload\. "
        r"Maybe drop them \(--drop-offload\), which takes 4 B, no limit\.$"
    )
    with pytest.raises(InputError, match=expected):
        torch_csv(schedule)
    assert torch_csv(schedule, drop_offload=True) == torch_csv(one_f_one_b(2, 3))


def test_memory_without_offload_is_that_of_the_plan_without_offload() -> None:
    moved = one_f_one_b(3, 4, moved=[(0, 0), (0, 1), (0, 2), (1, 1)])
    kept = one_f_one_b(3, 4)
    assert list(peak_bytes_without_offload(moved)) == [device.peak_bytes for device in kept.devices]
    assert moved.devices[0].peak_bytes < kept.devices[0].peak_bytes


def test_a_device_without_a_stage_is_refused() -> None:
    data = uniform(2, 1).to_data()
    data["devices"].append({"memory_bytes": None})
    schedule = all_forwards_first(Problem.from_data(data))
    with pytest.raises(InputError, match=r"problem\.devices\[2\] has no stage, but .* one on every rank\. Maybe"):
        torch_csv(schedule)


def test_slices_and_microbatches_of_other_sizes_are_refused() -> None:
    sliced = build_schedule(sliced_problem := unequal(1, 1, slices={"count": 2}), seq1f1b(sliced_problem), 0.0, "", 0.0)
    with pytest.raises(InputError, match=r"^problem.slices.count is 2, but torch's runtime runs microbatches whole"):
        torch_csv(sliced)
    problem = unequal(1, 2, microbatch_factors=[{"time": 2}, {"bytes": 2}])
    in_order = Orders([DeviceOrders(ops("F0.0 BW0.0 F0.1 BW0.1"))])
    with pytest.raises(InputError, match=r"^problem.microbatch_factors\[1\] makes this microbatch of another size"):
        torch_csv(build_schedule(problem, in_order, 0.0, "", 0.0))


def test_spread_passes_are_refused_in_writing_and_reading() -> None:
    schedule = vocabulary_schedule(2, 1, 1)
    with pytest.raises(InputError, match=r"^problem\.spread has the passes S, T, for which torch's runtime has no"):
        torch_csv(schedule)
    with pytest.raises(InputError, match="has the passes S, T"):
        read_torch_csv(b"0F0,0B0\n1F0,1B0\n", "file.csv", schedule.problem)


def test_microbatches_keep_the_order_that_a_solver_chose() -> None:
    """Messages of one shape arrive in this order: times may differ, sizes may not."""
    problem = unequal(1, 2, microbatch_factors=times(1, 2), microbatch_order="free")
    chosen = Orders([DeviceOrders(ops("F0.1 B0.1 W0.1 F0.0 B0.0 W0.0"))], microbatch_order=[1, 0])
    assert torch_csv(build_schedule(problem, chosen, 0.0, "by hand", 0.0)) == "0F1,0I1,0W1,0F0,0I0,0W0\n"


def test_orders_that_cannot_run_are_refused() -> None:
    schedule = all_forwards_first(uniform(2, 1))
    with pytest.raises(OrderError):
        torch_csv(with_compute(schedule, 1, "F1.0 B1.0"))
    with pytest.raises(DeadlockError):
        torch_csv(with_compute(schedule, 1, "B1.0 F1.0 W1.0"))


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def offloading(tmp_path: Path) -> Path:
    """A schedule file in which device 0 offloads, within a budget that is too small without."""
    path = tmp_path / "schedule.json"
    schedule = pair()
    problem = schedule.problem.to_data()
    problem["devices"] = [{"memory_bytes": 5}, {"memory_bytes": None}]
    path.write_text(json.dumps(schedule.to_data() | {"problem": problem}))
    return path


def test_command_refuses_offload_and_leaves_no_file(
    offloading: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "schedule.csv"
    assert run("export", offloading, "--to", "torch-csv", "-o", output) == 2
    assert "--drop-offload" in capsys.readouterr().err
    assert not output.exists()


def test_command_drops_offload_and_says_what_that_needs(
    offloading: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "schedule.csv"
    assert run("export", offloading, "--to", "torch-csv", "--drop-offload", "-o", output, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "device 0 without offload: 6 B of 5 B, 1 B too few",
        "device 1 without offload: 2 B, no limit",
    ]
    assert json.loads(captured.out) == {
        "output": str(output),
        "to": "torch-csv",
        "devices": [
            {"peak_bytes_any_timing": 6, "memory_bytes": 5},
            {"peak_bytes_any_timing": 2, "memory_bytes": None},
        ],
    }
    assert output.read_text() == torch_csv(pair(), drop_offload=True)


def test_command_drops_offload_only_for_torch(
    offloading: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("export", offloading, "--to", "chrome-trace", "--drop-offload", "-o", tmp_path / "t.json") == 2
    assert "--drop-offload is given with --to chrome-trace" in capsys.readouterr().err


def test_a_stage_that_recomputes_inside_is_to_be_checkpointed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = recomputing(2, 2)
    orders = recomputing_orders(problem, lambda s, i: "CB W" if s == 0 else "BW")
    schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
    plain = build_schedule(problem, recomputing_orders(problem, lambda s, i: "B W" if s == 0 else "BW"), 0.0, "", 0.0)
    assert torch_csv(schedule) == torch_csv(plain)
    assert checkpointed_stages(schedule) == {0: "full"}
    assert checkpointed_stages(plain) == {}
    path, output = tmp_path / "schedule.json", tmp_path / "schedule.csv"
    path.write_text(schedule.to_json())
    command = ["export", path, "--to", "torch-csv", "-o", output]
    assert run(*command) == 0
    assert "stages to checkpoint, with their modes: 0 (full)" in " ".join(capsys.readouterr().out.split())
    assert run(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == [{"stage": 0, "mode": "full"}]


@pytest.mark.parametrize(
    ("backward", "code"),
    [(lambda s, i: "C BW", "recomputation"), (lambda s, i: "CBW" if i else "BW", "mixed_modes")],
)
def test_recomputation_that_torch_has_not_is_refused(backward: Callable[[int, int], str], code: str) -> None:
    problem = recomputing(1, 2)
    schedule = build_schedule(problem, recomputing_orders(problem, backward), 0.0, "by hand", 0.0)
    with pytest.raises(InputError) as error:
        torch_csv(schedule)
    assert [issue.code for issue in error.value.issues] == [code]


def test_a_backward_that_recomputes_what_is_kept_is_no_schedule() -> None:
    problem = recomputing(1, 1)
    data = build_schedule(problem, recomputing_orders(problem, lambda s, i: "CBW"), 0.0, "by hand", 0.0).to_data()
    del data["devices"][0]["compute"][0]["mode"]
    with pytest.raises(OrderError, match="lack their modes"):
        torch_csv(Schedule.from_data(data))


def test_memory_without_offload_counts_what_is_recomputed() -> None:
    """The mode keeps 6, of which 4 would leave; a segment takes 3."""
    problem = recomputing(1, 1, [LEAVES])
    orders = Orders([DeviceOrders(ops("F0.0 CBW0.0"), ops("O0.0"), ops("R0.0"))], modes=np.array([[1]]))
    schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
    assert torch_csv(schedule, drop_offload=True) == "0F0,0B0\n"
    assert peak_bytes_without_offload(schedule) == [10]


CLASSES = {
    "Interleaved1F1B": (57_000, [11_000, 9_000, 7_000, 5_000]),
    "InterleavedZeroBubble": (51_000, [8_000, 7_500, 7_000, 6_500]),
    "ZBVZeroBubble": (51_000, [8_000] * 4),
    "DualPipeV": (63_000, [9_000] * 4),
}
"""Value and peaks of four ranks with two stages each, 8 microbatches (DualPipeV: 10), 1 ms an op: by torch's steps."""


def dumped(name: str, form: str, path: Path) -> Path:
    """The CSV that a schedule class of torch dumps."""
    from torch.distributed.pipelining import schedules

    def stage(s: int) -> Mock:
        rank_of = {k: k % 4 for k in range(8)}
        return Mock(stage_index=s, num_stages=8, group_size=4, group_rank=0, stage_index_to_group_rank=rank_of)

    microbatches = 10 if name == "DualPipeV" else 8
    schedule = getattr(schedules, f"Schedule{name}")([stage(0), stage(4)], microbatches, loss_fn=Mock())
    schedule._dump_csv(path, format=form)
    return path


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", CLASSES)
def test_what_torchs_own_classes_dump_is_read(name: str, form: str, tmp_path: Path) -> None:
    found = read_torch_csv(dumped(name, form, tmp_path / "a.csv").read_bytes(), "a.csv")
    verdict = verify(found.schedule)
    assert verdict.ok
    assert (verdict.makespan_us, [device.peak_bytes for device in verdict.devices]) == CLASSES[name]
    assert (found.dropped > 0) is (form == "compute_comms")
    assert found.overlapped == (41 if name == "DualPipeV" else 0)


def test_backwards_in_another_order_are_refused(tmp_path: Path) -> None:
    content = dumped("LoopedBFS", "compute_only", tmp_path / "a.csv").read_bytes()
    with pytest.raises(InputError, match=r"^rank 0 runs BW4\.7 before BW4\.6, but .* Maybe it is of ScheduleLoopedBFS"):
        read_torch_csv(content, "a.csv")


def test_b_with_w_is_the_backward_for_the_input() -> None:
    """The file zb1p_2rank_2stagep of torch's tests, cut to one microbatch, and a whole B of another one."""
    content = b"0F0,0F1,2F0,2B0,2W0,2F1,2B1,0B0,0W0,0B1\n,1F0,1F1,3F0,3B0,3W0,3F1,3B1,1B0,1W0,1B1\n"
    schedule = read_torch_csv(content, "a.csv").schedule
    assert torch_csv(schedule).splitlines()[0] == "0F0,0F1,2F0,2I0,2W0,2F1,2B1,0I0,0W0,0B1"


@settings(deadline=None)
@given(problems().filter(lambda problem: all(problem.stages_of)), st.integers(0, 10**6))
def test_what_is_written_is_read_with_the_costs_of_its_problem(problem: Problem, seed: int) -> None:
    no_limits = {"devices": [{"memory_bytes": None}] * len(problem.devices), "host_memory_bytes": None}
    schedule = random_schedule(Problem.from_data(problem.to_data() | no_limits), seed)
    text = torch_csv(schedule, drop_offload=True)
    found = read_torch_csv(text.encode(), "a.csv", schedule.problem).schedule
    assert [device.compute.ops for device in found.devices] == [device.compute.ops for device in schedule.devices]
    assert torch_csv(read_torch_csv(text.encode(), "a.csv").schedule) == text


def test_blocks_are_written_and_read() -> None:
    """In the cells of torch's own DualPipeV, which torch and we read; pairs that may be no block come apart."""
    from torch.distributed.pipelining.schedules import _Action

    pairs = [{"forward_stage": s, "backward_stage": 7 - s, "us": 25} for s in range(8)]
    problem = uniform(4, 10, v_shape=True, transfer_us=0, overlaps=pairs)
    schedule = build_schedule(problem, dualpipe_v(problem), 0.0, "dualpipe-v", 0.0)
    text = torch_csv(schedule)
    cells = [cell for line in text.splitlines() for cell in line.split(",")]
    assert [str(_Action.from_str(cell)) for cell in cells] == cells
    assert "(7F4;0B0)OVERLAP_F_B" in text.splitlines()[0]
    assert sum(cell.endswith("OVERLAP_F_B") for cell in cells) == len(schedule.orders.blocks) == 41
    found = read_torch_csv(text.encode(), "a.csv", problem)
    assert found.schedule.orders.blocks == schedule.orders.blocks
    assert (found.overlapped, found.schedule.value_us) == (0, schedule.value_us)
    fewer = Problem.from_data(problem.to_data() | {"overlaps": pairs[:1]})
    first = [forward for forward in schedule.orders.blocks if forward.stage == 0]
    assert read_torch_csv(text.encode(), "a.csv", fewer).overlapped == 41 - len(first)


def test_what_spreadsheets_and_editors_add_is_left_out() -> None:
    for text in ("0F0,0B0,,\r\n1F0 , 1B0\r\n\r\n", '"0F0","0B0"\n"1F0","1B0"\n'):
        assert torch_csv(read_torch_csv(text.encode(), "a.csv").schedule) == "0F0,0B0\n1F0,1B0\n"


def test_an_order_of_the_microbatches_is_read() -> None:
    assert read_torch_csv(b"0F1,0B1,0F0,0B0", "a.csv").schedule.microbatch_order == [1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", "rank 0, cell 1 is '0X0', but an action is written as stage, letter, microbatch. Maybe 2F0."),
        ("0F0,0B", "rank 0, cell 1 is '0B', but"),
        ("(0F0;0F1)OVERLAP_F_B", "OVERLAP_F_B joins a forward and a whole backward. Maybe"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1 has no actions. Maybe its row is a blank line"),
        ("0F0,0B0,1F0\n1B0", "stage 1 is on ranks 0, 1, but"),
        ("0F0,0B0,0F1", "has 1 F, 0 I or B and 0 W of stage 0, microbatch 1 (1 of 1 stages and 2 microbatches are"),
        ("0F0,0F0,0B0", "has 2 F, 1 I or B and 0 W of stage 0, microbatch 0"),
        ("0F0,0I0,0B0,0W0", "has 1 F, 2 I or B and 1 W of stage 0, microbatch 0"),
        (
            "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1",
            "rank 1 runs F1.1 before F1.0, but in a schedule the ops of all stages take",
        ),
        ("0F0,0F1", "has forwards alone, but a training step is read. Maybe"),
        ("0B0,0UNSHARD", "has no forward"),
        ("0F0,0B0,99F99999", "has 3 ops, too few for 100 stages and 100000 microbatches. Maybe"),
    ],
)
def test_files_that_are_no_schedule_are_refused_by_rank_and_cell(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_torch_csv(text.encode(), "a.csv")
    assert message in str(caught.value)


def test_ranks_that_wait_for_one_another_are_a_deadlock() -> None:
    with pytest.raises(DeadlockError):
        read_torch_csv(b"0F0,0B0\n1B0,1F0", "a.csv")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (uniform(2, 2), "has 1 microbatches, but the problem 2"),
        (uniform(3, 1), "has 2 ranks, but the problem 3. Maybe it is of another run.\nhas 2 stages"),
        (uniform(1, 1, v_shape=True), "has 2 ranks, but the problem 1"),
    ],
)
def test_a_problem_of_other_sizes_is_refused(problem: Problem, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_torch_csv(b"0F0,0B0\n1F0,1B0", "a.csv", problem)
    assert message in str(caught.value)


def test_commands_read_a_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, costs = tmp_path / "own.csv", tmp_path / "costs.json"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert run("verify", path, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["makespan_us"] == 9_000
    assert "own.csv has no costs: taken are 1 ms for each F, B and W" in captured.err
    costs.write_text(uniform(2, 2).to_json())
    assert run("compare", path, "--problem", costs, "--methods", "1f1b", "--json") == 0
    given, published = json.loads(capsys.readouterr().out)
    assert (given["method"], published["method"]) == ("own.csv", "1f1b")
    assert given["value_us"] == published["value_us"]
    for form in ("schedule", "problem"):
        assert run("export", path, "--to", form, "-o", tmp_path / form) == 0
    assert Schedule.load(tmp_path / "schedule").problem == Problem.load(tmp_path / "problem")
    assert run("plot", path, "-o", tmp_path / "own.svg") == 0
    assert run("verify", tmp_path / "schedule", "--problem", costs) == 2
    assert "--problem gives costs to a schedule CSV of torch, but" in capsys.readouterr().err
