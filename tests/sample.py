"""How much of each enumeration a run of the tests takes, and the seed by which it is chosen.

`make test` takes a tenth, and less of what takes long, another part for each state of the sources; `make test-slow`
takes all. OPTPIPE_TEST_SEED repeats the choice of another run, which prints it; OPTPIPE_TEST_SIZE=full takes all.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

SHARE = 10
"""A run takes one of so many."""

RARELY = 20
"""A run takes one of so many where each takes a second or so."""

FULL = os.environ.get("OPTPIPE_TEST_SIZE") == "full"

_T = TypeVar("_T")


def _seed() -> int:
    """The first digits of the committed tree, so that a commit that is moved, but not changed, keeps its seed."""
    command = ["git", "rev-parse", "HEAD^{tree}"]
    try:
        tree = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0  # the sources came without git
    return int(tree[:8], 16)


SEED = int(os.environ.setdefault("OPTPIPE_TEST_SEED", str(_seed())))
"""Processes that share one run inherit it."""


def examples(count: int, share: int = SHARE) -> int:
    """How many of `count` random examples this run draws: one of `share`."""
    return count if FULL else -(-count // share)


def some(cases: Sequence[_T], share: int = SHARE) -> list[_T]:
    """The cases of this run, in their order: one of `share`, at least one, or all at full size."""
    if FULL:
        return list(cases)
    chosen = Random(SEED).sample(range(len(cases)), examples(len(cases), share))
    return [cases[k] for k in sorted(chosen)]
