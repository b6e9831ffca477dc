"""Figures that the page computes itself, against Python's: memory, colours, numbers in words, places in a text."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from matplotlib.colors import to_rgb
from playwright.sync_api import Browser, Page

from instances import instance, uniform
from optpipe import units
from optpipe.kinds import KIND
from optpipe.plot.style import LIGHTEST, ink_on, op_colour
from tests.api.web.modules import address, call
from tests.browser import open_page
from tests.unequal import unequal

NO_BREAK_SPACE = "\u00a0"


@pytest.fixture(scope="module")
def anywhere(browser: Browser, idle_url: str) -> Iterator[Page]:
    """The page of some service; the functions under test ask it for nothing."""
    with open_page(browser, idle_url) as page:
        page.goto("/#/new")
        yield page


CAUSAL = {"count": 2, "factors": {"forward": [1, 2], "bytes": [1, 0.33], "transfer": [1, 0.5]}}


def test_names_of_units(anywhere: Page) -> None:
    """Numbers of microbatch and slice, as in pictures."""
    problem = unequal(1, 3, slices=CAUSAL)
    for unit in range(6):
        assert call(anywhere, "slices.js", "unitName", problem.to_data(), unit) == problem.unit_name(unit)
    assert problem.unit_name(5) == "2/1"
    assert call(anywhere, "slices.js", "unitName", uniform(1, 3).to_data(), 2) == uniform(1, 3).unit_name(2) == "2"


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


@pytest.mark.parametrize("time_us", [0, -3.6e-12, 0.5, 3, 1999, 2000, 18522, 1310405, 1999999, 2e6, 6800885, 3.6e9])
def test_times_in_words(anywhere: Page, time_us: float) -> None:
    expected = units.time_text(time_us, units.time_unit(time_us)).replace(" ", NO_BREAK_SPACE)
    assert call(anywhere, "units.js", "timeText", time_us) == expected


def test_idle_times_in_words(anywhere: Page) -> None:
    for idle_us, unit in (([0, 4, 1 / 3], 1), ([20_000, 1234.5, 26_000], 1000), ([1.31e9, 0.0, 3e8], 1e6)):
        [chosen] = [other for other in units.TIME_UNITS if other.size == unit]
        expected = units.idle_text(idle_us, chosen)
        found = call(anywhere, "units.js", "idleText", idle_us, {"name": chosen.name, "size": chosen.size})
        assert found.replace(NO_BREAK_SPACE, " ") == expected
    assert expected == "1,310 + 0 + 300 s"


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
