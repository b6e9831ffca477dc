"""Reading server-sent events, and pauses between attempts."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.client.connection import Event, Pauses, read_events
from optpipe.errors import ServiceError

STREAM = """retry: 1000

: a comment

event: status
data: {"status":"queued"}
id: 1

event:incumbent
data: {"value_us":
data: 5}
id: 2

event: status
data: {"status":"succeeded"}
id: 3
"""


def test_whole_events_are_read() -> None:
    events = list(read_events(STREAM.split("\n")))
    assert events == [
        Event("status", "1", {"status": "queued"}),
        Event("incumbent", "2", {"value_us": 5}),
        Event("status", "3", {"status": "succeeded"}),
    ]


@given(cut=st.integers(0, len(STREAM)))
def test_an_event_that_was_cut_off_is_left_out(cut: int) -> None:
    whole = list(read_events(STREAM.split("\n")))
    lines = STREAM[:cut].split("\n")[:-1]  # a line that did not end is none
    assert list(read_events(lines)) == whole[: STREAM[:cut].count("\n\n") - (cut >= 13) - (cut >= 26)]


def test_retries_are_logged_once_they_take_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line for each time without an answer, none for interruptions shorter than a second."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    pauses, error = Pauses(600.0), ServiceError("http://host cannot be reached.")
    for told in (1, 2):
        for _ in range(3):
            pauses.pause(error)
        assert len(caplog.messages) == told - 1
        for _ in range(3):
            pauses.pause(error)
        assert caplog.messages == ["http://host cannot be reached. Trying again for 600 s."] * told
        pauses.reset()
