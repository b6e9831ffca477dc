"""What all workers have counted, in a table: figures that outlive them, and that every API process can tell.

Each figure is added to in the transaction of what it counts, so none is lost and none is counted twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.records import Outcome
from api.jobs.tables import totals

Totals = Mapping[tuple[str, str], float]
"""Figures by name and label; one that is not there is 0. Both come from short fixed lists."""

SOLVE_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
FINAL_GAP = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper ends of the buckets of a histogram, which are its labels; what lies above has the label ABOVE."""
ABOVE, SUM = "+Inf", "sum"

ENDED, STOPPED, DIED, LOST, HEARTBEATS = "ended", "stopped", "died", "lost", "heartbeats"


def of_end(outcome: Outcome) -> Totals:
    """What the end of a job counts for."""
    figures = Counter[tuple[str, str]]({(ENDED, outcome.status): 1})
    if outcome.limit is not None:
        figures[STOPPED, outcome.limit] = 1
    if outcome.died:
        figures[DIED, ""] = 1
    if outcome.schedule is None:
        return figures
    seconds = _observed("solve_seconds", SOLVE_SECONDS, outcome.schedule.solve_seconds)
    return {**figures, **seconds, **_observed("final_gap", FINAL_GAP, outcome.schedule.gap)}


def _observed(name: str, ends: Sequence[float], value: float) -> Totals:
    place = bisect_left(ends, value)
    label = str(ends[place]) if place < len(ends) else ABOVE
    return {(name, label): 1, (name, SUM): value}


async def add(connection: AsyncConnection, figures: Totals) -> None:
    """Add to the totals. It comes last in a transaction, because every worker writes the same rows."""
    rows = [{"name": n, "label": label, "value": value} for (n, label), value in sorted(figures.items()) if value]
    if not rows:
        return
    new = insert(totals).values(rows)
    more = {"value": totals.c.value + new.excluded.value}
    await connection.execute(new.on_conflict_do_update(index_elements=["name", "label"], set_=more))


async def read(connection: AsyncConnection) -> Totals:
    """All of them."""
    return {(row.name, row.label): row.value for row in await connection.execute(select(totals))}
