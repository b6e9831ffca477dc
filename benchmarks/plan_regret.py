"""Regret of a planner: of the layouts that somebody ran, how much slower than the best is the one ranked first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from benchmarks.markdown import table
from optpipe.cluster.calibrate import predict
from optpipe.cluster.machine import named_machines
from optpipe.cluster.rows import Row
from optpipe.cluster.strategy import Strategy

LEAST_LAYOUTS = 4

Measured = tuple[Row, float]
"""A row, and its predicted seconds."""


@dataclass(frozen=True)
class Regret:
    """A job that was run in several layouts. `regret`: time of the layout that is ranked first over the best, minus 1.

    `job`: source, model, machine, GPUs, sequence, global batch and precision.
    """

    job: tuple[str, ...]
    layouts: int
    regret: float
    correlation: float


def regrets(steps: Iterable[Measured]) -> list[Regret]:
    """The regret of every job with at least LEAST_LAYOUTS layouts; each layout counts once, with its best time."""
    jobs: dict[tuple[str, ...], dict[Strategy, Measured]] = defaultdict(dict)
    for row, predicted in steps:
        one = row.strategy
        where = row.software.split("/")[0], row.model.name, row.machine, str(one.gpus), str(row.sequence)
        layouts = jobs[*where, str(row.global_batch), one.precision]
        assert row.seconds is not None, "only measured steps are ranked"
        if one not in layouts or row.seconds < (layouts[one][0].seconds or 0):
            layouts[one] = (row, predicted)
    found = []
    for job, layouts in sorted(jobs.items()):
        if len(layouts) >= LEAST_LAYOUTS:
            measured = np.array([row.seconds for row, _ in layouts.values()], dtype=float)
            predicted_s = np.array([predicted for _, predicted in layouts.values()])
            regret = float(measured[predicted_s.argmin()] / measured.min() - 1)
            found.append(Regret(job, len(layouts), regret, float(spearmanr(measured, predicted_s).statistic)))
    return found


def regret_table(fitted: Sequence[Regret], unseen: Sequence[Regret]) -> str:
    """A row for each job, and the means."""
    held = {one.job: one for one in unseen}
    lines = []
    for one in fitted:
        other = held.get(one.job)
        lines.append([*one.job, str(one.layouts), *_figures([one]), *(_figures([other]) if other else ("-", "-"))])
    lines.append(["mean", *[""] * 7, *_figures(fitted), *(_figures(unseen) if unseen else ("-", "-"))])
    head = ["source", "model", "machine", "GPUs", "sequence", "batch", "precision", "layouts"]
    return table([*head, "regret", "rank correlation", "held out: regret", "rank correlation"], lines, 3)


def _figures(some: Sequence[Regret]) -> tuple[str, str]:
    regret, correlation = np.mean([one.regret for one in some]), np.nanmean([one.correlation for one in some])
    return f"{regret:.1%}", f"{correlation:.2f}"


def main() -> None:
    """Print the table for the machines as they ship."""
    from benchmarks.accuracy import FOLDER
    from optpipe.cluster.rows import read_rows

    rows = read_rows(FOLDER / "steps.csv", FOLDER / "models.json")[0]
    machines = named_machines()
    known = [row for row in rows if row.machine in machines and row.seconds is not None]
    print(regret_table(regrets((row, predict(machines[row.machine], row).seconds) for row in known), []))


if __name__ == "__main__":
    main()
