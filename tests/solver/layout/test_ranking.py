"""Layouts: every combination is judged, the best comes first, and the others say why not."""

from __future__ import annotations

import signal
import threading
import time
from importlib import import_module

import pytest

from instances.drawn_models import drawn_model
from optpipe.layers import LayerProfile
from optpipe.ops import Orders
from optpipe.placement import name_of_placement, parse_placement, placement
from optpipe.problem import Problem
from optpipe.verify import verify
from solver.build import build_schedule
from solver.by_stage import drop_needless
from solver.layout.candidates import Search, candidates
from solver.layout.ranking import Judged, rank
from solver.layout.why import time_by_kind_us
from solver.limits import Limits
from solver.process import ChildResult
from solver.solve import solve
from tests.layer_profiles import BLOCK, profile, tight_profile
from tests.sample import some

pytestmark = pytest.mark.usefixtures("forked_children")

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
    assert reasons["linear"] == "on device 0 parameters alone take 1.95 KiB of 1.46 KiB, 500 B too few"
    assert reasons["interleaved-4"] == "4 layers are too few for its stages"
    [one] = rank(candidates(profile(4, memory_bytes=2150), Search(2, 4, (1,), ("linear",), (False,))), Limits(2.0))
    assert one.why_not == "device 0 needs 2.15 KiB of 2.10 KiB, 50 B too few: parameters 1.95 KiB, one microbatch 200 B"
    assert one.end == "does_not_fit"


def test_the_best_comes_first_and_the_rest_say_why_not() -> None:
    given = profile(8, head=3, copies=COPIES, memory_bytes=6 * 1000 + 1000)
    judged = rank(candidates(given, Search(2, 8, (1, 2))), Limits(4.0, workers=2))
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
    [one] = rank(candidates(profile(2, head=2, link={"latency_us": 5}), Search(2, 1, (1,), ("linear",))), Limits(1.0))
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
    judged = rank(candidates(given, search), Limits(3.0, workers=2))
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
    best = rank(candidates(given, Search(2, 8, (1,), ("interleaved-2",))), Limits(1.0))[0].schedule
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


def test_a_short_time_suffices_for_many_small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is tight, quick schedules promise little of the best cut: one problem a round would miss it."""

    def solved(problem: Problem, _method: str, _limits: Limits, starts: list[Orders]) -> ChildResult:
        return ChildResult(build_schedule(problem, starts[0], 0.0, "search", 0.0), "feasible", "time")

    ranking = import_module("solver.layout.ranking")
    monkeypatch.setattr(ranking, "solve_in_child", solved)
    every = candidates(tight_profile(), Search(4, 8, (1,), ("linear", "v")))
    rated = [ranking._rate(one, Limits(200.0)) for one in every]
    judged = ranking._round(rated, ranking.FIRST_ROUND, Limits(20.0, workers=2), 0.25, lambda _: None)
    assert sum(one.solved for one in judged) > 3


def test_what_a_round_had_no_time_for_comes_first_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are solved in the first round, three others in the second, and the most promising of all in the last."""

    def solved(problem: Problem, _method: str, _limits: Limits, starts: list[Orders]) -> ChildResult:
        rounds[-1].append(problem)
        return ChildResult(build_schedule(problem, starts[0], 0.0, "search", 0.0), "feasible", "time")

    ranking = import_module("solver.layout.ranking")
    monkeypatch.setattr(ranking, "solve_in_child", solved)
    every = candidates(tight_profile(), Search(4, 8, (1,), ("linear", "v")))
    judged = [ranking._rate(one, Limits(200.0)) for one in every]
    best_us = min(one.value_us for one in judged)
    promising = [
        one.candidate.problem for one in sorted(judged, key=ranking._promise) if ranking._may_win(one, best_us)
    ]
    rounds: list[list[Problem]] = []
    for count, seconds in ((9, 12.0), (3, 24.0), (1, 24.0)):
        rounds.append([])
        judged = ranking._round(judged, count, Limits(seconds, workers=2), 0.25, lambda _: None)
    assert [len(problems) for problems in rounds] == [2, 3, 1]
    for problems, expected in zip(rounds, (promising[:2], promising[2:5], promising[:1]), strict=True):
        assert sorted(map(id, problems)) == sorted(map(id, expected))


