"""Efficiencies of a machine from measured steps, and how far predictions are from them.

A step's work by kind (`optpipe.cluster.costs`) times slowdowns is its time. The slowdowns that are nearest to the
measured times, in relative terms and robust to outliers, are found by non-negative least squares, drawn towards what is
known before: rows say little about kinds of work that are a small part of their steps. So a precision is drawn towards
the defaults, or what the machine had before, and each group of rows towards its precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from optpipe.cluster.costs import CostModel, Work, work
from optpipe.cluster.machine import FEATURES, Efficiencies, Facts, Machine
from optpipe.cluster.memory import Held, MemoryModel
from optpipe.cluster.rows import Row, Skipped
from optpipe.cluster.software import Software, software_of
from optpipe.cluster.strategy import Precision, Strategy
from optpipe.errors import InputError, Issue

ROUNDS = 20
OUTLIER = 0.03
"""Relative error from which a row counts less the farther it is."""
LEAST_SLOWDOWN = 0.01
LEAST = work(
    products=1,
    attention=1,
    experts=1,
    memory=0.5,
    tensor=0.2,
    expert=0.3,
    context=0.1,
    pipeline=0.2,
    data=0.05,
    gather=0.5,
    optimizer=0.5,
    launch=5e-6,
)
"""No product is faster than its peak, and of other work at most so much is fused or hides behind compute: without a
floor a fit takes kinds that its rows hardly tell apart for free, and a plan would then use them without end."""
MACHINE_SPREAD, PRECISION_SPREAD, GROUP_SPREAD, VARIANT_SPREAD = 2.0, 1.0, 1.0, 0.5
"""Relative distance at which a slowdown is as surprising as a row at the error OUTLIER: from the defaults, from the
machine's 16 bits, from all software, from the group."""
LEAST_VARIANT_ROWS = 3
"""Rows from which a variant of a group's software has a fit of its own."""
MOST_ERROR = 0.3
"""Median error of a fit from which it is refused."""
Key = tuple[str, Precision]
"""Software, empty where it is any, and precision."""


@dataclass(frozen=True)
class Prediction:
    """A row and its predicted seconds."""

    row: Row
    seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        assert self.row.seconds is not None
        return self.seconds / self.row.seconds - 1


def facts_of(machine: Machine, row: Row) -> Facts:
    """Facts of the machine, with smaller nodes where a row says so and there is no larger NVLink domain."""
    known = machine.facts
    if row.gpus_per_node and row.gpus_per_node < known.gpus_per_node <= 8:
        return known.model_copy(update={"gpus_per_node": row.gpus_per_node})
    return known


def work_of(machine: Machine, row: Row, slowdowns: Work) -> Work:
    """Work of a step on its critical path."""
    return CostModel(row.model, facts_of(machine, row), row.strategy, row.sequence).step(row.global_batch, slowdowns)


def predict(machine: Machine, row: Row) -> Prediction:
    """Predict a step with the machine's efficiencies for the row's precision and software."""
    slowdowns = machine.efficiencies_of(row.strategy.precision, row.software).slowdowns
    return Prediction(row, float(work_of(machine, row, slowdowns) @ slowdowns))


@dataclass(frozen=True)
class Memory:
    """Predicted memory of a row: the rank that needs most."""

    held: Held
    software: Software
    capacity_bytes: int

    @property
    def reserved_bytes(self) -> float:
        """Bytes that the allocator reserves."""
        return self.held.total * self.software.reserved

    @property
    def fits(self) -> bool:
        """True if the device has room, in addition to what the driver and communicators take."""
        return self.reserved_bytes + self.software.context_bytes <= self.capacity_bytes


def memory_of(machine: Machine, row: Row) -> Memory:
    """Predict the memory of a row's fullest rank. A row that does not say what it recomputes recomputes nothing, unless
    it has no room for that and its recipes may."""
    software = software_of(row.software)
    if row.cells.get("grad_dtype") in ("bf16", "fp16"):
        software = replace(software, gradient_bytes=2)
    stated = _memory(machine, row, row.strategy, software)
    if row.cells.get("recompute") or stated.fits or not software.recipes_recompute:
        return stated
    return _memory(machine, row, replace(row.strategy, recompute="full"), software)


