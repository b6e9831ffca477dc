"""How long the core takes: simulation of 10,000 compute ops, and a verdict on p = 32, m = 96."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optpipe.simulate import simulate
from optpipe.verify import verify
from solver.finish import finish
from solver.published.zb_auto import zb_auto
from solver.published.zero_bubble import zb_h1
from tests.problems import instance, uniform

Benchmark = Callable[..., Any]


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
    schedule = finish(problem, zb_auto(problem), 0.0, "zb-auto", 0.0)
    assert benchmark(verify, schedule).ok
