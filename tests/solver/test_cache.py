"""The cache: a problem that was solved is not solved again, and no answer is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instances import HALF, uniform
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver import cache as module
from solver.bounds import lower_bound_us
from solver.build import build_schedule, within_budgets
from solver.cache import Cache, canonical_form
from solver.limits import Limits
from solver.methods import METHODS, published_orders
from solver.solve import solve
from tests.problems import problems
from tests.recomputing import COPY, LEAVES, one_f_one_b, recomputing
from tests.sample import examples


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


@pytest.fixture(scope="module")
def optimal() -> Schedule:
    """With transfers, and proved within a fraction of a second."""
    schedule = solve(uniform(3, 4, budget=4, offload=HALF), "cp-sat", Limits(60, workers=1))
    assert schedule.status == "optimal"
    assert any(device.offload for device in schedule.devices)
    return schedule


def files(cache: Cache) -> list[Path]:
    return sorted(cache.folder.glob("*/*"))


def of_method(problem: Problem, method: str) -> Schedule:
    return build_schedule(problem, published_orders(METHODS[method], problem), 0.0, method, 0.5)


def test_nothing_is_known_at_first(cache: Cache, optimal: Schedule) -> None:
    assert cache.lookup(optimal.problem) is None
    assert cache.neighbours(optimal.problem) == []


def test_the_same_problem_has_the_same_schedule(cache: Cache, optimal: Schedule) -> None:
    cache.store(optimal, "auto", 60)
    found = cache.lookup(optimal.problem)
    assert found is not None
    assert found.schedule == optimal


@pytest.mark.parametrize(("times", "sizes"), [(3, 1), (0.1, 1024), (1000, 7)])
def test_an_equal_problem_has_its_own_units(cache: Cache, optimal: Schedule, times: float, sizes: int) -> None:
    cache.store(optimal, "auto", 60)
    other = Problem.from_data(scaled(optimal.problem.to_data(), times, sizes) | {"name": "other"})
    found = cache.lookup(other)
    assert found is not None
    assert found.schedule.problem == other
    assert found.schedule.status == "optimal"
    assert found.schedule.value_us == pytest.approx(times * optimal.value_us, rel=1e-12)
    assert verify(found.schedule).ok


def test_answers_only_what_asks_for_no_more(cache: Cache, optimal: Schedule) -> None:
    cache.store(optimal, "cp-sat", 60)
    proved = cache.lookup(optimal.problem)
    assert proved is not None
    assert proved.answers("cp-sat", Limits(3600, workers=64))
    assert proved.answers("auto", Limits(3600, workers=64))
    assert not proved.answers("1f1b", Limits(1))
    assert not proved.answers("auto", Limits(1, deterministic_limit=1.0))
    open_problem = uniform(4, 8, budget=8)
    cache.store(of_method(open_problem, "1f1b"), "auto", 60)
    tried = cache.lookup(open_problem)
    assert tried is not None
    assert tried.answers("auto", Limits(30, workers=2))
    assert not tried.answers("auto", Limits(30, workers=3))
    assert not tried.answers("cp-sat", Limits(1, workers=1))
    assert tried.answers("auto", Limits(600, gap=1.0))


def test_the_better_schedule_and_the_higher_bound_stay(cache: Cache) -> None:
    problem = uniform(4, 8, budget=8)
    better, worse = of_method(problem, "zb-auto"), of_method(problem, "1f1b")
    assert better.value_us < worse.value_us
    cache.store(better, "auto", 1)
    cache.store(build_schedule(problem, worse.orders, 200.0, "1f1b", 60), "auto", 60)
    found = cache.lookup(problem)
    assert found is not None
    assert found.schedule.value_us == better.value_us
    assert found.schedule.bound_us == 200
    assert found.cpu_seconds == 1


def test_a_new_format_forgets_all_proofs(
    cache: Cache, optimal: Schedule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a file of the cache nor a row of the service is found under the digests of another format."""
    cache.store(optimal, "auto", 60)
    before = canonical_form(optimal.problem).key, module.text_digest(b"{}")
    monkeypatch.setattr(module, "FORMAT", "cache-0")
    assert Cache(tmp_path).lookup(optimal.problem) is None
    after = canonical_form(optimal.problem).key, module.text_digest(b"{}")
    assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b"", lambda b: b.replace(b"F0.0", b"F0.1", 1)])
