"""What was solved before, in a table: one row for all problems that are equal up to names and units.

The same rules as those of `solver.cache`, which keeps files for the command line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from sqlalchemy import case, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.config import JobConfig
from api.jobs.tables import AnyRow, solved_problems
from optpipe.errors import OptPipeError
from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.cache import CachedSchedule
from solver.canonical import canonical
from solver.finish import finish
from solver.limits import Limits
from solver.orders_text import orders_data, read_orders


@dataclass(frozen=True)
class Equality:
    """What a problem is equal to: `key` is the same for equal problems only, a time of 1 there is `time_us` here."""

    key: str
    time_us: float

    @classmethod
    def of(cls, problem: Problem) -> Equality:
        """That of a problem."""
        form = canonical(problem)
        return cls(form.key, float(form.time_us))


async def lookup(connection: AsyncConnection, key: str) -> AnyRow | None:
    """The row of a key, which counts as used now."""
    used = update(solved_problems).where(solved_problems.c.key == key).values(used_at=func.now())
    row: AnyRow | None = (await connection.execute(used.returning(solved_problems))).one_or_none()
    return row


def answer(row: AnyRow, problem: Problem, equality: Equality, config: JobConfig) -> Schedule | None:
    """The schedule of a row in the problem's units, verified, if it was solved at least as well as is asked for."""
    try:
        orders = read_orders(json.loads(row.orders))
        schedule = finish(problem, orders, row.bound * equality.time_us, row.method, row.solve_seconds)
    except (OptPipeError, ValueError, TypeError, KeyError):
        return None  # a row that some other program made or damaged counts as absent
    limits = Limits(config.time_limit_s, config.gap, config.workers, config.seed)
    return schedule if CachedSchedule(schedule, row.asked, row.worker_s).answers(config.method, limits) else None


async def start(connection: AsyncConnection, key: str) -> Orders | None:
    """Orders of an equal problem, where a search can begin."""
    row = (await connection.execute(select(solved_problems.c.orders).where(solved_problems.c.key == key))).one_or_none()
    return read_orders(json.loads(row.orders)) if row else None


async def keep(
    connection: AsyncConnection, schedule: Schedule, equality: Equality, asked: str, worker_s: float
) -> None:
    """Keep a verified schedule that the method `asked` found in `worker_s` (time times workers), unless a better one
    is there. The higher bound is kept in either case."""
    new = insert(solved_problems).values(
        key=equality.key,
        asked=asked,
        worker_s=worker_s,
        value=schedule.value_us / equality.time_us,
        bound=schedule.bound_us / equality.time_us,
        method=schedule.method,
        solve_seconds=schedule.solve_seconds,
        orders=json.dumps(orders_data(schedule.orders), separators=(",", ":")),
    )
    old, given = solved_problems.c, new.excluded
    better = tuple_(given.value, -given.worker_s) <= tuple_(old.value, -old.worker_s)
    names = ("asked", "worker_s", "value", "method", "solve_seconds", "orders")
    values = {name: case((better, given[name]), else_=old[name]) for name in names}
    bound = func.greatest(old.bound, given.bound)
    await connection.execute(
        new.on_conflict_do_update(index_elements=["key"], set_={**values, "bound": bound, "used_at": func.now()})
    )
