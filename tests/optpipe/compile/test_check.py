"""A program that cannot run is refused, with the actions that block it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instances.schedules import one_f_one_b
from optpipe.compile import Action, Program, Slab, check_program, compile_schedule
from optpipe.errors import BudgetError, DeadlockError, OrderError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from tests.optpipe.compile.vocabulary import vocabulary_schedule


@pytest.fixture
def program() -> Program:
    return compile_schedule(one_f_one_b(2, 2, moved=[(0, 0)]))


def moved(program: Program, device: int, action: str, to: int) -> Program:
    """The program with one action of a device elsewhere in its list."""
    actions = list(program.devices[device])
    taken = actions.pop(place(program, device, action))
    actions.insert(to, taken)
    return with_list(program, device, actions)


def with_list(program: Program, device: int, actions: list[Action]) -> Program:
    lists = list(program.devices)
    lists[device] = tuple(actions)
    return replace(program, devices=tuple(lists))


def place(program: Program, device: int, action: str) -> int:
    return [str(a) for a in program.devices[device]].index(action)


def test_what_is_lowered_passes(program: Program) -> None:
    check_program(program)


def test_devices_that_wait_for_one_another_are_named(program: Program) -> None:
    """Device 0 sends F0.1 only after the gradient that device 1 sends after receiving F0.1."""
    bad = moved(program, 0, "SEND_F0.1->1", place(program, 0, "RECV_B0.0<-1"))
    with pytest.raises(DeadlockError) as caught:
        check_program(bad)
    assert set(caught.value.cycle) == {"RECV_B0.0<-1", "RECV_F1.1<-0"}
    assert caught.value.blocked == 7 + 9, "7 on device 0, 9 on device 1"


def test_an_action_before_what_it_needs_is_refused(program: Program) -> None:
    with pytest.raises(OrderError, match=r"device 0 runs B0\.0 at place 8, before R0\.0 at place 9") as caught:
        check_program(moved(program, 0, "R0.0", place(program, 0, "RECV_B0.0<-1") + 1))
    assert "-> [8] B0.0\n   [9] R0.0" in str(caught.value)


def test_a_wait_that_comes_too_late_is_refused(program: Program) -> None:
    with pytest.raises(OrderError, match=r"runs RELEASE0\.0 at place 4, before O0\.0 at place 7"):
        check_program(moved(program, 0, "O0.0@0", place(program, 0, "R0.0")))


def without_wait(program: Program, device: int, action: str, wait: str) -> Program:
    actions = list(program.devices[device])
    k = place(program, device, action)
    waits = tuple(other for other in actions[k].waits if str(other) != wait)
    assert waits != actions[k].waits
    actions[k] = actions[k]._replace(waits=waits)
    return with_list(program, device, actions)


@pytest.mark.parametrize(
    ("action", "wait", "needs"),
    [
        ("O0.0@0", "F0.0", "O0.0@0 before F0.0 is over"),
        ("RELEASE0.0", "O0.0", "RELEASE0.0 before O0.0 is over"),
        ("R0.0", "PREPARE0.0", "R0.0 before PREPARE0.0 is over"),
        ("B0.0", "R0.0", "B0.0 before R0.0 is over"),
        ("B0.0", "RECV_B0.0", "B0.0 before RECV_B0.0 is over"),
        ("SEND_F0.0->1", "F0.0", "SEND_F0.0->1 before F0.0 is over"),
        ("RECV_B0.1<-1", "W0.0", "RECV_B0.1<-1 before W0.0 is over"),
    ],
)
def test_an_event_that_is_missing_is_named(program: Program, action: str, wait: str, needs: str) -> None:
    """Rules, copies, messages, and the memory of a message, which is taken in the order of the compute stream."""
    with pytest.raises(OrderError, match=f"device 0 may begin {needs}"):
        check_program(without_wait(program, 0, action, wait))


def test_a_wait_for_what_is_not_in_the_list_before_is_refused(program: Program) -> None:
    actions = list(program.devices[0])
    actions[0] = actions[0]._replace(waits=(actions[3].key,))
    with pytest.raises(OrderError, match=r"device 0 runs F0\.0 at place 0, before F0\.1 at place 3"):
        check_program(with_list(program, 0, actions))


def test_messages_in_another_order_than_sent_are_refused(program: Program) -> None:
    with pytest.raises(OrderError, match=r"message 0 from device 0 to device 1 is sent as \('F', 0, 1\)"):
        check_program(moved(program, 0, "SEND_F0.0->1", place(program, 0, "SEND_F0.1->1")))


def test_a_message_that_nobody_receives_is_refused(program: Program) -> None:
    actions = list(program.devices[0])
    del actions[place(program, 0, "RECV_B0.1<-1")]
    with pytest.raises(OrderError, match=r"B0\.1 needs RECV_B0\.1, which is not in the program"):
        check_program(with_list(program, 0, actions))


def test_an_action_twice_is_refused(program: Program) -> None:
    with pytest.raises(OrderError, match=r"F1\.0 is in the program more than once"):
        check_program(with_list(program, 1, [*program.devices[1], Action("F", 1, 0)]))


def test_an_action_on_the_wrong_device_is_refused(program: Program) -> None:
    with pytest.raises(OrderError, match=r"F1\.1 is on device 0, but stage 1 is on device 1"):
        check_program(with_list(program, 0, [*program.devices[0], Action("F", 1, 1)]))


@pytest.fixture
def sharing() -> Program:
    """O0.2 takes the slab that R0.0 has read."""
    program = compile_schedule(one_f_one_b(2, 3, moved=[(0, 0), (0, 1), (0, 2)]))
    assert place(program, 0, "O0.2@0") > place(program, 0, "O0.0@0")
    return program


def with_slab(program: Program, action: str, slab: int | None) -> Program:
    actions = list(program.devices[0])
    k = place(program, 0, action)
    actions[k] = actions[k]._replace(slab=slab)
    return with_list(program, 0, actions)


def test_a_slab_that_is_still_read_is_not_written(sharing: Program) -> None:
    """O0.1 begins long before R0.0."""
    with pytest.raises(OrderError, match=r"device 0 may begin O0\.1@0 while R0\.0 still reads slab 0"):
        check_program(with_slab(sharing, "O0.1@1", 0))


@pytest.mark.parametrize("slab", [None, 2])
def test_an_offload_without_a_slab_is_refused(sharing: Program, slab: int | None) -> None:
    with pytest.raises(OrderError, match=rf"O0\.0 on device 0 has slab {slab} of 2"):
        check_program(with_slab(sharing, "O0.0@0", slab))


def with_budgets(schedule: Schedule, **fields: object) -> Problem:
    return Problem.from_data(schedule.problem.to_data() | fields)


def test_more_memory_than_the_budget_is_refused_with_the_action() -> None:
    """Three forwards of 2 bytes run before the first backward of device 0."""
    schedule = one_f_one_b(3, 3)
    program = compile_schedule(schedule)
    check_program(program, with_budgets(schedule, devices=[{"memory_bytes": 6}] * 3))
    with pytest.raises(BudgetError, match=r"device 0 holds 6 bytes at F0\.2, but its memory_bytes is 5\."):
        check_program(program, with_budgets(schedule, devices=[{"memory_bytes": 5}] * 3))


def test_more_host_memory_than_the_budget_is_refused_with_the_action(sharing: Program) -> None:
    schedule = one_f_one_b(2, 3, moved=[(0, 0), (0, 1), (0, 2)])
    check_program(sharing, with_budgets(schedule, host_memory_bytes=4))
    with pytest.raises(
        BudgetError, match=r"device 0 may hold 4 bytes on the host at O0\.1@1, but host_memory_bytes is 3"
    ):
        check_program(sharing, with_budgets(schedule, host_memory_bytes=3))


def test_a_slab_that_is_too_small_is_refused(sharing: Program) -> None:
    small = replace(sharing, slabs=((Slab(1, (0,)), Slab(2, (0,))), ()))
    with pytest.raises(OrderError, match=r"O0\.0@0 on device 0 moves 2 bytes, its slab 1"):
        check_program(small, one_f_one_b(2, 3).problem)


def test_exchanges_in_another_order_or_missing_ones_are_refused() -> None:
    program = compile_schedule(vocabulary_schedule(2, 2, 2))
    behind = moved(program, 0, "BROADCAST0.0", place(program, 0, "BROADCAST0.1"))
    actions = [a for a in program.devices[0] if str(a) != "REDUCE_INPUT0.1"]
    with pytest.raises(OrderError, match=r"before BROADCAST0\.0 at place"):
        check_program(behind)
    with pytest.raises(DeadlockError, match=r"REDUCE_INPUT1\.1"):
        check_program(with_list(program, 0, actions))
