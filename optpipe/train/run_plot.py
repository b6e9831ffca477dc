"""A run as one picture: loss, tokens a second and step time over the steps, with the events of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from optpipe.files import write_atomically
from optpipe.kinds import KIND
from optpipe.plot.figure import AxesGrid, encode, format_of, settings, style
from optpipe.plot.style import BUDGET, FAINT_INK
from optpipe.train.result import RunFacts, StepReport, TrainingCallback
from optpipe.units import time_text, time_unit

HEIGHT_INCHES = 2.2
SWAPS = ("swapped", "back")
SWAP_COLOUR, ROLL_BACK_COLOUR = KIND["W"].colour, BUDGET
LOSS_COLOUR, SPEED_COLOUR, TIME_COLOUR = (KIND[kind].colour for kind in ("F", "BW", "O"))
MANY_STEPS = 50
"""From this many steps on, single steps are a thin line and a running median is the strong one."""
WINDOWS = 40
"""Windows of that median that fit side by side into the chart."""
MEDIANS = 1000
"""Most medians to compute, about as many as the chart has pixels."""
MARKED_STEPS = 25
"""Up to this many steps have a dot each."""


class RunPlot(TrainingCallback):
    """Collects the steps of a run, and draws them at the end to a .png, .svg, .pdf or .html file."""

    def __init__(self, path: Path) -> None:
        self._path, self._title = path, ""
        self._format = format_of(path)
        self._steps: list[StepReport] = []

    def begin(self, run: RunFacts, /) -> None:
        """Take the name of the model as the title."""
        self._title = run.model

    def step(self, report: StepReport, /) -> None:
        """Keep a step."""
        self._steps.append(report)

    def end(self, _error: BaseException | None = None, /) -> None:
        """Write the picture; nothing if no step was done."""
        if self._steps:
            with settings():
                write_atomically(
                    self._path, encode(run_grid(self._steps, self._title).figure, self._format, self._title)
                )


def run_grid(steps: Sequence[StepReport], title: str) -> AxesGrid:
    """Picture on its figure; call within `optpipe.plot.figure.settings`."""
    grid = AxesGrid.of(3, HEIGHT_INCHES)
    loss, speed, seconds = grid.axes
    _draw(loss, steps, [s.loss for s in steps], LOSS_COLOUR)
    style(loss, "Loss", f"{steps[0].loss:.4g} at step {steps[0].step}   ·   {steps[-1].loss:.4g} at the last")
    _draw(speed, steps, [s.tokens_per_second for s in steps], SPEED_COLOUR)
    _from_zero(speed)
    style(speed, "Tokens a second", f"median {median(s.tokens_per_second for s in steps):,.0f}")
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _draw_seconds(seconds, steps)
    for axes in grid.axes:
        _mark(axes, steps)
        axes.set_xlabel("step", color=FAINT_INK, fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    grid.draw_header(title, _legend(steps))
    return grid


def _draw_seconds(axes: Axes, steps: Sequence[StepReport]) -> None:
    unit = time_unit(1e6 * median(s.seconds for s in steps))
    _draw(axes, steps, [1e6 * s.seconds / unit.size for s in steps], TIME_COLOUR)
    waited = [s.bubble for s in steps if s.bubble is not None]
    bubble = f"   ·   device 0 waits {100 * median(waited):.0f} %" if waited else ""
    style(axes, "Step time", f"median {time_text(1e6 * median(s.seconds for s in steps), unit)}{bubble}")
    _from_zero(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g} {unit.name}"))


def _draw(axes: Axes, steps: Sequence[StepReport], values: Sequence[float], colour: str) -> None:
    """Draw every step and, if there are many, a running median."""
    numbers = [s.step for s in steps]
    if len(steps) < MANY_STEPS:
        axes.plot(numbers, values, color=colour, linewidth=1.8, marker="o" if len(steps) <= MARKED_STEPS else "")
        axes.lines[-1].set_markersize(3.5)
        return
    reach = _window(steps) // 2
    chosen = sorted({*range(0, len(values), math.ceil(len(values) / MEDIANS)), len(values) - 1})
    smooth = [_median(values[max(0, k - reach) : k + reach + 1]) for k in chosen]
    axes.plot(numbers, values, color=colour, linewidth=0.8, alpha=0.4)
    axes.plot([numbers[k] for k in chosen], smooth, color=colour, linewidth=1.8)


def _median(values: Sequence[float]) -> float:
    """Median of the finite values: the loss of a skipped step may be NaN."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _from_zero(axes: Axes) -> None:
    """The y axis starts at zero, so that heights can be compared."""
    axes.set_ylim(0, 1.05 * axes.dataLim.ymax)


def _window(steps: Sequence[StepReport]) -> int:
    """Number of steps in the window of a median, odd."""
    return max(2, len(steps) // WINDOWS) // 2 * 2 + 1


def _mark(axes: Axes, steps: Sequence[StepReport]) -> None:
    """Draw a line at each switch of schedules and a mark at each update that was rolled back."""
    for step in _swaps(steps):
        axes.axvline(step, color=SWAP_COLOUR, linewidth=1.2, linestyle=(0, (4, 2)))
    undone = [s.step for s in steps if s.rolled_back]
    axes.plot(undone, [0.02] * len(undone), transform=axes.get_xaxis_transform(), **_ROLL_BACK)  # type: ignore[arg-type]


_ROLL_BACK = {"color": ROLL_BACK_COLOUR, "marker": "^", "markersize": 4.5, "linestyle": ""}


def _swaps(steps: Sequence[StepReport]) -> list[int]:
    return [event.step for s in steps for event in s.events if event.kind in SWAPS]


def _legend(steps: Sequence[StepReport]) -> list[Artist]:
    many = len(steps) >= MANY_STEPS
    width, alpha = (0.8, 0.5) if many else (1.8, 1.0)
    entries: list[Artist] = [Line2D([], [], color=FAINT_INK, linewidth=width, alpha=alpha, label="each step")]
    if many:
        entries.append(Line2D([], [], color=FAINT_INK, linewidth=1.8, label=f"median of {_window(steps)} steps"))
    if _swaps(steps):
        entries.append(Line2D([], [], color=SWAP_COLOUR, linewidth=1.2, linestyle=(0, (4, 2)), label="new schedule"))
    if any(s.rolled_back for s in steps):
        entries.append(Line2D([], [], label="update undone", **_ROLL_BACK))  # type: ignore[arg-type]
    return entries