def _memory(machine: Machine, row: Row, strategy: Strategy, software: Software) -> Memory:
    microbatches = strategy.microbatches(row.global_batch)
    ranks = MemoryModel(row.model, strategy, row.sequence, microbatches, software).devices()
    return Memory(max(ranks, key=lambda held: held.total), software, machine.facts.memory_bytes)


def split_rows(machine: Machine, rows: Sequence[Row]) -> tuple[list[Row], list[Skipped]]:
    """Rows of a machine, and those of others. A row that names no machine counts if none of them does."""
    names, any_named = {machine.name, *machine.aliases}, any(row.machine for row in rows)
    mine, others = [], []
    for row in rows:
        if row.machine in names or not any_named:
            mine.append(row)
        else:
            reason = f"was measured on {row.machine}" if row.machine else "does not name its machine"
            others.append(Skipped(row.name, reason))
    return mine, others


def calibrate(machine: Machine, rows: Sequence[Row], source: str = "", *, leave_out: bool = True) -> Machine:
    """The machine with efficiencies fitted to measured rows, for each precision and software that occurs in them.

    `leave_out`: find the error of models that are left out too, which takes a fit for each. Efficiencies that were
    fitted before may have seen these models, so such fits are drawn towards the others, or the defaults.
    Raises InputError if there are fewer rows than kinds of work in them, or if half of the rows are far from any fit.
    """
    measured = [row for row in rows if row.seconds is not None]
    works = {row.name: work_of(machine, row, _prior(machine, row)) for row in measured}
    occurring = int(sum(any(work[k] > 0 for work in works.values()) for k in range(len(FEATURES))))
    if len(measured) < occurring:
        detail = f"has {len(measured)} rows of {machine.name} with a time, but {occurring} kinds of work occur in them."
        raise InputError([Issue("", "too_few_rows", f"{detail} Maybe measure more layouts.")])
    fitted, works = _fit_all(machine, measured, works)
    unseen = _unseen_models(machine, measured) if leave_out else {}
    entries = []
    for (software, precision), slowdowns in fitted.items():
        mine = [row for row in measured if _belongs(row, software, precision)]
        errors = np.abs([_error(row, works[row.name], _slowdowns_of(fitted, row)) for row in mine])
        if not software and np.median(errors) > MOST_ERROR:
            detail = (
                f"has {len(mine)} rows in {precision}, half of which are more than {np.median(errors):.0%} from any fit"
            )
            detail += f", but at most {MOST_ERROR:.0%} is useful. Maybe the columns of times and layouts are mixed up."
            raise InputError([Issue("", "no_fit", detail)])
        fields: dict[str, object] = {
            "precision": precision,
            "software": software,
            "rows": len(mine),
            "median_error": round(float(np.median(errors)), 4),
            "worst_error": round(float(errors.max()), 4),
            "source": source,
        }
        if found := [abs(unseen[row.name]) for row in mine if row.name in unseen]:
            fields["unseen_model_error"] = round(float(np.median(found)), 4)
        entries.append(Efficiencies.of_slowdowns(slowdowns, **fields))
    kept = [one for one in machine.efficiencies if (one.software, one.precision) not in fitted]
    return machine.model_copy(update={"efficiencies": [*entries, *kept]})


def _prior(machine: Machine, row: Row) -> Work:
    return machine.efficiencies_of(row.strategy.precision, row.software).slowdowns


def _belongs(row: Row, software: str, precision: Precision) -> bool:
    mine = not software or row.software == software or row.software.startswith(software + "/")
    return mine and row.strategy.precision == precision


def _error(row: Row, work: Work, slowdowns: Work) -> float:
    assert row.seconds is not None, "only measured rows have errors"
    return float(work @ slowdowns) / row.seconds - 1


def _slowdowns_of(fitted: Mapping[Key, Work], row: Row) -> Work:
    """The most specific fit of a row's software, else that of 16 bits."""
    precisions: tuple[Precision, ...] = (row.strategy.precision, "bf16")
    for precision in precisions:
        for software in (row.software, row.software.split("/")[0], ""):
            if (software, precision) in fitted:
                return fitted[software, precision]
    return next(iter(fitted.values()))