def test_a_damaged_file_counts_as_absent(cache: Cache, optimal: Schedule, damage: Callable[[bytes], bytes]) -> None:
    cache.store(optimal, "auto", 60)
    (file,) = files(cache)
    file.write_bytes(damage(file.read_bytes()))
    assert cache.lookup(optimal.problem) is None
    assert cache.neighbours(uniform(3, 5, budget=4, offload=HALF)) == []
    cache.store(optimal, "auto", 60)
    assert cache.lookup(optimal.problem) is not None


def test_orders_that_break_the_rules_are_not_believed(cache: Cache, optimal: Schedule) -> None:
    """Not even with a right checksum: it is the verifier that decides."""
    cache.store(optimal, "auto", 60)
    entry = content(cache)
    entry["orders"]["devices"][0][0] = " ".join(reversed(entry["orders"]["devices"][0][0].split()))
    overwrite(cache, entry)
    assert cache.lookup(optimal.problem) is None


def content(cache: Cache) -> dict[str, Any]:
    """Content of the only file."""
    (file,) = files(cache)
    entry: dict[str, Any] = json.loads(file.read_bytes().partition(b"\n")[2])
    return entry


def overwrite(cache: Cache, entry: object) -> None:
    """Write the only file anew, with a right checksum."""
    (file,) = files(cache)
    body = json.dumps(entry).encode()
    file.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


FIELDS = ("problem", "asked", "worker_s", "method", "solve_seconds", "value", "bound", "orders")


@pytest.mark.parametrize(
    "change",
    [
        *(lambda entry, name=name: entry.pop(name) for name in FIELDS),
        lambda entry: entry.update(unknown=1),
        lambda entry: entry.update(bound="1"),
        lambda entry: entry.update(value=None),
        lambda entry: entry.update(problem={}),
        lambda entry: entry.update(orders={"devices": [[1]]}),
        lambda entry: entry["orders"].update(waits=[]),
    ],
    ids=[*(f"without {name}" for name in FIELDS), "unknown", "text", "null", "no problem", "no orders", "no waits"],
)
def test_an_entry_of_another_shape_counts_as_absent(
    cache: Cache, optimal: Schedule, change: Callable[[dict[str, Any]], object]
) -> None:
    """Such as one that another version has written: its checksum is right."""
    cache.store(optimal, "auto", 60)
    entry = content(cache)
    change(entry)
    overwrite(cache, entry)
    assert cache.lookup(optimal.problem) is None
    assert cache.neighbours(uniform(3, 5, budget=4, offload=HALF)) == []
    cache.store(optimal, "auto", 60)
    assert cache.lookup(optimal.problem) is not None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_no_entry_at_all_counts_as_absent(cache: Cache, optimal: Schedule, body: bytes) -> None:
    cache.store(optimal, "auto", 60)
    (file,) = files(cache)
    file.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert cache.lookup(optimal.problem) is None
    assert cache.neighbours(uniform(3, 5, budget=4, offload=HALF)) == []


def test_a_full_disk_is_no_error_and_leaves_nothing_behind(cache: Cache, optimal: Schedule) -> None:
    """A file that may not grow fails like one on a full disk: when it is written, not when it is made."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        cache.store(optimal, "auto", 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(cache) == []
    cache.store(optimal, "auto", 60)
    assert cache.lookup(optimal.problem) is not None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, optimal: Schedule) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = Cache(tmp_path / "file")
    blocked.store(optimal, "auto", 60)
    assert blocked.lookup(optimal.problem) is None


def test_neighbours_are_valid_starts(cache: Cache) -> None:
    for microbatches in (8, 20):
        cache.store(of_method(uniform(4, microbatches, budget=8), "1f1b"), "auto", 60)
    cache.store(of_method(uniform(4, 12, budget=100), "gpipe"), "auto", 60)
    problem = uniform(4, 12, budget=8)
    found = cache.neighbours(problem)
    assert len(found) == 2  # that of the larger budget needs too much
    for orders in found:
        simulation = simulate(problem, orders)
        assert within_budgets(problem, orders, simulation)
        assert simulation.value_us <= simulate(problem, published_orders(METHODS["1f1b"], problem)).value_us


def test_neighbours_of_a_problem_whose_factors_are_all_1(cache: Cache) -> None:
    for microbatches in (8, 12):
        alike = uniform(4, microbatches, budget=8, microbatch_factors=[{"time": 1}] * microbatches)
        cache.store(of_method(alike, "1f1b"), "auto", 60)
    assert len(cache.neighbours(alike)) == 1


def test_what_is_old_or_too_much_goes(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [uniform(2, m) for m in (2, 3, 4)]
    for age_s, problem in zip((module.MAX_AGE_S + 10, 100.0, 0.0), kept, strict=True):
        cache.store(of_method(problem, "1f1b"), "auto", 1)
        newest = max(files(cache), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (time.time() - age_s,) * 2)
    cache.store(of_method(uniform(2, 5), "1f1b"), "auto", 1)
    assert [cache.lookup(problem) is not None for problem in kept] == [False, True, True]
    monkeypatch.setattr(module, "MAX_BYTES", sum(path.stat().st_size for path in files(cache)))
    cache.store(of_method(uniform(2, 6), "1f1b"), "auto", 1)
    assert len(files(cache)) < 4


WRITER = """
import sys
from pathlib import Path
from solver.cache import Cache
from tests.problems import uniform
from tests.solver.test_cache import of_method

