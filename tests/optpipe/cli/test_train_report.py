"""Training prints one JSON document, also where a number is none or the run was interrupted."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from optpipe.cli.train_report import log_to_stderr
from tests.optpipe.cli.conftest import Cli

STAGES = "tests.optpipe.train.odd_stages"


def test_numbers_that_are_none_are_null(cli: Cli, quick_schedule_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    own = ("--model", f"{STAGES}:unused", "--data", f"{STAGES}:without_a_number", "--steps", 3)
    run = cli("train", "--schedule", quick_schedule_file, *own, "--on-not-finite", "skip", "--trace", trace, "--json")
    assert run.code == 0, run.err
    first, skipped, last = run.document["losses"]
    assert skipped is None
    assert 0 < last < 10
    assert 0 < first < 10
    assert json.loads(trace.read_text())


def test_a_run_that_had_begun_and_failed_is_no_bad_input(cli: Cli, quick_schedule_file: Path) -> None:
    own = ("--model", f"{STAGES}:unused", "--data", f"{STAGES}:without_a_number", "--steps", 3)
    run = cli("train", "--schedule", quick_schedule_file, *own)
    assert run.code == 1
    assert "error: the loss is nan at step 1 with learning_rate 0.001. Maybe lower it." in run.err


def test_an_interrupt_is_one_error(cli: Cli, monkeypatch: pytest.MonkeyPatch, quick_schedule_file: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("optpipe.train.train", interrupted)
    run = cli("train", "--schedule", quick_schedule_file, "--json")
    assert run.code == 130
    assert run.err.splitlines()[-1] == "error: interrupted."
    assert run.document == {"error": {"type": "KeyboardInterrupt", "message": "interrupted."}}


def test_files_are_written_before_the_result_is_printed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, quick_schedule_file: Path, tmp_path: Path
) -> None:
    def broken(_: object) -> None:
        raise BlockingIOError(11, "stdout is full")

    monkeypatch.setattr("optpipe.cli.train.print_json", broken)
    trace = tmp_path / "trace.json"
    run = cli("train", "--schedule", quick_schedule_file, "--model", "tiny", "--steps", 1, "--trace", trace, "--json")
    assert run.code == 1
    assert json.loads(trace.read_text())


def test_a_finished_run_says_that_nothing_is_drawn(cli: Cli, quick_schedule_file: Path, tmp_path: Path) -> None:
    again = (
        "train",
        "--schedule",
        quick_schedule_file,
        "--model",
        "tiny",
        "--steps",
        1,
        "--checkpoint",
        tmp_path / "kept",
    )
    assert cli(*again).code == 0
    run = cli(*again, "--plot", tmp_path / "run.png", "--json")
    assert run.document["losses"] == []
    assert run.err.splitlines()[-1] == f"no step was run: {tmp_path / 'run.png'} is not drawn"


def test_is_shown_within_and_forgotten_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("optpipe.train.checkpoint")
    with log_to_stderr():
        log.info("kept step-[4]")
        log.warning("one is damaged")
    assert capsys.readouterr().err == "kept step-[4]\nwarning: one is damaged\n"
    assert not log.isEnabledFor(logging.INFO)
