"""Ctrl-C and SIGTERM: one asks, a second Ctrl-C ends at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from optpipe.train.checkpoint.callback import ECHO_S, Interrupts
from optpipe.train.checkpoint.files import final_path, steps_in
from tests.optpipe.train.checkpoint.runs import config_of, run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_wish(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert interrupts.requested is None
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.requested == number.name
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    """As in what a script runs in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(number)
        assert interrupts.requested is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_elsewhere_than_in_the_main_thread_signals_are_left_alone() -> None:
    found: list[object] = []

    def within() -> None:
        with Interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert found == [before]


SECOND = f"""
import signal, time
from optpipe.train.checkpoint.callback import Interrupts
with Interrupts() as interrupts:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    print("once", flush=True)
    time.sleep({ECHO_S} + 0.1)
    signal.raise_signal(signal.SIGINT)
    print("twice", flush=True)
"""
"""The first one is sent twice, as by a terminal and a launcher; then comes a second."""


def test_a_second_ctrl_c_ends_at_once_but_not_the_echo_of_the_first() -> None:
    found = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == "once\n"
    assert found.returncode == -signal.SIGINT


def interrupt(step: int) -> None:
    """Ctrl-C in step 2."""
    if step == 2:
        signal.raise_signal(signal.SIGINT)


def test_what_was_asked_to_end_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    ended = run(config_of(tmp_path, every_steps=100), before=interrupt)
    assert list(ended.losses) == [0, 1, 2]
    assert ended.checkpoints.stopped
    assert ended.checkpoints.message == (
        f"SIGINT: ended after 3 of 6 steps; all is in {final_path(tmp_path, 3)}. The same command goes on from there."
    )
    assert steps_in(tmp_path) == [3]
    again = run(config_of(tmp_path, every_steps=100)).losses
    assert ended.losses | again == run(config_of(None)).losses


def test_without_a_folder_it_ends_all_the_same() -> None:
    ended = run(config_of(None), before=interrupt)
    assert list(ended.losses) == [0, 1, 2]
    assert "Maybe give a folder with --checkpoint" in ended.checkpoints.message