def test_a_round_ends_with_the_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a search finds for the last of them what beats all others."""
    ranking = import_module("solver.layout.ranking")
    every = candidates(tight_profile(), Search(4, 8, (1,), ("linear", "v")))
    rated = [ranking.with_schedule(ranking._rate(one, Limits(200.0))) for one in every]
    last = max((one for one in rated if one.schedule), key=lambda one: one.value_us)

    def solved(problem: Problem, _method: str, _limits: Limits, starts: list[Orders]) -> ChildResult:
        schedule = build_schedule(problem, starts[0], 0.0, "search", 0.0)
        if problem == last.candidate.problem:
            schedule = schedule.replaced(value_us=last.bound_us / 2)
        return ChildResult(schedule, "feasible", "time")

    monkeypatch.setattr(ranking, "solve_in_child", solved)
    monkeypatch.setattr(ranking, "_may_win", lambda *_: True)
    judged = ranking._round(rated, len(rated), Limits(200.0, workers=2), 0.9, lambda _: None)
    assert judged[0].candidate is last.candidate
    assert [one.value_us for one in judged] == sorted(one.value_us for one in judged)


@pytest.mark.parametrize(
    ("seed", "least_us"), some([pytest.param(95, 92_567, id="blocks"), pytest.param(24, 69_294, id="passes")])
)
def test_annealing_comes_before_any_solve(seed: int, least_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tight memory, where quick schedules of the best cut are 7 and 4 % longer than it takes: nothing is solved here.

    With blocks the least is that of all cuts, each solved by `auto`; with passes it is the bound of all cuts.
    """
    ranking = import_module("solver.layout.ranking")
    monkeypatch.setattr(ranking, "ROUNDS", ())
    given, places, microbatches = drawn_model(seed)
    search = Search(max(places) + 1, microbatches, (1,), (name_of_placement(places),))
    best = rank(candidates(given, search), Limits(1e6))[0]
    assert best.schedule is not None
    assert not best.solved
    assert least_us * (1 - 1e-5) <= best.value_us <= 1.01 * least_us


@pytest.mark.parametrize("small", [True, False])
def test_small_problems_are_annealed_however_busy_the_machine_is(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for ratings is over, that for all else is not."""
    ranking = import_module("solver.layout.ranking")
    given, places, microbatches = drawn_model(95)
    search = Search(max(places) + 1, microbatches, (1,), (name_of_placement(places),))
    rated = [ranking._rate(one, Limits(1e6)) for one in candidates(given, search)]
    monkeypatch.setattr(ranking, "late", lambda _limits, share: share < ranking.LAST_SHARE)
    monkeypatch.setattr(ranking, "GOOD_OPS", 1000 if small else 0)
    judged = ranking._with_published(rated, Limits(1e6), lambda _: None)
    assert any(one.schedule and one.schedule.method == "search" for one in judged) == small


def test_a_schedule_is_found_however_short_the_time_is() -> None:
    """Unequal microbatches have ratings that are no schedules."""
    factors = [{"time": 1.0 + i} for i in range(6)]
    search = Search(3, 6, (1,), ("linear",), factors=factors)
    first, *_ = rank(candidates(profile(12), search, Limits(1e-9)), Limits(1e-9))
    assert first.schedule is not None
    assert verify(first.schedule).ok


def test_a_plan_without_time_offloads_nothing_that_gains_nothing() -> None:
    """The quick schedule of these layers offloads 6 activations, 5 of them without need."""
    times = ("forward_us", "backward_input_us", "backward_weight_us")
    sizes = ("activation_bytes", "backward_weight_bytes", "offload_bytes")
    rows = [(3, 2, 3, 3, 3, 2), (5, 3, 3, 1, 0, 1), (5, 1, 1, 1, 1, 1), (3, 4, 1, 1, 0, 1)]
    layers = [dict(zip((*times, *sizes), row, strict=True)) for row in rows]
    copies = {"offload_bytes_per_us": 1, "reload_bytes_per_us": 1}
    profile = LayerProfile.from_data(
        {"format": "optpipe.layers/1", "layers": layers, "memory_bytes": 20, "copies": copies}
    )
    limits = Limits(0.0, workers=1)
    schedule = rank(candidates(profile, Search(2, 6, [1], ["linear"], [True]), limits), limits)[0].schedule
    assert schedule is not None
    assert schedule.method == "ada-offload"
    assert drop_needless(schedule.problem, schedule.orders) is schedule.orders
    assert any(device.offload for device in schedule.devices)
