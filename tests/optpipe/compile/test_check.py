"""A program that cannot run is refused, with the actions that block it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optpipe.compile import Action, Program, check_program, compile_schedule
from optpipe.errors import DeadlockError, OrderError
from tests.optpipe.runtime.schedules import one_f_one_b


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
    assert caught.value.blocked == 7 + 8, "7 on device 0, 8 on device 1"


def test_an_action_before_what_it_needs_is_refused(program: Program) -> None:
    with pytest.raises(OrderError, match=r"device 0 runs B0\.0 at place 6, before R0\.0 at place 7") as caught:
        check_program(moved(program, 0, "R0.0", place(program, 0, "RECV_B0.0<-1") + 1))
    assert "-> [6] B0.0\n   [7] R0.0" in str(caught.value)


def test_a_wait_that_comes_too_late_is_refused(program: Program) -> None:
    (wait,) = program.devices[0][place(program, 0, "R0.0")].waits
    assert str(wait) == "F0.1"
    with pytest.raises(OrderError, match=r"runs R0\.0 at place 3, before F0\.1"):
        check_program(moved(program, 0, "R0.0", place(program, 0, "F0.1")))


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
