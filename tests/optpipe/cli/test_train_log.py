"""What training logs is shown while a command trains, and not afterwards."""

from __future__ import annotations

import logging

import pytest

from optpipe.cli.train_log import told


def test_is_shown_within_and_forgotten_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("optpipe.train.checkpoints")
    with told():
        log.info("kept step-[4]")
        log.warning("one is damaged")
    assert capsys.readouterr().err == "kept step-[4]\nwarning: one is damaged\n"
    assert not log.isEnabledFor(logging.INFO)
