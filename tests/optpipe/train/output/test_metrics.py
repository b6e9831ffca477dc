"""A line a step, there at once; a resumed run repeats none."""

from __future__ import annotations

import json
from pathlib import Path

from optpipe.train.online.events import OnlineEvent
from optpipe.train.output.metrics import Metrics
from tests.optpipe.train.output.reports import step


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_there_as_soon_as_its_step_is_done(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics(step(0, events=(OnlineEvent(0, "swapped", "a better one"),)))
    [first] = lines(tmp_path / "m.jsonl")
    assert (first["step"], first["loss"], first["tokens_per_second"]) == (0, 5.0, 200.0)
    assert first["events"] == [{"step": 0, "kind": "swapped", "text": "a better one", "seconds": 0.0}]
    metrics.close()


def write(path: Path, numbers: range) -> None:
    metrics = Metrics(path)
    for number in numbers:
        metrics(step(number))
    metrics.close()


def test_a_resumed_run_goes_on_before_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(8))
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # the process was killed here
    write(path, range(5, 11))
    assert [line["step"] for line in lines(path)] == list(range(11))


def test_another_run_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("notes of mine\n")
    write(path, range(2))
    write(path, range(3))
    assert [line["step"] for line in lines(path)] == [0, 1, 2]


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    event = OnlineEvent(0, "timed", "by a broken clock", float("nan"))
    metrics(step(0, loss=float("nan"), gradient_norm=float("inf"), skipped=True, events=(event,)))
    metrics.close()
    [line] = lines(tmp_path / "m.jsonl")
    assert line["events"] == [{"step": 0, "kind": "timed", "text": "by a broken clock", "seconds": None}]
    assert (line["loss"], line["gradient_norm"], line["skipped"]) == (None, None, True)