cache = Cache(Path(sys.argv[1]))
schedules = [of_method(uniform(4, m, budget=8), method) for m in (8, 9) for method in ("1f1b", "zb-auto")]
for _ in range(8):
    for schedule in schedules:
        cache.store(schedule, "auto", 1)
        assert cache.lookup(schedule.problem) is not None
"""


def test_several_processes_share_a_folder(cache: Cache, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], env=environment) for _ in range(2)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    found = cache.lookup(uniform(4, 8, budget=8))
    assert found is not None
    assert found.schedule.method == "zb-auto"
    assert len(files(cache)) == 2


BASE = uniform(2, 3, budget=7, offload=HALF, host_memory_bytes=3)

TIMES = ("forward_us", "backward_input_us", "backward_weight_us", "offload_us", "reload_us", "transfer_us")
TIMES_OF_BOUNDARIES = ("forward", "backward")
SIZES = ("memory_bytes", "host_memory_bytes", "activation_bytes", "backward_weight_bytes", "bytes", "F", "B", "W", "BW")


def scaled(data: Any, times: float, sizes: int, name: str = "") -> Any:
    """A document with every time and every size multiplied."""
    if isinstance(data, dict):
        return {key: scaled(value, times, sizes, key) for key, value in data.items()}
    if isinstance(data, list):
        return [scaled(value, times, sizes, name) for value in data]
    if data is not None and name in (*TIMES, *TIMES_OF_BOUNDARIES):
        return data * times
    return data * sizes if data is not None and name in SIZES else data


@settings(max_examples=examples(50))
@given(problems(), st.sampled_from([2, 1000, 0.5]), st.sampled_from([2, 3, 1024]))
def test_common_factors_do_not_matter(problem: Problem, times: float, sizes: int) -> None:
    """By factors with which 0.1 and 2.25 remain what they say."""
    other = Problem.from_data(scaled(problem.to_data(), times, sizes))
    assert canonical_form(other).data == canonical_form(problem).data


@settings(max_examples=examples(50))
@given(problems())
def test_names_and_spelling_do_not_matter(problem: Problem) -> None:
    data = problem.to_data() | {"name": "other", "source": "measured again"}
    boundaries = zip(problem.forward_delay_us, problem.backward_delay_us, strict=True)
    data["transfer_us"] = [{"forward": float(ahead), "backward": back} for ahead, back in boundaries]
    data["devices"] = [device | {"name": f"gpu{d}"} for d, device in enumerate(data["devices"])]
    assert canonical_form(Problem.from_data(data)).key == canonical_form(problem).key


def test_decimal_fractions_are_what_they_say() -> None:
    """0.3 is three times 0.1, although the floats are not."""
    data = BASE.to_data()
    assert canonical_form(Problem.from_data(scaled(data, 0.1, 1) | {"transfer_us": 0.3})).data == (
        canonical_form(Problem.from_data(data | {"transfer_us": 3})).data
    )


def test_budgets_are_rounded_down_to_what_memory_can_be() -> None:
    doubled = scaled(BASE.to_data(), 1, 2)
    doubled["devices"] = [{"memory_bytes": 15}, {"memory_bytes": 14}]
    assert canonical_form(Problem.from_data(doubled)).key == canonical_form(BASE).key
    doubled["devices"] = [{"memory_bytes": 16}, {"memory_bytes": 14}]
    assert canonical_form(Problem.from_data(doubled)).key != canonical_form(BASE).key


@pytest.mark.parametrize(
    "change",
    [
        {"objective": "device_span"},
        {"transfer_us": 2},
        {"host_memory_bytes": None},
        {"copy_channels": {"duplex": False}},
        {"copy_channels": {"shared_by": [[1, 0]]}},
        {"devices": [{"memory_bytes": 7}, {"memory_bytes": None}]},
        {"microbatches": 4},
    ],
)
def test_what_differs_differs(change: dict[str, Any]) -> None:
    assert canonical_form(Problem.from_data(BASE.to_data() | change)).key != canonical_form(BASE).key


def test_a_family_shares_all_but_microbatches_budgets_and_objective() -> None:
    family = canonical_form(BASE).family_key
    data = BASE.to_data()
    assert canonical_form(uniform(2, 9, budget=5, offload=HALF, objective="device_span")).family_key == family
    assert canonical_form(Problem.from_data(data | {"transfer_us": 2})).family_key != family


def test_channels_without_transfers_do_not_matter() -> None:
    plain = uniform(2, 3, copy_channels={"duplex": False}, host_memory_bytes=5)
    assert canonical_form(plain).key == canonical_form(uniform(2, 3)).key


def test_keys_of_problems_without_modes_stay() -> None:
    """Entries of earlier releases with the same `FORMAT` are found: this is the key that they have."""
    problem = uniform(2, 3, budget=5, offload=HALF, host_memory_bytes=4)
    assert canonical_form(problem).key == "cc51f5d5c2cf9d61384e6455109663ed49d22c745efc176a3a6541cb86f7d0f8"
    explicit = problem.to_data()
    explicit["stages"] = [stage | {"modes": [], "split_backward": True} for stage in explicit["stages"]]
    assert canonical_form(Problem.from_data(explicit)).key == canonical_form(problem).key


RECOMPUTED = {"name": "a", "kept_bytes": 4, "recompute_us": 3, "segment_bytes": 6, "offload": COPY}


@pytest.mark.parametrize(
    ("mode", "same"),
    [
        ({"name": "b"}, True),
        ({"forward_workspace_bytes": 6, "workspace_bytes": 0}, True),
        ({"kept_bytes": 5}, False),
        ({"recompute_us": 2}, False),
        ({"forward_workspace_bytes": 0}, False),
        ({"workspace_bytes": 2}, False),
        ({"segment_bytes": 4}, False),
        ({"segment_bytes": None}, False),
        ({"offload": None}, False),
        ({"offload": COPY | {"reload_us": 4}}, False),
    ],
)
def test_modes_are_equal_by_their_costs(mode: dict[str, Any], same: bool) -> None:
    """Names do not count, and what is given as the default does not differ from it."""
    keys = [canonical_form(recomputing(2, 3, [some])).key for some in (RECOMPUTED, RECOMPUTED | mode)]
    assert (keys[0] == keys[1]) is same
    assert canonical_form(recomputing(2, 3, [RECOMPUTED], split_backward=False)).key not in keys
    assert canonical_form(recomputing(2, 3, [])).key not in keys


def test_modes_in_other_units_are_the_same() -> None:
    times = ("forward_us", "backward_input_us", "backward_weight_us")
    data = recomputing(2, 3, [RECOMPUTED], budget=20).to_data()
    doubled = recomputing(2, 3, [scaled_mode(RECOMPUTED)], budget=60, activation_bytes=30).to_data()
    for stage in doubled["stages"]:
        stage |= dict.fromkeys(times, 2)
    assert canonical_form(Problem.from_data(doubled)).key == canonical_form(Problem.from_data(data)).key


def scaled_mode(mode: dict[str, Any]) -> dict[str, Any]:
    """Twice the times and three times the bytes."""
    return {
        name: scaled_mode(value)
        if isinstance(value, dict)
        else value * (3 if "bytes" in name else 2)
        if isinstance(value, int)
        else value
        for name, value in mode.items()
    }


def test_a_schedule_with_modes_comes_back_in_the_names_of_the_problem(cache: Cache) -> None:
    problem = recomputing(2, 4, [RECOMPUTED])
    orders = one_f_one_b(problem, lambda s, i: "C BW" if i % 2 else "BW")
    modes = orders.modes
    assert modes is not None
    copies = [
        DeviceOrders(
            device.compute,
            [Op("O", s, i) for i in range(4) if modes[s, i]],
            [Op("R", s, i) for i in range(4) if modes[s, i]],
        )
        for s, device in enumerate(orders.devices)
    ]
    cache.store(build_schedule(problem, Orders(copies, modes=modes), 0.0, "by hand", 0.0), "auto", 1.0)
    renamed = recomputing(2, 4, [RECOMPUTED | {"name": "other"}])
    found = cache.lookup(renamed)
    assert found is not None
    assert {op.mode for op in found.schedule.devices[0].compute if op.op == "F"} == {None, "other"}


LIGHT = {"name": "light", "kept_bytes": 1, "recompute_us": 1, "forward_workspace_bytes": 0}


@pytest.mark.parametrize("modes", [[], [LIGHT]])
def test_the_pattern_of_few_microbatches_is_a_neighbour_of_many(cache: Cache, modes: list[dict[str, object]]) -> None:
    """It is as near to the bound with 16 times as many: a period does not depend on how many there are."""

    def problem(microbatches: int) -> Problem:
        return recomputing(4, microbatches, modes, 15, backward_weight_bytes=10)

    few = solve(problem(64), "pattern", Limits(float("inf"), workers=1, deterministic_limit=0.3))
    cache.store(few, "pattern", 1)
    many = problem(1024)
    [orders] = cache.neighbours(many)
    simulation = simulate(many, orders)
    assert within_budgets(many, orders, simulation)
    assert simulation.value_us / lower_bound_us(many) <= 1.01 * few.value_us / few.bound_us


def test_no_period_is_repeated_where_there_is_no_time_for_it(cache: Cache) -> None:
    cache.store(solve(recomputing(2, 4, []), "1f1b"), "1f1b", 1.0)
    assert cache.neighbours(recomputing(2, 12, []), allowed_s=0.0) == []
    assert len(cache.neighbours(recomputing(2, 12, []))) == 1
    other_budget = recomputing(2, 4, [], budget=100)
    assert len(cache.neighbours(other_budget, allowed_s=0.0)) == 1  # nothing is repeated for it


def test_schedules_without_modes_are_neighbours_of_problems_with_them(cache: Cache) -> None:
    cache.store(solve(recomputing(2, 4, []), "1f1b"), "1f1b", 1.0)
    [same] = cache.neighbours(recomputing(2, 4, [RECOMPUTED]))
    assert {op.kind for op in same.ops()} == {"F", "BW"}
    [longer] = cache.neighbours(recomputing(2, 12, [RECOMPUTED]))
    assert simulate(recomputing(2, 12), longer).value_us == 13 * 3
    assert cache.neighbours(recomputing(2, 4, [RECOMPUTED], budget=19)) == []


MOST = {"name": "most", "kept_bytes": 4, "recompute_us": 3, "segment_bytes": 6}
OTHER = {"name": "less", "kept_bytes": 3, "recompute_us": 0.5}


@pytest.mark.parametrize("backward", ["C BW", "CBW"])
@pytest.mark.parametrize("microbatches", [4, 9])
def test_schedules_with_other_modes_are_neighbours(cache: Cache, backward: str, microbatches: int) -> None:
    """Each microbatch takes the most similar mode, ahead of the backward where that one cannot recompute inside it."""
    problem = recomputing(2, 4, [MOST])
    cache.store(build_schedule(problem, one_f_one_b(problem, lambda *_: backward), 0.0, "by hand", 0.0), "auto", 1.0)
    inside = recomputing(2, microbatches, [OTHER | {"segment_bytes": 7}], budget=29)
    ahead = recomputing(2, microbatches, [LEAVES, OTHER], budget=29)
    for own, expected in ((inside, backward), (ahead, "C BW")):
        [orders] = cache.neighbours(own)
        assert {op.kind for op in orders.ops()} == {"F", *expected.split()}
        assert verify(build_schedule(own, orders, 0.0, "by hand", 0.0)).ok
    [kept] = cache.neighbours(recomputing(2, microbatches, []))
    assert {op.kind for op in kept.ops()} == {"F", "BW"}
    assert kept.modes is None
