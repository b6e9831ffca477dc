"""Reading server-sent events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optpipe.client.connection import Event, read_events

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