def _fit_all(
    machine: Machine, rows: Sequence[Row], works: Mapping[str, Work]
) -> tuple[dict[Key, Work], dict[str, Work]]:
    """Slowdowns by software and precision, and the works of the rows by which they were fitted.

    Which device is the busiest, and what of a block is hidden, follows from slowdowns: so a first fit, of `works`, says
    which work is on the critical path.
    """
    first = _fit_works(machine, rows, works)
    again = {row.name: work_of(machine, row, _slowdowns_of(first, row)) for row in rows}
    return _fit_works(machine, rows, again), again


def _fit_works(machine: Machine, rows: Sequence[Row], works: Mapping[str, Work]) -> dict[Key, Work]:
    """Slowdowns by software and precision: each fit is drawn towards the one that is more general."""
    fitted: dict[Key, Work] = {}

    def add(software: str, precision: Precision, general: Work, spread: float) -> None:
        mine = [row for row in rows if _belongs(row, software, precision)]
        if mine:
            known = [one for one in machine.efficiencies if (one.software, one.precision) == (software, precision)]
            prior = known[0].slowdowns if known else general
            shares = np.array([works[row.name] for row in mine])
            seconds = np.array([row.seconds for row in mine], dtype=float)
            fitted[software, precision] = fit(shares, seconds, prior, spread)

    default = machine.efficiencies_of("bf16").slowdowns
    add("", "bf16", default, MACHINE_SPREAD)
    narrow: tuple[Precision, ...] = ("fp8", "fp4")
    for precision in narrow:
        add("", precision, fitted.get(("", "bf16"), default), PRECISION_SPREAD)
    for software in sorted({part for row in rows for part in (row.software.split("/")[0], row.software)} - {""}):
        group = software.split("/")[0]
        if software != group and sum(row.software == software for row in rows) < LEAST_VARIANT_ROWS:
            continue
        for precision in ("bf16", *narrow):
            general = fitted.get((group if group != software else "", precision))
            if general is not None:
                add(software, precision, general, GROUP_SPREAD if group == software else VARIANT_SPREAD)
    return fitted


def _unseen_models(machine: Machine, rows: Sequence[Row]) -> dict[str, float]:
    """Error of each row when no row of its model is fitted, now or before; empty where there is but one model."""
    unfitted = [one for one in machine.efficiencies if not one.rows]
    machine = machine.model_copy(update={"efficiencies": unfitted})
    works = {row.name: work_of(machine, row, _prior(machine, row)) for row in rows}
    errors: dict[str, float] = {}
    for model in sorted({row.model.name for row in rows}):
        others = [row for row in rows if row.model.name != model]
        if others:
            fitted, _ = _fit_all(machine, others, works)
            for row in (row for row in rows if row.model.name == model):
                slowdowns = _slowdowns_of(fitted, row)
                errors[row.name] = _error(row, work_of(machine, row, slowdowns), slowdowns)
    return errors


def fit(works: NDArray[np.float64], seconds: NDArray[np.float64], prior: Work, spread: float) -> Work:
    """Slowdowns of rows, whose works have the shape (rows, features), near `prior`.

    `spread`: relative distance from the prior at which a slowdown is as surprising as a row at the error OUTLIER.
    """
    shares = works / seconds[:, None]
    draw = np.diag(OUTLIER / (spread * np.maximum(prior, LEAST_SLOWDOWN)))
    weights, found = np.ones(len(seconds)), prior
    for _ in range(ROUNDS):
        left = np.vstack([shares * weights[:, None], draw])
        right = np.concatenate([weights, draw @ prior])
        with np.errstate(divide="ignore"):  # SciPy divides by a step of zero, and takes another
            found = lsq_linear(left, right, bounds=(LEAST, np.inf), method="bvls").x
        found = np.maximum(found, LEAST)  # rounded results may be below
        error = np.abs(shares @ found - 1)
        weights = np.sqrt(OUTLIER / np.maximum(error, OUTLIER))
    return found
