"""Activation modes: the documents, times and memory of kept, recomputed and offloaded microbatches."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optpipe.errors import InputError, MethodError, OrderError
from optpipe.ops import DeviceOrders, Orders, orders_from_data, orders_to_data
from optpipe.schedule import Schedule, schedule_text
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.build import build_schedule, over_budget
from solver.methods import METHODS, refuse_unsupported
from solver.solve import solve
from tests.recomputing import COPY, FULL, LEAVES, one_f_one_b, ops, recomputing


def test_choices_have_every_default_filled_in() -> None:
    modes = [{"name": "part", "kept_bytes": 4, "recompute_us": 3}, {"name": "copied", "offload": COPY}]
    stage = recomputing(1, 1, modes, offload=COPY | {"bytes": 10}).stages[0]
    kept, offload, part, copied = stage.choices
    assert [mode.name for mode in stage.choices] == ["kept", "offload", "part", "copied"]
    assert kept[1:] == (10, 0, 0, 0, 0, None, None, False)
    assert (offload.kept_bytes, offload.offload) == (10, stage.offload)
    assert part[1:] == (4, 6, 3, 6, 0, None, None, True)
    assert (copied.kept_bytes, copied.recomputes, copied.offload) == (10, False, stage.modes[1].offload)
    assert stage.choice_numbers == {"kept": 0, "offload": 1, "part": 2, "copied": 3}
    assert stage.modes[0].to_data() == modes[0]


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ({"name": "kept"}, "repeated_mode"),
        ({"name": "offload"}, "repeated_mode"),
        ({"name": "full"}, "repeated_mode"),
        ({"name": "m", "kept_bytes": 11}, "mode_too_large"),
        ({"name": "m", "kept_bytes": 9}, "missing_recompute_us"),
        ({"name": "m", "recompute_us": 1}, "nothing_recomputed"),
        ({"name": "m", "kept_bytes": 10, "segment_bytes": 1}, "nothing_recomputed"),
        ({"name": "m", "kept_bytes": 3, "recompute_us": 1, "offload": COPY}, "offload_too_large"),
    ],
)
def test_modes_that_contradict_themselves_are_refused(mode: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as error:
        recomputing(1, 1, [FULL, mode])
    (issue,) = error.value.issues
    assert issue.code == code
    assert issue.loc[:2] == ("stages", 0)
    assert "modes[1]" in issue.detail


def test_orders_with_modes_pass_through_json() -> None:
    orders = one_f_one_b(recomputing(2, 3), lambda s, i: "C BW" if s == 0 else "CB W")
    data = json.loads(json.dumps(orders_to_data(orders)))
    assert data["modes"] == [[1, 1, 1], [1, 1, 1]]
    read = orders_from_data(data)
    assert orders_to_data(read) == data
    assert read == replace(read, modes=orders.modes)
    assert read != replace(read, modes=None)
    assert read != replace(read, modes=np.zeros((2, 3), np.int64))
    assert "modes" not in orders_to_data(replace(orders, modes=None))
    for wrong in ([1, 1], [["full"]], [[0.5]]):
        with pytest.raises(ValueError, match="modes must be a list of integers for each stage"):
            orders_from_data(data | {"modes": wrong})


@pytest.mark.parametrize("none_on_last", [False, True])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16), (8, 24)])
def test_times_and_peaks_of_1f1b_that_recomputes(p: int, m: int, none_on_last: bool) -> None:
    """The closed forms of uniform stages with F = C = 1, BW = 2, an activation of 10 and 1 kept."""
    problem = recomputing(p, m)
    classic, ahead = (
        simulate(problem, one_f_one_b(problem, lambda s, _, k=kinds: "BW" if none_on_last and s == p - 1 else k))
        for kinds in ("CBW", "C BW")
    )
    if none_on_last:
        published = {(4, 8): (42, 39), (8, 16): (90, 83), (8, 24): (122, 115)}
        assert (classic.makespan_us, ahead.makespan_us) == published[p, m]
    else:
        assert classic.makespan_us == (m + p - 1) * 4
        assert ahead.makespan_us == m * 4 + (p - 1) * 3
    recomputing_devices = range(p - 1 if none_on_last else p)
    for simulation in (classic, ahead):
        assert [simulation.device_memory(d).peak_bytes for d in recomputing_devices] == [
            (p - d) * 1 + 9 for d in recomputing_devices
        ]
        assert not none_on_last or simulation.device_memory(p - 1).peak_bytes == 10


def one_stage(text: str, mode: dict[str, Any], offload: str = "", reload: str = "", **stage: Any) -> Schedule:
    """A schedule of one stage, whose only microbatch is in the given mode."""
    problem = recomputing(1, 1, [mode], **{"activation_bytes": 10, "backward_weight_bytes": 3} | stage)
    orders = Orders(
        [DeviceOrders(ops(text), ops(offload), ops(reload))], modes=np.array([[len(problem.stages[0].choices) - 1]])
    )
    return build_schedule(problem, orders, 0.0, "by hand", 0.0)


def levels(schedule: Schedule) -> list[int]:
    simulation = simulate(schedule.problem, schedule.orders)
    return [int(level) for level in simulation.device_memory(0).bytes]


def test_what_ops_take_and_free() -> None:
    """An activation of 10 of which 6 are kept and 4 of these leave, with workspaces of F, B, W and BW."""
    mode = LEAVES | {"forward_workspace_bytes": 5}
    work = {"workspace_bytes": {"F": 1, "B": 2, "W": 4, "BW": 7}}
    ahead = one_stage("F0.0 C0.0 B0.0 W0.0", mode, "O0.0", "R0.0", **work)
    # F, O, then at once O's end and R, C, B, W, the end.
    assert levels(ahead) == [6 + 5 + 1, 6, 6 - 4 + 4, 10 + 2, 10 + 2, 3 + 4, 0]
    inside = one_stage("F0.0 CB0.0 W0.0", mode, "O0.0", "R0.0", **work)
    assert levels(inside) == [12, 6, 6, 6 + 3 + 2, 3 + 4, 0]
    fused = one_stage("F0.0 CBW0.0", mode, "O0.0", "R0.0", **work)
    assert levels(fused) == [12, 6, 6, 6 + 3 + 7, 0]
    ends = [schedule.value_us for schedule in (ahead, inside, fused)]
    assert ends == [1 + 3 + 2 + 2 + 1 + 1] * 3


def test_old_problems_and_schedules_are_written_as_they_were_read() -> None:
    problem = recomputing(2, 2, [])
    schedule = build_schedule(problem, one_f_one_b(problem, lambda s, i: "BW"), 0.0, "by hand", 0.0)
    text = schedule_text(schedule)
    assert '"mode"' not in text
    assert schedule_text(Schedule.from_json(text)) == text


def test_a_schedule_names_the_modes_of_forwards_alone() -> None:
    problem = recomputing(2, 2)
    orders = one_f_one_b(problem, lambda s, i: "C BW" if (s, i) == (0, 1) else "BW")
    schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
    rows = [row for device in schedule.to_data()["devices"] for row in device["compute"]]
    assert [row["microbatch"] for row in rows if "mode" in row] == [1]
    read = Schedule.from_json(schedule_text(schedule))
    assert read == schedule
    assert schedule_text(read) == schedule_text(schedule)
    assert read.orders == schedule.orders
    assert read.devices[0].compute[1].mode == "full"
    assert "mode" in read.devices[0].compute[1].model_fields_set


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"op": "BW"}, "misplaced_mode"), ({"mode": "fool"}, "unknown_mode"), ({"mode": ""}, "string_too_short")],
)
def test_a_mode_of_another_op_or_name_is_refused(changes: dict[str, Any], code: str) -> None:
    problem = recomputing(1, 1)
    data = build_schedule(problem, one_f_one_b(problem, lambda s, i: "C BW"), 0.0, "by hand", 0.0).to_data()
    data["devices"][0]["compute"][0] |= changes
    with pytest.raises(InputError) as error:
        Schedule.from_data(data)
    assert code in str(error.value.issues[0].code)


@pytest.mark.parametrize(
    ("compute", "mode", "detail"),
    [
        ("F0.0 C0.0 BW0.0", 0, "C0.0 is there, but its mode 'kept' has no recompute_us"),
        ("F0.0 BW0.0", 1, "C0.0 is missing: its mode is 'full'"),
        ("F0.0 C0.0 CBW0.0", 1, "CBW0.0 is there together with C0.0: both do C"),
        ("F0.0 CBW0.0", 2, "CBW0.0 is there, but its mode 'whole' has no segment_bytes"),
        ("F0.0 BW0.0", 3, "O0.0 is missing: its mode is 'away'"),
        ("F0.0 CB0.0", 1, "W0.0 is missing"),
        ("F0.0 CB0.0 B0.0 W0.0", 1, "CB0.0 is there together with B0.0: both do B"),
        ("F0.0 BW0.0", 4, "modes must hold"),
        ("F0.0 CBW0.0 W0.0", 1, "BW0.0 is there together with"),
    ],
)
def test_orders_that_are_not_of_their_modes(compute: str, mode: int, detail: str) -> None:
    whole = {"name": "whole", "kept_bytes": 1, "recompute_us": 1}
    problem = recomputing(1, 1, [FULL, whole, {"name": "away", "offload": COPY}])
    with pytest.raises(OrderError, match=detail.replace("(", r"\(")):
        simulate(problem, Orders([DeviceOrders(ops(compute))], modes=np.array([[mode]])))


def test_ops_that_recompute_need_modes() -> None:
    problem = recomputing(1, 1)
    with pytest.raises(OrderError, match=r"C0\.0 is there, but .* has no recompute_us\. Maybe the orders lack"):
        simulate(problem, Orders([DeviceOrders(ops("F0.0 C0.0 BW0.0"))]))
    with pytest.raises(OrderError, match=r"O0\.0 is there, but its mode 'kept' has no offload"):
        simulate(problem, Orders([DeviceOrders(ops("F0.0 BW0.0"), ops("O0.0"), ops("R0.0"))]))


def test_a_stage_that_cannot_split() -> None:
    problem = recomputing(1, 1, split_backward=False)
    assert simulate(problem, Orders([DeviceOrders(ops("F0.0 BW0.0"))])).makespan_us == 3
    with pytest.raises(OrderError, match=r"B0\.0 is there, but stages\[0\]\.split_backward is false"):
        simulate(problem, Orders([DeviceOrders(ops("F0.0 B0.0 W0.0"))]))


def test_methods_that_split_backwards_say_so() -> None:
    modes, whole = recomputing(2, 2), recomputing(2, 2, [], split_backward=False)
    for method in METHODS.values():
        refuse_unsupported(method, modes)
        if "backwards in one piece" not in method.takes:
            with pytest.raises(MethodError, match=f"{method.name} splits backwards"):
                refuse_unsupported(method, whole)
            with pytest.raises(MethodError, match=method.name):
                solve(whole, method.name)
    for name in ("gpipe", "1f1b"):
        assert verify(solve(modes, name)).ok
        assert {op.kind for op in solve(whole, name).orders.ops()} == {"F", "BW"}


@pytest.mark.parametrize("name", ["1f1b", "zb-auto", "zb-v"])
def test_a_refusal_points_at_methods_that_are_right_for_modes(name: str) -> None:
    with pytest.raises(MethodError, match=r"Maybe use auto or cp-sat, which"):
        solve(recomputing(2, 4, budget=12 if name == "1f1b" else 9), name)


def test_the_budget_of_modes_is_held() -> None:
    problem = recomputing(2, 4, budget=12)
    ahead = one_f_one_b(problem, lambda s, i: "C BW")
    assert over_budget(problem, ahead) == []
    assert [d for d, *_ in over_budget(problem, one_f_one_b(problem, lambda s, i: "BW"))] == [0]
