"""Layouts: every combination is judged, the best comes first, and the others say why not."""

from __future__ import annotations

import signal
import threading
import time
from importlib import import_module

import pytest

from optpipe.layers import LayerProfile
from optpipe.ops import Orders
from optpipe.placement import name_of_placement, parse_placement, placement
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.build import build_schedule
from solver.layout.candidates import Search, candidates
from solver.layout.ranking import Judged, rank
from solver.layout.why import time_by_kind_us
from solver.limits import Limits
from solver.process import ChildResult
from solver.solve import solve
from tests.layer_profiles import BLOCK, profile, tight_profile

COPIES = {"offload_bytes_per_us": 40, "reload_bytes_per_us": 40}


@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [
        ("linear", 3, (0, 1, 2)),
        ("interleaved-2", 2, (0, 1, 0, 1)),
        ("v", 3, (0, 1, 2, 2, 1, 0)),
        ("v-4", 2, (0, 1, 1, 0, 0, 1, 1, 0)),
    ],
)
def test_placements(name: str, devices: int, expected: tuple[int, ...]) -> None:
    kind, chunks = parse_placement(name)
    assert placement(kind, devices, chunks) == expected
    assert name_of_placement(expected) == name


@pytest.mark.parametrize("name", ["", "w", "interleaved", "interleaved-1", "v-x", "linear-2", "v-999"])
def test_unknown_placements(name: str) -> None:
    with pytest.raises(ValueError, match="Maybe one of linear"):
        parse_placement(name)


def test_every_combination_once() -> None:
    search = Search(2, 8, (1, 2), ("linear", "v"))
    found = list(candidates(profile(8, head=3, copies=COPIES), search))
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    assert len({one.choice for one in found}) == 2 * 2 * 2  # placements, sizes, with and without offload
    assert {one.cut for one in found} >= {"even", "searched"}
    assert {one.sequences for one in found} == {8}


def test_too_few_layers_and_overfull_devices_say_so() -> None:
    found = list(candidates(profile(4, memory_bytes=1500), Search(2, 4, (1,), ("linear", "interleaved-4"))))
    reasons = {one.placement: one.why_not for one in found}
    assert reasons["linear"] == "parameters alone take 2,000 of 1,500 bytes on device 0"
    assert reasons["interleaved-4"] == "4 layers are too few for its stages"
    [one] = rank(candidates(profile(4, memory_bytes=2150), Search(2, 4, (1,), ("linear",), (False,))), Limits(5.0))
    assert one.why_not == "device 0 needs 2,200 of 2,150 bytes: parameters 2,000, one microbatch 200"
    assert one.end == "does_not_fit"


def test_the_best_comes_first_and_the_rest_say_why_not() -> None:
    given = profile(8, head=3, copies=COPIES, memory_bytes=6 * 1000 + 1000)
    judged = rank(candidates(given, Search(2, 8, (1, 2))), Limits(12.0, workers=2))
    values = [one.value_us for one in judged]
    assert values == sorted(values)
    best = judged[0]
    assert best.schedule is not None
    assert verify(best.schedule).ok
    assert best.sequences_per_s == pytest.approx(8e6 / best.value_us)
    for one in judged[1:]:
        assert one.why_not or one.value_us >= best.value_us
        if one.end == "beaten":
            assert one.bound_us >= best.value_us
        else:
            assert one.end == {"": "solved"}.get(one.why_not)
    evens = [one for one in judged if one.candidate.cut == "even" and one.candidate.placement == "linear"]
    assert all(best.value_us < one.value_us for one in evens)  # the heavy head must not sit with half of the blocks


def test_what_a_schedule_takes_adds_up() -> None:
    """F 10, transfer 5, F 20, B 20, transfer 5, B 10, W 10 beside the other W: 80 us, 60 of them the second's work."""
    [one] = rank(candidates(profile(2, head=2, link={"latency_us": 5}), Search(2, 1, (1,), ("linear",))), Limits(3.0))
    assert one.schedule is not None
    assert time_by_kind_us(one.schedule) == {
        "work": 45,
        "hidden": 0,
        "bubble": 10,
        "imbalance": 15,
        "transfers": 10,
        "copies": 0,
        "recomputation": 0,
    }
    layers = [BLOCK | {"repeat": 6, "recomputation": {"kept_bytes": 20}, "parameter_bytes": 0}]
    link, copies = {"latency_us": 5}, {"offload_bytes_per_us": 8, "reload_bytes_per_us": 8}
    given = LayerProfile.from_data(
        {"format": "optpipe.layers/1", "layers": layers, "memory_bytes": 350, "link": link, "copies": copies}
    )
    search = Search(3, 4, (1,), ("linear",), (False, True), modes=("selective",))
    judged = rank(candidates(given, search), Limits(6.0, workers=2))
    seen: set[str] = set()
    for schedule in (one.schedule for one in judged if one.schedule):
        kinds = time_by_kind_us(schedule)
        assert sum(kinds.values()) == pytest.approx(schedule.value_us)
        assert min(kinds.values()) >= -1e-9
        assert kinds["work"] == 4 * 2 * 30
        seen |= {kind for kind, time_us in kinds.items() if time_us > 0}
    assert seen >= {"work", "bubble", "transfers", "recomputation"}


