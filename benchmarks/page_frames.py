"""Cost of a frame of the page's chart: `python -m benchmarks.page_frames` prints the table of docs/page.md.

A schedule of 12,288 ops on 32 devices is shown by the page's own modules in Debian's Chromium, without a GPU.
No service is asked: a server has the page and its files alone. Needs Chromium (`make browser`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple, cast

import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Page, ViewportSize, sync_playwright

from api.web.page import mount_page
from benchmarks.markdown import Row, machine, table
from instances import uniform
from solver.solve import solve

DEVICES, MICROBATCHES = 32, 128
FRAMES = 90
VIEWS = (("all ops", 1), ("a quarter of the time", 4), ("a twelfth", 12))
"""Views by name, with their magnification."""
CHROMIUM = "/usr/bin/chromium-headless-shell"
WINDOW: ViewportSize = {"width": 1366, "height": 2400}
"""Viewport that shows all devices with their memory."""

DRAW = """async ([chartUrl, schedule, magnifications, frames]) => {
  const { GanttChart } = await import(chartUrl);
  const host = document.createElement("div");
  document.querySelector("main").replaceChildren(host);
  const nextFrame = window.requestAnimationFrame.bind(window);
  let drawnMs = 0;
  window.requestAnimationFrame = (draw) => nextFrame((now) => {
    const begun = performance.now();
    draw(now);
    drawnMs += performance.now() - begun;
  });
  const chart = new GanttChart(host, { name: "frames" });
  chart.show(schedule);
  const measured = [];
  for (const magnification of magnifications) {
    chart.time.fit();
    chart.time.zoom(magnification, (chart.time.beginUs + chart.time.endUs) / 2);
    await new Promise(nextFrame);
    const drawing = [], between = [];
    let last = await new Promise(nextFrame);
    for (let k = 0; k < frames; k++) {
      drawnMs = 0;
      chart.time.pan(chart.time.spanUs * (k % 2 ? -0.01 : 0.01));
      const now = await new Promise(nextFrame);
      drawing.push(drawnMs);
      between.push(now - last);
      last = now;
    }
    measured.push({ drawing, between });
  }
  return { measured, width: chart.base.width, height: chart.base.height };
}"""


class Frames(NamedTuple):
    """Milliseconds per frame: in the page's own code, and from one frame to the next."""

    drawing: Sequence[float]
    between: Sequence[float]


def measure() -> tuple[Sequence[Frames], tuple[int, int]]:
    """Measured frames of each view, and the size of the canvas in pixels."""
    problem = uniform(DEVICES, MICROBATCHES, budget=2 * DEVICES)
    schedule = solve(problem, "zb-h1").to_data()
    with _served_page() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=WINDOW)
        page.goto(url)
        return _frames(page, schedule)


@contextmanager
def _served_page() -> Iterator[str]:
    """Serve the page and its files in a thread of this process."""
    app = FastAPI()
    mount_page(app)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join()


def _frames(page: Page, schedule: object) -> tuple[Sequence[Frames], tuple[int, int]]:
    icon = page.get_attribute("link[rel=icon]", "href") or ""
    chart = f"{icon.rpartition('/')[0]}/js/gantt/chart.js"
    found = page.evaluate(DRAW, [chart, schedule, [times for _, times in VIEWS], FRAMES])
    frames = [Frames(one["drawing"], one["between"]) for one in found["measured"]]
    return frames, (cast(int, found["width"]), cast(int, found["height"]))


def main() -> None:
    """Measure, and print the table with a description of the machine."""
    frames, (width, height) = measure()
    rows: list[Row] = [
        (name, f"{median(one.drawing):.1f}", f"{median(one.between):.1f}")
        for (name, _), one in zip(VIEWS, frames, strict=True)
    ]
    print(table(("in view", "drawing, median ms", "from frame to frame, median ms"), rows, 1))
    ops = 3 * DEVICES * MICROBATCHES
    print(f"\n{ops:,} ops on {DEVICES} devices, {FRAMES} frames each, on a canvas of {width:,} x {height:,} pixels.")
    print(f"`python -m benchmarks.page_frames`: {machine()}, Chromium without a GPU.")


if __name__ == "__main__":
    main()
