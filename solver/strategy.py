"""Several searches at once: each lane is a thread that gives its searches their turns, over and over."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Thread

from optpipe.problem import Problem
from solver.board import Board
from solver.limits import Answer, Limits, Start
from solver.searches import is_ready

Search = Callable[[Problem, Limits, Start, Callable[[Answer], None]], Answer]


@dataclass(frozen=True)
class Turn:
    """A search by its method's name, and the share of the time still left (or of all the work) that a turn may take."""

    method: str
    search: Search
    share: float
    workers: int = 1
    once: bool = False


Lane = Sequence[Turn]

EARLY = 0.95
"""A search that ends before this share of its time has nothing more to try."""

GRACE_S = 0.3
"""Time over the limit in which searches may still end by themselves."""

PAUSE_S = 0.05
"""Between two looks whether the kernels of a search are compiled by now; until then others have its turn."""

SEEDS = 2**31
"""As many seeds do solvers know: theirs are integers of 32 bits, not negative."""

_THREAD_NAME = "lane"


def run_lanes(problem: Problem, board: Board, lanes: Sequence[Lane]) -> None:
    """Search until the board says stop, the limits are reached, or every lane has nothing more to do.

    A search that prepares or ends for long on a large problem is not waited for: the board is closed at the limit, and
    what still runs is told to stop and heard no more. An exception in a lane stops the others and is raised here.
    """
    failures: list[BaseException] = []

    def run(lane: Lane) -> None:
        try:
            _run_lane(problem, board, lane)
        except BaseException as failure:
            failures.append(failure)
            board.stop.request()

    threads = [Thread(target=run, args=(lane,), name=_THREAD_NAME, daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_patience_s(board))
    board.close()
    if failures:
        raise failures[0]


def wait_for_outlived(seconds: float) -> None:
    """Wait until every search of this process that outlived its limit has ended too, for at most `seconds` in all."""
    until = time.perf_counter() + seconds
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            thread.join(max(until - time.perf_counter(), 0.0))


def _patience_s(board: Board) -> float | None:
    """How long to wait for a lane; as long as it takes where work is counted and not time."""
    limits = board.limits
    return None if limits.deterministic_limit is not None else limits.time_left_s + GRACE_S


def _run_lane(problem: Problem, board: Board, lane: Lane) -> None:
    turns = deque(lane)
    taken = 0
    while turns and not board.stop.requested and not _over(board.limits):
        ready = next((turn for turn in turns if is_ready(turn.search)), None)
        if ready is None:
            time.sleep(PAUSE_S)
            continue
        while (turn := turns.popleft()) is not ready:
            turns.append(turn)
        if _take(problem, board, turn, taken // len(lane)):
            turns.append(turn)
        taken += 1


def _take(problem: Problem, board: Board, turn: Turn, round_number: int) -> bool:
    """Let one search run from what the board knows now. Returns whether another turn may be worth it.

    It is not where a search ended before its time and found nothing: it would only do so again.
    """
    limits = board.limits.part(turn.share)
    limits = replace(limits, workers=turn.workers, seed=(limits.seed + round_number) % SEEDS, cancel=board.stop)
    before = board.best

    def offer(answer: Answer) -> None:
        board.offer(answer, turn.method)

    offer(turn.search(problem, limits, board.start(), offer))
    if turn.once or limits.deterministic_limit is not None:
        return False
    return board.best is not before or limits.seconds >= EARLY * limits.time_limit_s


def _over(limits: Limits) -> bool:
    return limits.deterministic_limit is None and limits.seconds >= limits.time_limit_s
