"""Runs as the curves that `optpipe.plot.value_over_time` draws."""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.plot.value_over_time import Curve, InstanceCurves
from solver.regression.run import Case, MeasuredRun

Run = tuple[Case, MeasuredRun]


def build_curves(runs: Sequence[Run]) -> list[InstanceCurves]:
    """One chart for each instance on which some run found a schedule, in the order of the runs."""
    by_instance: dict[str, list[Run]] = {}
    for case, measured in runs:
        if measured.figures is not None:
            by_instance.setdefault(case.instance, []).append((case, measured))
    return [_chart(instance, found) for instance, found in by_instance.items()]


def _chart(instance: str, runs: Sequence[Run]) -> InstanceCurves:
    """The bound is the best that any of the runs proved."""
    case = runs[0][0]
    return InstanceCurves(
        instance,
        case.problem.objective,
        [_curve(case.method, measured) for case, measured in runs],
        max(measured.curve[-1].bound_us for _, measured in runs),
        case.public.value_us if case.public else None,
    )


def _curve(method: str, measured: MeasuredRun) -> Curve:
    figures = measured.figures
    assert figures is not None
    points = [(point.seconds, point.value_us) for point in measured.curve]
    return Curve(method, points, figures.seconds, figures.optimal)