def test_what_blocks_hide_is_a_part_of_what_a_schedule_takes() -> None:
    layers = [BLOCK | {"repeat": 8, "parts": {"forward_us": [4, 2, 2, 2], "backward_us": [8, 2, 8, 2]}}]
    given = LayerProfile.from_data({"format": "optpipe.layers/1", "layers": layers})
    best = rank(candidates(given, Search(2, 8, (1,), ("interleaved-2",))), Limits(3.0))[0].schedule
    assert best is not None
    kinds, blocks = time_by_kind_us(best), len(best.orders.blocks)
    assert (kinds["hidden"], kinds["recomputation"]) == (-blocks * 2 * 8 / 2, 0)  # two layers a stage, 8 us each
    assert blocks > 0
    assert sum(kinds.values()) == pytest.approx(best.value_us)
    assert 0 <= best.bubble_with_recomputation == pytest.approx(best.bubble)


def test_an_interrupt_keeps_what_was_rated() -> None:
    """Ctrl-C as the second candidate has been rated: no other layout is looked at, and nothing is solved any more."""
    limits, told = Limits(60.0, workers=2), []

    def interrupted(one: Judged) -> None:
        told.append(one)
        if len(told) == 2:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while not limits.cancel.requested:
                time.sleep(0.01)

    given = candidates(profile(8, head=3, copies=COPIES), Search(2, 8, (1, 2)), limits)
    judged = rank(given, limits, interrupted)
    assert limits.cancel.requested
    assert {id(one.candidate) for one in judged} == {id(one.candidate) for one in told}
    assert {one.candidate.choice for one in told if one.schedule} <= {one.candidate.choice for one in told[:2]}
    assert not any(one.solved for one in judged)
    assert judged[0].schedule is not None


def test_an_interrupt_while_candidates_are_solved_keeps_what_they_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each solve ends once it is cancelled, with a better schedule; without an interrupt it would last a minute."""
    first, limits = threading.Semaphore(), Limits(200.0, workers=2)

    def solved(problem: Problem, _method: str, limits: Limits, **_: object) -> ChildResult:
        ended = threading.Event()
        with limits.cancel.calling(ended.set):
            if first.acquire(blocking=False):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert ended.wait(60)
        brief = Limits(workers=1, deterministic_limit=0.002)
        return ChildResult(solve(problem, "search", brief), "feasible", "interrupted")

    monkeypatch.setattr(import_module("solver.layout.ranking"), "solve_in_child", solved)
    monkeypatch.setattr(import_module("solver.layout.ranking"), "_with_published", lambda judged, *_: judged)
    judged = rank(candidates(tight_profile(), Search(4, 8, (1,), ("linear", "v"))), limits)
    assert limits.cancel.requested
    assert any(one.solved and one.schedule and one.schedule.method == "search" for one in judged)


def test_the_only_one_that_may_win_has_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of shares would solve it several times, each for less time than `solve` has."""
    given_s: list[float] = []

    def solved(problem: Problem, _method: str, limits: Limits, starts: list[Orders]) -> ChildResult:
        given_s.append(limits.time_limit_s)
        return ChildResult(build_schedule(problem, starts[0], 0.0, "search", 0.0), "feasible", "time")

    ranking = import_module("solver.layout.ranking")
    monkeypatch.setattr(ranking, "solve_in_child", solved)
    monkeypatch.setattr(ranking, "_with_published", lambda judged, *_: judged)
    [one, *_] = candidates(tight_profile(), Search(4, 8, (1,), ("v",)))
    assert rank([one], Limits(200.0, workers=2))[0].solved
    assert given_s[0] > 150


def test_a_schedule_is_found_however_short_the_time_is() -> None:
    """Unequal microbatches have ratings that are no schedules."""
    factors = [{"time": 1.0 + i} for i in range(6)]
    search = Search(3, 6, (1,), ("linear",), factors=factors)
    first, *_ = rank(candidates(profile(12), search, Limits(1e-9)), Limits(1e-9))
    assert first.schedule is not None
    assert verify(first.schedule).ok
