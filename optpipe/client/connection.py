"""HTTP connection with retries, server-sent events, and server errors as ours."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optpipe.document import shown
from optpipe.errors import InputError, Issue, ServiceError, needs_extra

if TYPE_CHECKING:
    import httpx


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Pauses between attempts double from one to the other, each shortened by chance: clients do not come back in step."""

SILENCE_S = 30.0
"""A connection on which nothing comes for so long is broken: streams are never silent for half of it."""

MOST_WAIT_S = 60.0
"""What one request may ask the server to wait."""

PASSING = frozenset({429, 502, 503, 504})
"""Statuses of a server that will answer later."""


class Pauses:
    """How long to pause before the next attempt, until patience ends."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.reset()

    def reset(self) -> None:
        """The server has answered."""
        self._until = time.monotonic() + self.patience_s
        self._pause_s = FIRST_PAUSE_S

    def pause(self, error: ServiceError) -> None:
        """Wait before the next attempt, as long as the server asks. Raises `error` when patience has ended."""
        pause_s = max(self._pause_s * random.uniform(0.5, 1), error.retry_after_s)
        if time.monotonic() + pause_s > self._until:
            raise error
        time.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


class Connection:
    """A server and the key for it. Requests are repeated for `patience_s` seconds: each must be safe to repeat."""

    def __init__(self, url: str, key: str | None, patience_s: float) -> None:
        httpx = _httpx()
        self.url, self.patience_s = url.rstrip("/"), patience_s
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(SILENCE_S, read=SILENCE_S + MOST_WAIT_S),
            )
            self._http.build_request("GET", "/").url.host.encode("idna")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InputError([Issue("server", "bad_url", f"is {url!r}: {error}. Maybe http:// is missing.")]) from None

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """An answer that is no error. Raises InputError where the request is wrong, ServiceError."""
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
        """The JSON object in an answer. Raises as `request`; ServiceError also where it is none."""
        answer = self.request(method, path, **options)
        with suppress(ValueError):
            found = answer.json()
            if isinstance(found, dict):
                return found
        raise ServiceError(_no_server(answer), status=answer.status_code)

    @contextmanager
    def lines(self, path: str, after: int, silence_s: float) -> Iterator[Iterator[str]]:
        """The lines of a stream as they come, from the event `after` on, once: whoever reads them resumes.

        Raises as `request`; also after `silence_s` seconds in which nothing comes.
        """
        headers = {"Last-Event-ID": str(after)}
        with self._errors(), self._http.stream("GET", path, headers=headers, timeout=silence_s) as answer:
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
            detail = f"is {self.url!r}, which begins with neither http:// nor https://."
            raise InputError([Issue("server", "bad_url", detail)]) from None
        except httpx.TransportError as error:
            text = f"{self.url} cannot be reached: {error}. Maybe it is not running, or the address is misspelt."
            raise ServiceError(text, passing=True) from None


def _raise_for_problem(answer: httpx.Response) -> None:
    """Raise the error that an answer stands for, if it is one; to be sent elsewhere is one too."""
    if answer.is_success:
        return
    problem = _problem(answer)
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


def _problem(answer: httpx.Response) -> dict[str, Any]:
    """The problem document of an error, also of one that a proxy made of its own."""
    try:
        problem = json.loads(answer.content)
    except ValueError:
        problem = None
    if isinstance(problem, dict) and isinstance(problem.get("detail"), str):
        return problem
    return {"detail": _no_server(answer)}


def _no_server(answer: httpx.Response) -> str:
    """What is said of an answer that no OptPipe server gives."""
    moved = answer.headers.get("location")
    maybe = f"its address is {shown(moved)}" if answer.is_redirect and moved else "it is no OptPipe server"
    return f"{answer.url} answered {answer.status_code} {answer.reason_phrase}. Maybe {maybe}."


def _httpx() -> Any:
    with needs_extra("serve", "a client of a server"):
        import httpx
    return httpx


@dataclass(frozen=True)
class Event:
    """One event: what kind it is, its revision, and its data."""

    kind: str
    revision: int
    data: dict[str, Any]


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """The whole events in a stream; one that was cut off is left out, comments too."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                yield Event(fields.get("event", "message"), int(fields["id"]), json.loads(fields["data"]))
            fields = {}
        name, _, value = line.partition(":")
        if name:
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name == "data" and name in fields else value
