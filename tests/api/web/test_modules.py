"""Figures that the page computes itself, against Python's: memory, colours, numbers in words, places in a text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from playwright.sync_api import Browser, Page

from instances import instance, uniform
from optpipe import units
from optpipe.kinds import KIND
from optpipe.memory import planned_memory
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.plot.style import LIGHTEST, ink_on, op_colour
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.build import build_schedule
from solver.solve import solve
from tests.api.web.modules import address, call
from tests.browser import open_page
from tests.recomputing import FULL, LEAVES, one_f_one_b, recomputing
from tests.sample import some
from tests.unequal import random_orders, random_unequal, unequal

NO_BREAK_SPACE = "\u00a0"


@pytest.fixture(scope="module")
def anywhere(browser: Browser, idle_url: str) -> Iterator[Page]:
    """The page of some service; the functions under test ask it for nothing."""
    with open_page(browser, idle_url) as page:
        page.goto("/#/new")
        yield page


CAUSAL = {"count": 2, "factors": {"forward": [1, 2], "bytes": [1, 0.33], "transfer": [1, 0.5]}}
CURVES = {
    "offload": (uniform(3, 6, budget=5, offload={"bytes": 2, "offload_us": 7, "reload_us": 9}), "ada-offload"),
    "fused backward": (uniform(4, 6), "1f1b"),
    "more after B than before": (uniform(2, 4, activation_bytes=2, backward_weight_bytes=3), "zb-h1"),
    "two stages a device": (uniform(2, 4, v_shape=True), "v-zb"),
    "slices": (
        unequal(
            2,
            2,
            microbatch_factors=[{"bytes": 1.1, "transfer": 2}, {}],
            slices=CAUSAL,
            slice_gradient_bytes=3,
            activation_bytes=100,
            transfer_us=1,
            workspace_bytes={"F": 7, "BW": 3},
        ),
        "seq1f1b",
    ),
    "measured": (instance("zb-1.5b-p8-m24-mem1"), "zb-auto"),
}


@pytest.mark.parametrize(("problem", "method"), CURVES.values(), ids=CURVES.keys())
def test_memory_over_time(anywhere: Page, problem: Problem, method: str) -> None:
    _same_memory(anywhere, solve(problem, method))


CHAIN = """async ([url, modelUrl, schedule]) => {
  const {Dependencies} = await import(url);
  const {buildModel} = await import(modelUrl);
  const dependencies = new Dependencies(buildModel(schedule));
  const path = dependencies.criticalPath();
  return path.map((spot) => {
    const {op, start_us, end_us} = dependencies.op(spot);
    return [op, start_us, end_us, dependencies.bindingCause(spot)?.earliestUs ?? null];
  });
}"""


@pytest.mark.parametrize(("problem", "method"), CURVES.values(), ids=CURVES.keys())
@pytest.mark.parametrize("objective", ["makespan", "device_span"])
def test_the_critical_path_has_no_slack(anywhere: Page, problem: Problem, method: str, objective: str) -> None:
    _no_slack(anywhere, solve(problem.model_copy(update={"objective": objective}), method))


def _no_slack(page: Page, schedule: Schedule) -> None:
    urls = [address(page, f"gantt/{module}.js") for module in ("dependencies", "model")]
    path = page.evaluate(CHAIN, [*urls, schedule.to_data()])
    computes = [device.compute for device in schedule.devices]
    first, last = path[0], path[-1]
    assert first[1] == min(ops[0].start_us for ops in computes)
    spans = [
        ops[-1].end_us - (ops[0].start_us if schedule.objective == "device_span" else first[1]) for ops in computes
    ]
    assert max(spans) == pytest.approx(schedule.value_us)
    assert last[2] == computes[spans.index(max(spans))][-1].end_us
    for before, (_, start_us, _, earliest_us) in itertools.pairwise(path):
        assert earliest_us == pytest.approx(start_us)
        assert before[2] <= start_us


FORMS = ("C BW", "CBW", "B W", "C B W", "CB W")
"""Backwards of the microbatches of a stage, in turn; the third keeps its activation."""


@pytest.mark.parametrize("mode", [FULL, LEAVES], ids=["recomputed", "recomputed and offloaded"])
def test_schedules_with_activation_modes(anywhere: Page, mode: dict[str, Any]) -> None:
    workspace = {"F": 1, "B": 2, "W": 1, "BW": 3}
    problem = recomputing(3, 7, (mode,), backward_weight_bytes=4, workspace_bytes=workspace)
    orders = one_f_one_b(problem, lambda s, i: FORMS[(s + i) % len(FORMS)])
    if "offload" in mode:
        copied = [[i for i in range(7) if "C" in FORMS[(s + i) % len(FORMS)]] for s in range(3)]
        devices = [
            DeviceOrders(list(device.compute), *([Op(kind, s, i) for i in copied[s]] for kind in "OR"))
            for s, device in enumerate(orders.devices)
        ]
        orders = Orders(devices, modes=orders.modes)
    schedule = build_schedule(problem, orders, 0.0, "1f1b", 0.0)
    _same_memory(anywhere, schedule)
    _no_slack(anywhere, schedule)


@pytest.mark.parametrize("seed", some(range(10)))
def test_memory_of_random_units(anywhere: Page, seed: int) -> None:
    """Slices, factors, modes and copies at once, and no op on the critical path has slack."""
    rng = Random(seed)
    problem = Problem.from_data(random_unequal(rng))
    orders, _, _ = random_orders(problem, rng)
    _same_memory(anywhere, build_schedule(problem, orders, 0.0, "random", 0.0))


def test_names_of_units(anywhere: Page) -> None:
    """Numbers of microbatch and slice, as in pictures."""
    problem = unequal(1, 3, slices=CAUSAL)
    for unit in range(6):
        assert call(anywhere, "slices.js", "unitName", problem.to_data(), unit) == problem.unit_name(unit)
    assert problem.unit_name(5) == "2/1"
    assert call(anywhere, "slices.js", "unitName", uniform(1, 3).to_data(), 2) == uniform(1, 3).unit_name(2) == "2"


def test_memory_with_workspace(anywhere: Page) -> None:
    data = uniform(2, 3).to_data()
    for stage in data["stages"]:
        stage["workspace_bytes"] = {"F": 5, "B": 3, "W": 1, "BW": 4}
    for method in ("1f1b", "zb-h1"):
        _same_memory(anywhere, solve(Problem.from_data(data), method))


def _same_memory(page: Page, schedule: Schedule) -> None:
    for device in range(len(schedule.devices)):
        expected = planned_memory(schedule, device)
        curve = call(page, "memory.js", "plannedMemory", schedule.to_data(), device)
        drawn = dict(zip(_values(curve["timesUs"]), _values(curve["bytes"]), strict=True))
        levels = dict(zip(expected.times_us.tolist(), expected.bytes.tolist(), strict=True))
        # The page leaves out instants at which nothing changes.
        assert drawn == {time: levels[time] for time in drawn}
        assert max(drawn.values()) == schedule.devices[device].peak_bytes
        assert list(drawn) == sorted(drawn)


def _values(typed_array: object) -> list[float]:
    """A typed array, which playwright hands over as an object of indices or as a list."""
    return list(typed_array.values()) if isinstance(typed_array, dict) else list(typed_array)  # type: ignore[call-overload]


def test_colours(anywhere: Page) -> None:
    theme = {"kinds": {kind: to_rgb(look.colour) for kind, look in KIND.items()}, "lightest": LIGHTEST}
    for kind in KIND:
        for stages in (1, 2, 5):
            for rank in range(stages):
                expected = op_colour(kind, rank, stages)
                colour = call(anywhere, "palette.js", "opColour", theme, kind, rank, stages)
                assert colour == pytest.approx(expected)
                ink = {"white": "#fff", "black": "#000"}[ink_on(expected)]
                assert call(anywhere, "palette.js", "inkOn", colour) == ink


@pytest.mark.parametrize("time_us", [0, 0.5, 3, 1999, 2000, 18522, 1310405, 1999999, 2e6, 6800885, 3.6e9])
def test_times_in_words(anywhere: Page, time_us: float) -> None:
    expected = units.time_text(time_us, units.time_unit(time_us)).replace(" ", NO_BREAK_SPACE)
    assert call(anywhere, "units.js", "timeText", time_us) == expected


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 24000, 1609728, 6442450944, 2**43])
def test_sizes_in_words(anywhere: Page, size: int) -> None:
    expected = units.bytes_text(size, units.memory_unit(size)).replace(" ", NO_BREAK_SPACE)
    assert call(anywhere, "units.js", "bytesText", size) == expected


@pytest.mark.parametrize("share", [0, 0.00001, 0.0004, 0.0099, 0.01, 0.172, 1])
def test_shares_in_words(anywhere: Page, share: float) -> None:
    assert call(anywhere, "units.js", "percentText", share) == units.percent_text(share).replace(" ", NO_BREAK_SPACE)


@pytest.mark.parametrize(("text", "most"), [("gpu0", 90), ("node-17.rack-4.example.org", 90), ("wwww", 1)])
def test_names_are_cut_to_their_room(anywhere: Page, text: str, most: int) -> None:
    measured = """async ([url, text, most]) => {
      const {fitted} = await import(url);
      const context = document.createElement('canvas').getContext('2d');
      context.font = '600 13px sans-serif';
      const shown = fitted(context, text, most);
      return [shown, context.measureText(shown).width];
    }"""
    shown, width = anywhere.evaluate(measured, [address(anywhere, "gantt/labels.js"), text, most])
    head, _, tail = shown.partition("…")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert width <= most or len(shown) == 2
    assert (shown == text) == (text == "gpu0")


@pytest.mark.parametrize(
    ("seconds", "marks"),
    [
        ([0.97, 19.4, 19.7], ["0.5 s", "1 s", "2 s", "5 s", "10 s"]),
        ([0.0, 300.0], ["0.01 s", "0.1 s", "1 s", "10 s", "100 s"]),
        ([30.0], ["10 s", "20 s"]),
        ([0.002], ["0.01 s", "0.02 s", "0.05 s", "0.1 s"]),
        ([0.4, 3600.0], ["1 s", "10 s", "100 s", "1000 s"]),
    ],
)
def test_the_curve_begins_before_its_first_point(anywhere: Page, seconds: list[float], marks: list[str]) -> None:
    draw = """async ([url, seconds]) => {
        const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
        svg.setAttribute("width", "640");
        document.body.append(svg);
        const points = seconds.map((at, k) => ({seconds: at, valueUs: 9 - k, boundUs: 1, method: "search"}));
        (await import(url)).drawCurve(svg, points, 0, true);
        svg.remove();
        const marks = [...svg.querySelectorAll("text[text-anchor=middle]")].map((text) => text.textContent);
        const places = [...svg.querySelectorAll("circle")].map((dot) => Number(dot.getAttribute("cx")));
        return [marks, Number(svg.querySelector(".curve-method").getAttribute("x")), ...places];
    }"""
    found, name, *places = anywhere.evaluate(draw, [address(anywhere, "curve.js"), seconds])
    assert found == marks
    assert name > places[0] or len(seconds) == 1, "the name is beside the line, not on it"
    assert places == sorted(places)
    assert places[0] < 640 / 2 or len(seconds) == 1


def test_places_in_a_text(anywhere: Page) -> None:
    value = {"a/b": [1, {"~": 'x]"}'}, [], [[2], 3.5e1]], "last": None}
    for text in (json.dumps(value), json.dumps(value, indent=3)):
        for pointer, expected in (
            ("", value),
            ("/a~1b/0", 1),
            ("/a~1b/1/~0", 'x]"}'),
            ("/a~1b/3/0", [2]),
            ("/a~1b/3/1", 35),
            ("/last", None),
            ("/a~1b/2/7", []),
            ("/last/missing", None),
        ):
            span = call(anywhere, "form/json_span.js", "findSpan", text, pointer)
            assert json.loads(text[span["start"] : span["end"]]) == expected, pointer


def test_a_problem_as_text_is_that_problem(anywhere: Page) -> None:
    data = instance("d-p4-m8-o1-mo1-b1o2-linear-make").to_data() | {"name": 'quotes " and \\'}
    text = call(anywhere, "form/document.js", "problemText", data)
    assert json.loads(text) == data
    assert max(map(len, text.splitlines())) < 250
