"""Client of a server: submits, follows and fetches jobs, and reconnects when the connection is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from optpipe.client.connection import MOST_WAIT_S, READ_TIMEOUT_S, Connection, Event, Pauses, read_events
from optpipe.errors import InfeasibleError, NoSolutionError, OptPipeError, ServiceError
from optpipe.problem import Problem
from optpipe.schedule import Schedule, relative_gap

PATIENCE_S = 60.0
"""Default retry timeout: how long a server may be unreachable or overloaded before a call fails."""

CANCEL_S = 10.0
"""Timeout for a cancelled job to end; it normally takes a second."""


class Client:
    """Client of an OptPipe server, for use from one thread at a time; as a context manager it closes its connections.

    `url` such as ``http://localhost:8000``; `key`: a bearer key, if the server requires one. Calls are retried for
    `patience_s` seconds while the server is unreachable or overloaded. All raise InputError for an invalid request,
    with the server's message, and ServiceError if the server cannot be reached or refuses.
    """

    def __init__(self, url: str, key: str | None = None, patience_s: float = PATIENCE_S) -> None:
        self._connection = Connection(url, key, patience_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._connection.close()

    def solve(
        self,
        problem: Problem,
        method: str = "auto",
        time_limit_s: float = 30.0,
        *,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
        **config: Any,
    ) -> Schedule:
        """Solve a problem on the server and return the best schedule found in `time_limit_s` seconds of search.

        `config`: gap, workers, seed, priority, name, tags, as in POST /v1/schedules. `on_progress` is called with every
        better value or bound. After `timeout_s` seconds in total, including the time in the queue, the job is cancelled
        and its best schedule returned. KeyboardInterrupt cancels the job and is re-raised. Raises InfeasibleError and
        NoSolutionError like a local solve.
        """
        job = self.submit(problem, method, time_limit_s, **config)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self.follow(job.id, on_progress, until)
        except KeyboardInterrupt:
            self.cancel(job.id)
            raise
        except TimeoutError:
            self.cancel(job.id)
        return self.result(job.id).schedule_or_error()

    def submit(self, problem: Problem, method: str = "auto", time_limit_s: float = 30.0, **config: Any) -> JobState:
        """Submit a job exactly once, even if requests are retried; it may have ended if an equal one was solved."""
        body = {"problem": problem.to_data(), "config": {"method": method, "time_limit_s": time_limit_s, **config}}
        headers = {"Idempotency-Key": str(uuid4())}
        return JobState.from_data(self._connection.read("POST", "/v1/schedules", json=body, headers=headers))

    def follow(self, job_id: str, on_progress: OnProgress | None = None, until: float | None = None) -> None:
        """Wait for a job to end, calling `on_progress` for each better value or bound.

        Raises TimeoutError when `time.monotonic` is past `until`.
        """
        for event in self.events(job_id, until):
            if on_progress and event.kind in ("incumbent", "bound") and event.data["value_us"] is not None:
                data = event.data
                on_progress(Progress(data["seconds"] or 0.0, data["value_us"], data["bound_us"], data["method"] or ""))

    def events(self, job_id: str, until: float | None = None) -> Iterator[Event]:
        """Yield each event of a job once and in order up to its terminal status, reconnecting as needed."""
        return self._stream(f"/v1/schedules/{job_id}/events", "", until, lambda: self.job(job_id).ended)

    def all_events(self, until: float | None = None) -> Iterator[Event]:
        """Events of all jobs of the key from this call on, each with its ``job_id`` in `data`, without an end.

        Reconnects as needed, without a gap; the iterator raises TimeoutError when `time.monotonic` is past `until`.
        To miss nothing, call this first and list or fetch jobs then.
        """
        return self._stream("/v1/events", self._newest_place(), until, lambda: False)

    def _newest_place(self) -> str:
        """Id behind all events so far, with which the stream of all jobs begins."""
        pauses = Pauses(self._connection.patience_s)
        while True:
            try:
                with self._connection.lines("/v1/events", "", READ_TIMEOUT_S) as lines:
                    for line in lines:
                        if line.startswith("id: "):
                            return line.removeprefix("id: ")
                raise ServiceError("the stream of events ended before it began.", passing=True)
            except ServiceError as error:
                if not error.passing:
                    raise
                pauses.pause(error)

    def _stream(self, path: str, after: str, until: float | None, is_over: Callable[[], bool]) -> Iterator[Event]:
        """Events of a stream after the id `after`, reconnecting as needed, until it ends and `is_over` is true.

        Raises TimeoutError when `time.monotonic` is past `until`.
        """

        def remember(event_id: str) -> None:
            nonlocal after
            after = event_id

        pauses = Pauses(self._connection.patience_s)
        while True:
            read_timeout_s = READ_TIMEOUT_S
            if until is not None:
                read_timeout_s = max(0.0, min(READ_TIMEOUT_S, until - time.monotonic()))
            try:
                with self._connection.lines(path, after, read_timeout_s) as lines:
                    pauses.reset()
                    yield from read_events(_until(lines, until), remember)
                if is_over():
                    return
            except ServiceError as error:
                if until is not None and time.monotonic() > until:
                    raise TimeoutError from None
                if not error.passing:
                    raise
                pauses.pause(error)

    def plan(
        self,
        model: str | Mapping[str, Any],
        gpus: int,
        machine: str | Mapping[str, Any],
        sequence: int,
        global_batch: int,
        *,
        fixed: Mapping[str, Any] | None = None,
        software: str = "",
        time_limit_s: float = 60.0,
        on_progress: OnProgress | None = None,
        **config: Any,
    ) -> ServerPlan:
        """Plan a training job on the server, as ``optpipe plan`` does; its document, and the schedule of the best.

        `model`: a name of `models`, or the object of a config.json; `machine`: a name of `machines`, or a document
        (`optpipe.machine/1`). `fixed`: allowed values by option, such as ``{"tp": [4, 8]}``. `config`: workers,
        priority, name, tags. `on_progress` is called with every faster strategy. KeyboardInterrupt cancels the job and
        is re-raised. Raises InfeasibleError where nothing fits, NoSolutionError.
        """
        body = {
            "model": model,
            "gpus": gpus,
            "machine": machine,
            "sequence": sequence,
            "global_batch": global_batch,
            "software": software,
            "fixed": dict(fixed or {}),
            "config": {"time_limit_s": time_limit_s, **config},
        }
        headers = {"Idempotency-Key": str(uuid4())}
        job = JobState.from_data(self._connection.read("POST", "/v1/plans", json=body, headers=headers))
        try:
            self.follow(job.id, on_progress)
        except KeyboardInterrupt:
            self.cancel(job.id)
            raise
        job = self.job(job.id)
        if job.value_us is None:
            raise job.why_no_schedule
        document = self._connection.read("GET", f"/v1/plans/{job.id}/plan")
        return ServerPlan(job, document, self.schedule(job.id) if document["solved"] else None)

    def models(self) -> list[dict[str, Any]]:
        """Language models that the server knows by name, each with its `parameters`."""
        return list(self._connection.read("GET", "/v1/models")["models"])

    def machines(self) -> list[dict[str, Any]]:
        """Machines that the server knows by name (`optpipe.machine/1`)."""
        return list(self._connection.read("GET", "/v1/machines")["machines"])

    def submit_all(
        self, problems: Iterable[Problem], method: str = "auto", time_limit_s: float = 30.0, **config: Any
    ) -> list[JobState]:
        """Submit at most 100 problems with one configuration, all or none, exactly once; their jobs in order."""
        options = {"method": method, "time_limit_s": time_limit_s, **config}
        body = {"submissions": [{"problem": problem.to_data(), "config": options} for problem in problems]}
        headers = {"Idempotency-Key": str(uuid4())}
        answer = self._connection.read("POST", "/v1/batch/submit", json=body, headers=headers)
        return [JobState.from_data(job) for job in answer["jobs"]]

    def cancel_all(self, job_ids: Iterable[str]) -> list[JobState]:
        """Cancel at most 100 jobs; those that are there, as they stand."""
        answer = self._connection.read("POST", "/v1/batch/cancel", json={"ids": list(job_ids)})
        return [JobState.from_data(job) for job in answer["jobs"]]

    def job(self, job_id: str) -> JobState:
        """Current state of a job."""
        return JobState.from_data(self._connection.read("GET", f"/v1/schedules/{job_id}"))

    def wait(self, job_id: str, seconds: float) -> JobState:
        """State of a job once it has ended, or after `seconds` (at most a minute)."""
        options = {"wait": min(seconds, MOST_WAIT_S)}
        return JobState.from_data(self._connection.read("GET", f"/v1/schedules/{job_id}", params=options))

    def cancel(self, job_id: str) -> JobState:
        """Cancel a job; its best schedule is kept."""
        return JobState.from_data(self._connection.read("POST", f"/v1/schedules/{job_id}/cancel"))

    def schedule(self, job_id: str) -> Schedule:
        """Best schedule of a job so far."""
        answer = self._connection.request("GET", f"/v1/schedules/{job_id}/schedule")
        return Schedule.from_json(answer.content, str(answer.url))

    def result(self, job_id: str) -> ServerResult:
        """Final state of a job with its best schedule; waits a few seconds for a job that was just cancelled."""
        job = self.wait(job_id, CANCEL_S)
        return ServerResult(job, self.schedule(job_id) if job.value_us is not None else None)


def _until(lines: Iterator[str], until: float | None) -> Iterator[str]:
    """Yield lines until `time.monotonic` is past `until`. Raises TimeoutError."""
    for line in lines:
        if until is not None and time.monotonic() > until:
            raise TimeoutError
        yield line


ENDED = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True)
class JobState:
    """State of a job. `reason` and `limit`: how it ended; `error`: why there is no schedule."""

    id: str
    status: str
    value_us: float | None
    bound_us: float | None
    reason: str | None
    limit: str | None
    error: str | None
    budgets_bytes: tuple[int | None, ...] = ()

    @classmethod
    def from_data(cls, answer: Mapping[str, Any]) -> Self:
        """Parse a job from a response. Raises ServiceError if a field is missing."""
        if missing := {"id", "status", "value_us", "bound_us", "termination", "error"} - answer.keys():
            text = f"a response lacks {', '.join(sorted(missing))}. Maybe it comes from another server than OptPipe's."
            raise ServiceError(text)
        termination = answer["termination"] or {}
        return cls(
            id=answer["id"],
            status=answer["status"],
            value_us=answer["value_us"],
            bound_us=answer["bound_us"],
            reason=termination.get("reason"),
            limit=termination.get("limit"),
            error=answer["error"],
            budgets_bytes=tuple(answer.get("budgets_bytes") or ()),
        )

    @property
    def ended(self) -> bool:
        """True if the job has succeeded, failed or been cancelled."""
        return self.status in ENDED

    @property
    def why_no_schedule(self) -> OptPipeError:
        """Error for an ended job without a schedule, with the server's message."""
        text = self.error or f"the job {self.id} ended as {self.status} without a schedule."
        if self.reason == "infeasible":
            # The constructor would compose the message from budgets; the server has composed it already.
            infeasible = InfeasibleError.__new__(InfeasibleError, text)
            infeasible.budgets_bytes = self.budgets_bytes
            return infeasible
        if self.reason == "no_solution" or self.status == "cancelled":
            return NoSolutionError(text)
        return ServiceError(text)


@dataclass(frozen=True)
class ServerResult:
    """Final state of a job, with its schedule if it has one."""

    job: JobState
    schedule: Schedule | None

    @property
    def limit(self) -> str | None:
        """Limit that stopped the search; None if the search was complete."""
        return self.job.limit

    def schedule_or_error(self) -> Schedule:
        """Return the schedule. Raises InfeasibleError, NoSolutionError or ServiceError if there is none."""
        if self.schedule is None:
            raise self.job.why_no_schedule
        return self.schedule


@dataclass(frozen=True)
class ServerPlan:
    """A plan (`optpipe.plan/1`), the job that made it, and the schedule of what it solved best; None: it was only
    rated."""

    job: JobState
    document: dict[str, Any]
    schedule: Schedule | None


@dataclass(frozen=True)
class Progress:
    """Better value or bound, `seconds` after the solve began; `method` found the schedule."""

    seconds: float
    value_us: float
    bound_us: float
    method: str

    @property
    def gap(self) -> float:
        """``(value - bound) / value``."""
        return relative_gap(self.value_us, self.bound_us)


OnProgress = Callable[[Progress], None]
