"""What was solved before, in a table: one row for all problems that are equal up to names and units.

The same rules as those of `solver.cache`, which keeps files for the command line. For an equal problem the orders are
timed and verified anew, and the document is written. It is the `Answer` to that problem, when it comes word for word.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, cast

from sqlalchemy import bindparam, case, delete, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from api.jobs.best import write_document
from api.jobs.config import JobConfig
from api.jobs.direct import Statement
from api.jobs.tables import answers, solved_problems
from optpipe.errors import OptPipeError
from optpipe.gap import gap_of
from optpipe.orders import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.cache import CachedSchedule
from solver.canonical import canonical
from solver.finish import finish
from solver.limits import Limits
from solver.orders_text import orders_data, read_orders

USED_WITHIN = timedelta(hours=12)
"""That a row is used is noted so seldom: were it written each time, all who use it would wait for one another."""


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


@dataclass(frozen=True)
class Answer:
    """The stored schedule of a problem, given word for word: what a job that is answered with it says of it.

    `document` is its digest. Times are the problem's own.
    """

    document: bytes
    value_us: float
    bound_us: float

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """As in the document."""
        return "optimal" if self.bound_us == self.value_us else "feasible"

    @property
    def gap(self) -> float:
        """Likewise."""
        return gap_of(self.value_us, self.bound_us)


_ANSWER = Statement(
    select(answers, solved_problems.c.asked, solved_problems.c.worker_s, solved_problems.c.used_at)
    .join(solved_problems, solved_problems.c.key == answers.c.key)
    .where(answers.c.problem == bindparam("problem"))
)
_ROW = Statement(select(solved_problems).where(solved_problems.c.key == bindparam("key")))


async def answer(connection: AsyncConnection, problem: bytes, config: JobConfig) -> Answer | None:
    """The answer to the problem with this digest, if it was solved at least as well as is asked for."""
    row = await _ANSWER.one_or_none(connection, problem=problem)
    if row is None:
        return None
    await _use(connection, row)
    known = Answer(row.document, row.value_us, row.bound_us)
    return known if _will_do(known, row, config) else None


async def lookup(connection: AsyncConnection, key: str) -> Any:
    """The row of a key; None where there is none."""
    row = await _ROW.one_or_none(connection, key=key)
    if row is not None:
        await _use(connection, row)
    return row


async def _use(connection: AsyncConnection, row: Any) -> None:
    """Note that the row of a solved problem is used, for it to be kept."""
    if datetime.now(UTC) - row.used_at > USED_WITHIN:
        used = update(solved_problems).where(solved_problems.c.key == row.key).values(used_at=func.now())
        await connection.execute(used)


def schedule_of(row: Any, problem: Problem, equality: Equality, config: JobConfig) -> Schedule | None:
    """The schedule of a row in the problem's units, verified, if it was solved at least as well as is asked for."""
    try:
        orders = read_orders(json.loads(row.orders))
        schedule = finish(problem, orders, row.bound * equality.time_us, row.method, row.solve_seconds)
    except (OptPipeError, ValueError, TypeError, KeyError):
        return None  # a row that some other program made or damaged counts as absent
    return schedule if _will_do(schedule, row, config) else None


def _will_do(known: Answer | Schedule, row: Any, config: JobConfig) -> bool:
    """Whether it was solved at least as well as is asked for. The rule is the cache's, and looks at the gap alone."""
    limits = Limits(config.time_limit_s, config.gap, config.workers, config.seed)
    return CachedSchedule(cast(Schedule, known), row.asked, row.worker_s).answers(config.method, limits)


async def remember(
    connection: AsyncConnection, row: Any, problem: bytes, schedule: Schedule, text: str
) -> Answer | None:
    """Write the document that was made of a row, as the answer to the problem with this digest from now on.

    None where the row has changed meanwhile.
    """
    same = [solved_problems.c[name] == getattr(row, name) for name in ("key", "orders", "bound")]
    if (await connection.execute(select(solved_problems.c.key).where(*same).with_for_update())).one_or_none() is None:
        return None
    known = Answer(await write_document(connection, text), schedule.value_us, schedule.bound_us)
    await connection.execute(delete(answers).where((answers.c.key == row.key) | (answers.c.problem == problem)))
    await connection.execute(insert(answers).values(problem=problem, key=row.key, **vars(known)))
    return known


async def start(connection: AsyncConnection, key: str) -> Orders | None:
    """Orders of an equal problem, where a search can begin."""
    row = (await connection.execute(select(solved_problems.c.orders).where(solved_problems.c.key == key))).one_or_none()
    try:
        return read_orders(json.loads(row.orders)) if row else None
    except (ValueError, TypeError, KeyError):
        return None  # see `schedule_of`


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
    await connection.execute(delete(answers).where(answers.c.key == equality.key))  # it may be another one from now on
