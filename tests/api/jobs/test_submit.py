"""Together: those of one owner in order and several at a time, each with its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID, uuid4

import pytest

from api.errors import DatabaseGoneError
from api.jobs.records import JobConfig
from api.jobs.store import Store
from api.jobs.submit import MOST_PER_COMMIT, GroupCommit
from api.settings import Settings
from instances import uniform

BUG, GONE = 1_000_001, 1_000_002
Batch = tuple[UUID | None, list[int]]


class Recorder:
    """Doubles numbers; refuses negative ones one by one, fails as a whole at BUG, and has no database at GONE."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.going_on: set[UUID | None] = set()

    async def do(self, owner: UUID | None, asked: Sequence[int]) -> list[int | Exception]:
        assert owner not in self.going_on
        self.going_on.add(owner)
        self.batches.append((owner, list(asked)))
        await asyncio.sleep(0)
        self.going_on.remove(owner)
        if BUG in asked:
            raise RuntimeError("a bug")
        if GONE in asked:
            raise DatabaseGoneError("gone")
        return [2 * number if number >= 0 else ValueError(number) for number in asked]


async def ask_all(*asked: tuple[UUID | None, int]) -> tuple[list[int | BaseException], list[Batch]]:
    recorder = Recorder()
    commits = GroupCommit(recorder.do)
    answers = await asyncio.gather(*(commits.run(*one) for one in asked), return_exceptions=True)
    return answers, recorder.batches


async def test_those_who_wait_are_served_in_one_go() -> None:
    answers, batches = await ask_all(*((None, number) for number in range(2 * MOST_PER_COMMIT)))
    assert answers == [2 * number for number in range(2 * MOST_PER_COMMIT)]
    assert len(batches) == 2
    assert [number for _, some in batches for number in some] == list(range(2 * MOST_PER_COMMIT))


async def test_owners_do_not_wait_for_one_another() -> None:
    one, other = uuid4(), uuid4()
    answers, batches = await ask_all((one, 1), (other, 2), (one, 3))
    assert answers == [2, 4, 6]
    assert batches == [(one, [1, 3]), (other, [2])]


async def test_a_refusal_is_for_one_alone() -> None:
    answers, batches = await ask_all((None, 1), (None, -1), (None, 2))
    assert [answers[0], answers[2]] == [2, 4]
    assert isinstance(answers[1], ValueError)
    assert len(batches) == 1


async def test_what_breaks_all_is_tried_one_by_one() -> None:
    answers, _ = await ask_all((None, 1), (None, BUG), (None, 2))
    assert [answers[0], answers[2]] == [2, 4]
    assert isinstance(answers[1], RuntimeError)


async def test_without_a_database_nothing_is_tried_again() -> None:
    answers, batches = await ask_all((None, 1), (None, GONE))
    assert all(isinstance(answer, DatabaseGoneError) for answer in answers)
    assert len(batches) == 1


async def test_who_has_gone_away_holds_up_nobody() -> None:
    commits = GroupCommit(Recorder().do)
    gone = asyncio.create_task(commits.run(None, 1))
    there = asyncio.create_task(commits.run(None, 2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await there == 4
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await commits.run(None, 3) == 6


CLIENTS, EACH = 20, 5
PROBLEM = uniform(2, 4)


async def test_each_submission_is_a_job(store: Store) -> None:
    async def client(store: Store) -> list[UUID]:
        return [(await store.submit(PROBLEM, JobConfig())).job.id for _ in range(EACH)]

    ids = await asyncio.gather(*(client(store) for _ in range(CLIENTS)))
    assert len({job_id for of_client in ids for job_id in of_client}) == CLIENTS * EACH
    assert (await store.counts()).jobs["queued"] == CLIENTS * EACH


async def test_one_key_is_one_job(store: Store, settings: Settings) -> None:
    async with Store(settings) as elsewhere:
        same = [
            place.submit(PROBLEM, JobConfig(), None, "key", b"body")
            for place in (store, elsewhere)
            for _ in range(CLIENTS // 2)
        ]
        answers = await asyncio.gather(*same)
    assert len({answer.job.id for answer in answers}) == 1
    assert [answer.created for answer in answers].count(True) == 1
    assert (await store.counts()).jobs["queued"] == 1


async def test_caps_hold_among_many(settings: Settings) -> None:
    async with Store(settings.model_copy(update={"max_queued_jobs": 7})) as store:
        async with Store(store.settings) as elsewhere:
            many = [place.submit(PROBLEM, JobConfig()) for place in (store, elsewhere) for _ in range(10)]
            answers = await asyncio.gather(*many, return_exceptions=True)
        assert sum(not isinstance(answer, Exception) for answer in answers) == 7
        assert (await store.counts()).jobs["queued"] == 7
