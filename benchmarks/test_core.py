"""Run time of the core: 10,000 compute ops, a verdict on p = 32, m = 96, and all steps on p = 64, m = 1024."""

from __future__ import annotations

from typing import Any

import pytest

from instances import instance, uniform
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.build import build_schedule
from solver.published.one_stage import zb_h1
from solver.published.v_family import v_zb
from solver.published.zb_auto import zb_auto
from solver.published.zb_v import zb_v

Benchmark = Any
"""pytest-benchmark's fixture; its own types stop at `pedantic`."""


def test_simulate_10_000_compute_ops(benchmark: Benchmark) -> None:
    problem = uniform(16, 209)  # 10,032 ops
    orders = zb_h1(problem)
    assert benchmark(simulate, problem, orders).makespan_us > 0


def test_simulate_10_000_compute_ops_for_the_device_span(benchmark: Benchmark) -> None:
    problem = uniform(16, 209, objective="device_span")
    orders = zb_h1(problem)
    assert benchmark(simulate, problem, orders).value_us > 0


def test_verify_p32_m96(benchmark: Benchmark) -> None:
    problem = instance("zb-28.3b-p32-m96-mem1")
    schedule = build_schedule(problem, zb_auto(problem), 0.0, "zb-auto", 0.0)
    assert benchmark(verify, schedule).ok


LINEAR, V = uniform(64, 1024, budget=128), uniform(64, 1024, budget=256, v_shape=True)
PUBLISHED = {"zb-h1": (LINEAR, zb_h1), "zb-auto": (LINEAR, zb_auto), "v-zb": (V, v_zb), "zb-v": (V, zb_v)}
LARGE = {"linear": PUBLISHED["zb-h1"], "v": PUBLISHED["v-zb"]}  # 196,608 and 393,216 ops


def large(kind: str) -> tuple[Problem, Orders]:
    problem, published = LARGE[kind]
    return problem, published(problem)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_p64_m1024(benchmark: Benchmark, name: str) -> None:
    problem, method = PUBLISHED[name]
    method(uniform(2, 2, v_shape=problem is V))  # compiled once
    assert benchmark.pedantic(method, (problem,), rounds=3).devices


@pytest.mark.parametrize("kind", LARGE)
def test_finish_p64_m1024(benchmark: Benchmark, kind: str) -> None:
    problem, orders = large(kind)
    assert benchmark.pedantic(build_schedule, (problem, orders, 0.0, kind, 0.0), rounds=3).value_us > 0


@pytest.mark.parametrize("kind", LARGE)
def test_write_and_read_p64_m1024(benchmark: Benchmark, kind: str) -> None:
    schedule = build_schedule(*large(kind), 0.0, kind, 0.0)
    assert benchmark.pedantic(lambda: Schedule.from_json(schedule_text(schedule)), rounds=1) == schedule
