"""Child process of a solve: reads one problem from stdin, writes incumbents and one answer to stdout.

Started by `solver.process.Child` as ``python -m solver.process.child PARENT_PID``.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import traceback
from dataclasses import replace
from threading import Condition, Lock, Thread
from typing import BinaryIO

from optpipe.errors import OptPipeError
from optpipe.ops import Orders
from optpipe.problem import Problem
from solver.kernels import WARM, are_ready
from solver.limits import Limits
from solver.process import channel
from solver.process.channel import Limit, Message
from solver.process.parent import load_uncompiled, load_verifier
from solver.process.start import claim_stdout, end_with_parent
from solver.solution import Feed, Progress, Solution

LEAST_SEARCH_S = 0.25
"""Least time of a search, however long the start took (or its whole limit, if less): enough for a published schedule.

For one of a large problem it may not be; then the parent has one (`solver.process.parent`).
"""

LEAST_PAUSE_S = 0.2
MOST_PAUSE_S = 0.7
"""Seconds between two incumbents: four times as long as sending one takes, within these."""

EARLY = 0.95
"""A search that ends before this share of its time was not ended by the clock."""


def main() -> None:
    """Answer one request, then end."""
    end_with_parent(int(sys.argv[1]))
    outbox = Outbox(claim_stdout())
    compiled = are_ready(WARM)
    if compiled:
        _load()
    request = sys.stdin.buffer.readline()
    if not request:
        return
    problem, method, given, starts = channel.read_request(json.loads(request))
    if not compiled:
        load_uncompiled(problem, "solver.solve")
    least_s = given.seconds + min(LEAST_SEARCH_S, given.time_limit_s)
    limits = replace(given, time_limit_s=max(given.time_limit_s, least_s))
    feed = Feed()
    Thread(target=_obey, args=(limits, feed), name="obey", daemon=True).start()
    # Ended at once, whatever happens: at a usual end Python aborts, since `_obey` still holds the lock of stdin, and a
    # traceback would be followed by that of the abort, which says nothing of the reason.
    try:
        outbox.end(_answer(problem, method, limits, starts, outbox, feed))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _load() -> None:
    """Load what every solve needs; where no problem is there yet, what only searches need as well."""
    import solver.solve  # noqa: F401 (with the parent's death and this process's output settled)
    from solver import searches

    load_verifier()
    waits = not select.select([sys.stdin], [], [], 0)[0]
    if waits:
        searches.load_searches()


def _answer(problem: Problem, method: str, limits: Limits, starts: list[Orders], outbox: Outbox, feed: Feed) -> Message:
    """The result message; the parent verifies it."""
    from solver.solve import search

    try:
        solution = search(problem, method, limits, outbox.offer, starts, outbox.searching, feed)
    except OptPipeError as error:
        return channel.error_message(error)
    except MemoryError:
        return channel.OUT_OF_MEMORY
    sent = outbox.flushed()
    answer = channel.solution_message(
        "answer", Progress(solution, limits.seconds), with_orders=sent is None or sent is not solution.orders
    )
    return answer | {"limit": _limit(solution, method, limits)}


def _limit(solution: Solution, method: str, limits: Limits) -> Limit | None:
    """Reason why the search ended early; None if it was done."""
    from solver.methods import METHODS

    if solution.gap == 0:
        return None
    if limits.cancel.requested:
        return "interrupted"
    if solution.gap <= limits.gap:
        return "gap"
    if METHODS[method].kind == "published":
        return None
    return "time" if limits.deterministic_limit is not None or limits.seconds >= EARLY * limits.time_limit_s else None


class Outbox:
    """Sends the newest incumbent now and then, from a thread of its own: a flood of them delays no search."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._changed = Condition()
        self._writing = Lock()
        self._newest: Progress | None = None
        self._sent: Orders | None = None
        self._ended = False
        self._sender = Thread(target=self._send_newest, name="outbox", daemon=True)
        self._sender.start()

    def offer(self, progress: Progress) -> None:
        """Take a better incumbent, from any thread."""
        with self._changed:
            self._newest = progress
            self._changed.notify()

    def searching(self) -> None:
        """Say that all published schedules were tried: at once, since the parent's clock depends on it."""
        self._write(channel.SEARCHING)

    def flushed(self) -> Orders | None:
        """Send the newest incumbent if it is still here, and take no more; the orders that were sent last."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._sender.join()
        return self._sent

    def end(self, last: Message) -> None:
        """Send the newest incumbent if it is still here, then the last message."""
        self.flushed()
        self._write(last)

    def _send_newest(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest or self._ended)
                progress, self._newest = self._newest, None
            if progress is None:
                return
            began = time.perf_counter()
            orders = progress.solution.orders
            self._write(channel.solution_message("incumbent", progress, with_orders=orders is not self._sent))
            self._sent = orders
            took = time.perf_counter() - began
            with self._changed:
                self._changed.wait_for(lambda: self._ended, min(max(4 * took, LEAST_PAUSE_S), MOST_PAUSE_S))

    def _write(self, message: Message) -> None:
        line = channel.to_line(message)
        with self._writing:
            self._out.write(line)
            self._out.flush()


def _obey(limits: Limits, feed: Feed) -> None:
    """Cancel on request, pass on what other solves find; end at once where the parent has gone."""
    for text in sys.stdin.buffer:
        message = json.loads(text)
        if message == channel.CANCEL:
            limits.cancel.request()
        else:
            feed.offer(channel.read_solution(message, Solution()).solution)
    os._exit(1)


if __name__ == "__main__":
    main()
