"""On a busy machine the published schedules are never left out: what a child waits for a processor does not count."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from instances import uniform
from optpipe.errors import MethodError
from optpipe.problem import Problem
from solver.limits import Limits
from solver.process import Child, Heartbeat, parent, solve_in_child
from solver.process.channel import CANCEL, kept_waiting_s
from solver.scale import count_ops
from solver.solution import Progress
from solver.solve import solve
from tests.clock import Clock
from tests.solver.process.slow_start import LOADS_S

PROBLEM = uniform(4, 8, v_shape=True, budget=12)
LIMIT_S = 2.0


SPIN, SLEEP = "[0 for _ in iter(int, 1)]", "time.sleep(60)"


def kept_waiting_while(program: str, beside: int) -> float:
    """Seconds that one of `beside` + 1 processes that run `program` on one processor waits for it in half a second."""
    core = min(os.sched_getaffinity(0))
    code = f"import os, time; os.sched_setaffinity(0, [{core}]); print(flush=True); {program}"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(beside + 1)]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        while program is SLEEP and " S " not in Path(f"/proc/{running[0].pid}/stat").read_text():
            time.sleep(0.01)  # it may have to wait before it can begin to sleep
        before_s = kept_waiting_s(running[0].pid)
        time.sleep(0.5)
        return kept_waiting_s(running[0].pid) - before_s
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_waiting_is_what_others_take_and_not_sleep() -> None:
    assert kept_waiting_while(SPIN, beside=3) > 0.15
    assert kept_waiting_while(SLEEP, beside=3) < 0.05


def solved(limits: Limits) -> list[Progress]:
    """Progress within the limit of a child that takes long to load."""
    events: list[Progress | Heartbeat] = []
    with Child("tests.solver.process.slow_start") as child:
        result = solve_in_child(PROBLEM, "auto", limits, child=child, on_event=events.append)
    assert result.schedule is not None
    return [event for event in events if isinstance(event, Progress)]


def test_a_child_that_finds_no_processor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(LIMIT_S, workers=1)
    waited = property(lambda child: min(limits.seconds, LOADS_S) + kept_waiting_s(child.pid))
    monkeypatch.setattr(Child, "kept_waiting_s", waited)
    monkeypatch.setattr(parent, "MOST_WAITED_S", 60.0)  # it waits in earnest as well, where others use the machine
    assert solved(limits), "its published schedules are what it does first"


def test_one_that_takes_its_time_itself_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "kept_waiting_s", 0.0)  # also where others use the machine
    clock = Clock()
    assert not solved(Limits(LIMIT_S, workers=1))
    assert clock.seconds <= LIMIT_S + 2


def test_one_that_never_finds_a_processor_is_waited_for_twice_the_limit_and_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most_waited_s = 0.5
    monkeypatch.setattr(parent, "MOST_WAITED_S", most_waited_s)
    limits = Limits(0.5, workers=1)
    monkeypatch.setattr(Child, "kept_waiting_s", property(lambda child: limits.seconds))
    guard = Timer(20.0, limits.cancel.request)  # without the cap this would never end
    guard.start()
    with Child("tests.solver.process.asleep") as child:
        result = solve_in_child(PROBLEM, "auto", limits, child=child)
    guard.cancel()
    assert not limits.cancel.requested
    assert result.schedule is not None, "the parent has made one meanwhile"
    assert 2 * limits.time_limit_s + most_waited_s <= limits.seconds


def test_an_answer_waits_for_the_first_published_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where child and parent were kept from the disk until the time was up, the floor is not the answer."""
    make, limits = parent.Fallback.make, Limits(0.5, workers=1)

    def make_late(fallback: parent.Fallback) -> None:
        time.sleep(1.5)
        make(fallback)

    monkeypatch.setattr(parent.Fallback, "make", make_late)
    with Child("tests.solver.process.asleep") as child:
        result = solve_in_child(PROBLEM, "auto", limits, child=child)
    assert result.schedule is not None
    assert result.schedule.method != "floor"


def test_a_published_schedule_that_was_asked_for_is_no_other() -> None:
    """A child that brings nothing in time leaves the parent to make that one, though others are shorter."""
    problem = uniform(4, 8)
    with Child("tests.solver.process.asleep") as child:
        result = solve_in_child(problem, "gpipe", Limits(0.5, workers=1), child=child)
    assert result.schedule is not None
    assert result.schedule.method == "gpipe"
    assert result.schedule.value_us == solve(problem, "gpipe").value_us


def test_nothing_stands_in_for_a_published_schedule_that_does_not_fit() -> None:
    with Child("tests.solver.process.asleep") as child, pytest.raises(MethodError, match="gpipe needs"):
        solve_in_child(uniform(3, 6, budget=3), "gpipe", Limits(0.5, workers=1), child=child)


def test_the_parent_makes_schedules_of_stages_without_a_backward() -> None:
    data = uniform(3, 6, budget=5).to_data()
    none = {"backward_input_us": 0, "backward_weight_us": 0, "backward_weight_bytes": 0, "activation_bytes": 0}
    for stage in data["stages"][:2]:
        stage.update(none, backward="none")
    with Child("tests.solver.process.asleep") as child:
        result = solve_in_child(Problem.from_data(data), "auto", Limits(0.5, workers=1), child=child)
    assert result.schedule is not None
    assert result.schedule.method != "floor"


def test_the_search_of_a_large_problem_ends_earlier_where_its_answer_takes_longer_to_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that takes 0.75 s to verify on a core of its own takes 1.5 s on half a core."""
    hard = uniform(6, 18, budget=4, offload={"bytes": 2, "offload_us": 11, "reload_us": 11})
    limits = Limits(3.0, workers=1)
    monkeypatch.setattr(parent, "VERIFY_S_PER_OP", 0.75 / count_ops(hard))
    monkeypatch.setattr(Child, "kept_waiting_s", property(lambda _: limits.seconds / 2))
    said: list[object] = []
    say = Child.say
    monkeypatch.setattr(Child, "say", lambda child, message: said.append(message) or say(child, message))
    result = solve_in_child(hard, "search", limits)
    assert said[-1] == CANCEL
    assert result.limit == "time"
