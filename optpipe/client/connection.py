"""HTTP connection with retries, server-sent events, and errors of the server as exceptions of OptPipe."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpipe.errors import InputError, Issue, ServiceError, needs_extra, shown

if TYPE_CHECKING:
    import httpx


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Exponential back-off between attempts, with random jitter so that clients do not retry in step."""

READ_TIMEOUT_S = 30.0
"""Read timeout: a connection without data for this long is broken. Streams send something at least twice as often."""

LOG = logging.getLogger("optpipe.client")

ANNOUNCED_PAUSE_S = 1.0
"""Pause from which on it is logged that the server does not answer; shorter interruptions pass unseen."""

MOST_WAIT_S = 60.0
"""Longest wait that one request may ask of the server."""

PASSING = frozenset({429, 502, 503, 504})
"""Statuses of a server that is temporarily unavailable."""


class Pauses:
    """Back-off between attempts until the retry timeout of `patience_s` seconds."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.reset()

    def reset(self) -> None:
        """Start over after a response of the server."""
        self._until = time.monotonic() + self.patience_s
        self._pause_s = FIRST_PAUSE_S
        self._is_announced = False

    def pause(self, error: ServiceError) -> None:
        """Wait before the next attempt, at least as long as the server asks. Raises `error` after the retry timeout."""
        pause_s = max(self._pause_s * random.uniform(0.5, 1), error.retry_after_s)
        if time.monotonic() + pause_s > self._until:
            raise error
        if self._pause_s >= ANNOUNCED_PAUSE_S and not self._is_announced:
            LOG.warning("%s Trying again for %.0f s.", error, self.patience_s)
            self._is_announced = True
        time.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


class Connection:
    """Connection to a server with a key. Requests are retried for `patience_s` seconds, so they must be idempotent."""

    def __init__(self, url: str, key: str | None, patience_s: float) -> None:
        httpx = _httpx()
        self.url, self.patience_s = url.rstrip("/"), patience_s
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(READ_TIMEOUT_S, read=READ_TIMEOUT_S + MOST_WAIT_S),
            )
            self._http.build_request("GET", "/").url.host.encode("idna")
        except (httpx.InvalidURL, UnicodeError) as error:
            maybe = "the address is misspelt" if "://" in url else "http:// is missing"
            raise InputError([Issue("server", "bad_url", f"is {url!r}: {error}. Maybe {maybe}.")]) from None

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return a successful response. Raises InputError for an invalid request, ServiceError."""
        pauses = Pauses(self.patience_s)
        while True:
            try:
                with self._errors():
                    answer: httpx.Response = self._http.request(method, path, **options)
                    _raise_for_problem(answer)
                    return answer
            except ServiceError as error:
                if not error.passing:
                    raise
                pauses.pause(error)

    def read(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Return the JSON object of a response. Raises as `request`, and ServiceError for any other body."""
        answer = self.request(method, path, **options)
        with suppress(ValueError):
            body = answer.json()
            if isinstance(body, dict):
                return body
        raise ServiceError(_foreign_answer(answer), status=answer.status_code)

    @contextmanager
    def lines(self, path: str, after: str, read_timeout_s: float) -> Iterator[Iterator[str]]:
        """Yield the lines of an event stream that follow event `after`. There is no retry: the caller resumes.

        Raises as `request`, and after `read_timeout_s` seconds without data.
        """
        headers = {"Last-Event-ID": after} if after else {}
        with self._errors(), self._http.stream("GET", path, headers=headers, timeout=read_timeout_s) as answer:
            if not answer.is_success:
                answer.read()
            _raise_for_problem(answer)
            yield answer.iter_lines()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        httpx = _httpx()
        try:
            yield
        except httpx.UnsupportedProtocol:
            detail = f"is {self.url!r}, which begins with neither http:// nor https://. Maybe add http://."
            raise InputError([Issue("server", "bad_url", detail)]) from None
        except httpx.TransportError as error:
            text = f"{self.url} cannot be reached: {error}. Maybe it is not running, or the address is misspelt."
            raise ServiceError(text, passing=True) from None


def _raise_for_problem(answer: httpx.Response) -> None:
    """Raise the error that a response stands for, if it is not a success; a redirect is an error too."""
    if answer.is_success:
        return
    try:
        problem = json.loads(answer.content)
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or not isinstance(problem.get("detail"), str):
        problem = {"detail": _foreign_answer(answer)}  # from a proxy, or from another server
    status = answer.status_code
    if status in (400, 413, 415, 422):
        faults = problem.get("errors") or [{"pointer": "", "code": "refused", "detail": problem["detail"]}]
        raise InputError([Issue(fault["pointer"], fault["code"], fault["detail"]) for fault in faults])
    retry_after = answer.headers.get("retry-after", "0")
    raise ServiceError(
        problem["detail"],
        status=status,
        passing=status in PASSING,
        retry_after_s=float(retry_after) if retry_after.isdigit() else 0.0,
    )


def _foreign_answer(answer: httpx.Response) -> str:
    """Message for a response that is not from an OptPipe server."""
    moved = answer.headers.get("location")
    maybe = f"its address is {shown(moved)}" if answer.is_redirect and moved else "it is no OptPipe server"
    return f"{answer.url} answered {answer.status_code} {answer.reason_phrase}. Maybe {maybe}."


def _httpx() -> Any:
    with needs_extra("serve", "a client of a server"):
        import httpx
    return httpx


@dataclass(frozen=True)
class Event:
    """Server-sent event of a job. `id` resumes the stream that it came by."""

    kind: str
    id: str
    data: dict[str, Any]

    @property
    def revision(self) -> int:
        """Number of the event within its job, from 1."""
        return int(self.data["revision"])


def read_events(lines: Iterable[str], on_id: Callable[[str], None] | None = None) -> Iterator[Event]:
    """Parse the complete events of a stream; comments and a truncated last event are skipped.

    `on_id` is called with each id, also where it comes without an event.
    """
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if on_id is not None and "id" in fields:
                on_id(fields["id"])
            if "data" in fields:
                yield Event(fields.get("event", "message"), fields["id"], json.loads(fields["data"]))
            fields = {}
        name, _, value = line.partition(":")
        if name:
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name == "data" and name in fields else value
