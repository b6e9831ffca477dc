"""Parent of a solving child: hard limits, verified results, and a published schedule as fallback.

A child may hang or die while it loads. What its search would begin with is then made here, in the same order
(`solver.warm_starts`), and only once a child is late, so that a usual solve does nothing twice. Loading and making
these schedules is what a child does first, so on a busy machine it is given the time that it waited for a processor,
and for each of these schedules the whole limit.

And what a solve does where no kernel is compiled yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from threading import Thread
from typing import Literal

import numba

from optpipe.errors import InfeasibleError, ModelTooLargeError, NoSolutionError, OptPipeError
from optpipe.ops import Orders
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from solver.limits import Cancel, Limits
from solver.process import channel
from solver.process.channel import Child, Heartbeat, Limit, Message
from solver.scale import count_modes, count_ops
from solver.solution import Feed, Progress, Solution

TICK_S = 0.02
"""Seconds between two checks of the limits."""

HEARTBEAT_S = 0.5
"""Seconds between two heartbeats."""

STOP_S = 1.0
"""Time over its limit in which a child may still stop by itself and say what it found."""

CANCEL_S = 0.4
"""Time in which a cancelled child may do so."""

LATE = 0.25
"""A child that brought nothing in this share of the time is late: the parent begins to make a schedule itself."""

MOST_WAITED_S = 5.0
"""Seconds, besides the time limit itself, for which a child that finds no free processor is waited for at most."""

VERIFY_S_PER_OP = 5e-6
"""Seconds to read, time and verify an answer, per op (4 us measured on one core). Part of the limit."""

VERIFY_S_PER_DEVICE = 4e-4
VERIFY_S_PER_MODE = 25e-6
"""The same per device, with ops or without, and per mode of a stage for each class of units."""

LARGE_S = 0.5
"""Seconds to verify an answer from which a problem is large: there, what a busy machine adds to them matters."""

MOST_SLOWER = 2.0
"""Most times by which verifying is expected to take longer on a busy machine: searches need the rest."""

OnEvent = Callable[[Progress | Heartbeat], None]


class SolverDiedError(OptPipeError):
    """The process of a solve ended without an answer, by a signal or a bug; `best` is what it had found by then."""

    def __init__(self, how: str, best: Schedule | None) -> None:
        self.best = best
        super().__init__(f"the solver's process {how}. Maybe the machine ran out of memory, or this is a bug.")


@dataclass(frozen=True)
class ChildResult:
    """Outcome of a solve: the best schedule, verified, or the error that says why there is none.

    `limit` is what stopped the search; None where it was done. `from_cache`: nothing was searched.
    """

    schedule: Schedule | None
    reason: Literal["optimal", "feasible", "infeasible", "no_solution"]
    limit: Limit | None
    error: InfeasibleError | NoSolutionError | None = None
    from_cache: bool = False

    def schedule_or_error(self) -> Schedule:
        """The schedule. Raises InfeasibleError or NoSolutionError where there is none."""
        if self.schedule is None:
            assert self.error is not None
            raise self.error
        return self.schedule


def solve_in_child(
    problem: Problem,
    method: str = "auto",
    limits: Limits | None = None,
    memory_limit_bytes: int | None = None,
    on_event: OnEvent | None = None,
    child: Child | None = None,
    starts: Sequence[Orders] = (),
    feed: Feed | None = None,
) -> ChildResult:
    """`solver.solve.solve` in a process of its own, with limits that hold whatever happens in there.

    There is an answer at the time limit plus two seconds, and a second after `limits.cancel` is requested, with the
    best incumbent; a child that holds more than `memory_limit_bytes` is ended likewise. Where it brought none,
    that is a published schedule made here. The answer comes later by as long as the child, while it loads and makes
    published schedules, is ready to run and finds no free processor: the time limit plus `MOST_WAITED_S` at most.
    `on_event` is called from here with every incumbent within a second, and with a heartbeat every half second; it
    should return at once. `child`: one that was started ahead of time, by this thread; it is used up. `starts`: see
    `solve`. `feed`: solutions that other solves of this problem find meanwhile.

    Raises what `solve` raises, except that there being no schedule is a result; SolverDiedError; and ModelTooLargeError
    where no schedule could be verified by then.
    """
    limits = limits or Limits()
    with child or Child() as running:
        refuse_beyond_verification(problem, limits.time_limit_s)
        Thread(target=load_verifier, name="load", daemon=True).start()
        on_event = on_event or (lambda _: None)
        search = _Solve(running, problem, limits, memory_limit_bytes, on_event, feed or Feed(), method)
        return search.result(starts)


def verification_s(problem: Problem) -> float:
    """Seconds that it takes to read, time and verify a schedule of the problem, about."""
    per_op = count_ops(problem) * VERIFY_S_PER_OP
    return per_op + len(problem.devices) * VERIFY_S_PER_DEVICE + count_modes(problem) * VERIFY_S_PER_MODE


def refuse_beyond_verification(problem: Problem, time_limit_s: float) -> None:
    """Raise ModelTooLargeError where no schedule could be verified in time, whatever is found."""
    verify_s = verification_s(problem)
    if verify_s > time_limit_s + STOP_S:
        raise ModelTooLargeError(
            f"this problem has {count_ops(problem):,} ops, {len(problem.devices):,} devices and "
            f"{count_modes(problem):,} modes (a stage's for each kind of microbatch): to verify a schedule of it takes "
            f"about {verify_s:.0f} s, but the time limit is {time_limit_s:g} s. Maybe solve fewer microbatches (a "
            "schedule repeats itself after its warm-up), or allow more time (--time-limit)."
        )


class Watch(ABC):
    """A child at work, seen from the parent: what it says, and the limits that it is held to.

    It ends with a `last` message, or for a `stop_reason`; with neither, the child died.
    """

    verify_s = 0.0
    """Seconds that an answer takes to be verified once the child has ended."""

    def __init__(
        self, child: Child, limits: Limits, memory_limit_bytes: int | None, on_beat: Callable[[Heartbeat], None]
    ) -> None:
        self.child, self.limits = child, limits
        self.memory_limit_bytes, self.on_beat = memory_limit_bytes, on_beat
        self.kill_at_s = limits.time_limit_s + STOP_S
        self.last: Message | None = None
        self.stop_reason: Limit | None = None
        self.cancelled = False

    def watch(self) -> None:
        """Listen until the child has ended or was ended."""
        next_beat_s = self.limits.seconds
        while not (self.last or self.child.silent):
            for message in self.child.listen(TICK_S):
                self.take(message)
            self.between()
            self._hold_to_limits()
            if self.limits.seconds >= next_beat_s:
                self.on_beat(Heartbeat(self.limits.seconds, self.child.memory_bytes))
                next_beat_s = self.limits.seconds + HEARTBEAT_S

    @abstractmethod
    def take(self, message: Message) -> None:
        """Take a message; the last one is kept in `last`."""

    @abstractmethod
    def between(self) -> None:
        """Do what is to be done between messages."""

    @property
    def seconds_given(self) -> float:
        """Seconds that the child has had."""
        return self.limits.seconds

    def _hold_to_limits(self) -> None:
        if self.stop_reason or self.last:
            return
        if self.limits.cancel.requested and not self.cancelled:
            self.cancelled = True
            self.child.say(channel.CANCEL)
            self.kill_at_s = self.limits.seconds + max(0.0, CANCEL_S - self.verify_s)
        held = self.child.memory_bytes if self.memory_limit_bytes is not None else None
        if held is not None and self.memory_limit_bytes is not None and held > self.memory_limit_bytes:
            self._end("memory")
        elif self.seconds_given > self.kill_at_s:
            self._end("interrupted" if self.cancelled else "time")

    def _end(self, limit: Limit) -> None:
        self.stop_reason = limit
        self.child.kill()


class _Solve(Watch):
    """One solve, seen from the parent."""

    def __init__(
        self,
        child: Child,
        problem: Problem,
        limits: Limits,
        memory_limit_bytes: int | None,
        on_event: OnEvent,
        feed: Feed,
        method: str,
    ) -> None:
        super().__init__(child, limits, memory_limit_bytes, on_event)
        self.problem, self.method = problem, method
        self.on_event = on_event
        self.feed = feed
        self.best = Solution()
        self.verify_s = verification_s(problem)
        self.is_large = self.verify_s > LARGE_S
        self.search_s = max(limits.time_limit_s - self.verify_s, limits.time_limit_s / 2)
        self.kill_at_s = self.search_s + STOP_S
        self.stop_requested = False
        self.searching = False
        self.waited_s = 0.0
        self.slower = 1.0
        self.waited_before_s = child.kept_waiting_s
        self.fallback = Fallback(problem, limits, method)

    def result(self, starts: Sequence[Orders]) -> ChildResult:
        """Let the child search, watch it to its end, then verify the best that it found."""
        limits = replace(self.limits, time_limit_s=self.search_s)
        self.child.say(channel.request_message(self.problem, self.method, limits, starts))
        self.watch()
        if self.stop_reason == "time" and self.best.orders is None:
            self._wait_for_fallback()
        self.fallback.stop()
        kind = self.last["type"] if self.last else ""
        if kind == "answer":
            return self._answered()
        if kind == "error":
            return self._failed()
        limit: Limit | None = "memory" if kind == "out_of_memory" else self.stop_reason
        best = self._schedule_of_best()
        if limit is None:
            raise SolverDiedError(self.child.how_it_ended(), best)
        return self._found(best, limit) if best else self._nothing(limit)

    def between(self) -> None:
        """Pass on what others found, tell a large search to end, make a schedule here where the child is late."""
        self._pass_on()
        ends = self.stop_reason or self.last or self.cancelled or self.stop_requested
        if not ends and self.limits.seconds > self._end_at_s:
            self.stop_requested = True
            self.child.say(channel.CANCEL)
            self.kill_at_s = self.seconds_given + STOP_S
        if self.best.orders is None and self.seconds_given > LATE * self.search_s:
            self.fallback.begin()

    def _pass_on(self) -> None:
        fed = self.feed.pop()
        if fed is not None and (fed.value_us < self.best.value_us or fed.bound_us > self.best.bound_us):
            self.child.say(channel.solution_message("fed", Progress(fed, self.limits.seconds)))

    def _wait_for_fallback(self) -> None:
        """Wait until the fallback has a schedule, and half a second for better ones.

        A child can be kept from a processor or from the disk that it loads from until its time is up, and the thread
        here as well. An answer that is late by that is better than one microbatch after another.
        """
        self.fallback.begin()
        until_s = self.limits.seconds + self.limits.time_limit_s + MOST_WAITED_S
        while self.fallback.best.orders is None and self.fallback.running:
            if self.limits.seconds > until_s or self.limits.cancel.requested:
                return
            self.fallback.wait(TICK_S)
        self.fallback.wait(0.5)

    def take(self, message: Message) -> None:
        """Take an incumbent, or the last message."""
        if message == channel.SEARCHING:
            self.searching = True
            return
        if message["type"] != "incumbent":
            self.last = message
            return
        progress = channel.read_solution(message, self.best)
        self.best = progress.solution
        self.on_event(progress)

    @property
    def _end_at_s(self) -> float:
        """Time at which a large problem's search must end to leave time to verify its answer on a machine so busy."""
        if not self.is_large or self.best.orders is None or self.limits.deterministic_limit is not None:
            return float("inf")
        verify_s = min(self.slower, MOST_SLOWER) * self.verify_s
        return max(self.limits.time_limit_s - verify_s, self.limits.time_limit_s / 2)

    @property
    def seconds_given(self) -> float:
        """Seconds since the start, without those in which the child found no free processor before it searched.

        Waiting extends the limit to twice its length and `MOST_WAITED_S` at most: on a machine that never has time for
        the child, there is an answer all the same. To a request to cancel all seconds count. For a large problem,
        whose published schedules take many seconds, it counts no longer once there is one of them.
        """
        if not (self.searching or (self.is_large and self.best.orders is not None)):
            most_s = self.limits.time_limit_s + MOST_WAITED_S
            self.waited_s = min(self.child.kept_waiting_s - self.waited_before_s, most_s)
            self.slower = self.limits.seconds / max(self.limits.seconds - self.waited_s, TICK_S)
        return self.limits.seconds - (0.0 if self.cancelled else self.waited_s)

    def _answered(self) -> ChildResult:
        assert self.last is not None
        # Work that was counted is the same in every run; the clock is not.
        work = self.limits.deterministic_limit
        answer = channel.read_solution(self.last, self.best)
        schedule = answer.solution.to_schedule(self.problem, answer.seconds if work is None else work)
        limit = self.last["limit"]
        return self._found(schedule, "time" if limit == "interrupted" and not self.cancelled else limit)

    def _failed(self) -> ChildResult:
        assert self.last is not None
        error = channel.read_error(self.last)
        if isinstance(error, InfeasibleError):
            return ChildResult(None, "infeasible", None, error)
        if isinstance(error, NoSolutionError):
            return ChildResult(None, "no_solution", "interrupted" if self.cancelled else "time", error)
        raise error

    def _schedule_of_best(self) -> Schedule | None:
        best = min(self.best, self.fallback.best, key=lambda solution: solution.value_us)
        if best.orders is None:
            return None
        best = replace(best, bound_us=max(self.best.bound_us, self.fallback.best.bound_us))
        return best.to_schedule(self.problem, self.limits.seconds)

    @staticmethod
    def _found(schedule: Schedule, limit: Limit | None) -> ChildResult:
        if schedule.status == "optimal":
            return ChildResult(schedule, "optimal", None)
        return ChildResult(schedule, "feasible", limit)

    def _nothing(self, limit: Limit) -> ChildResult:
        """Ended from outside before anything was found: the floor if it fits and one waits."""
        from solver.serial import known_budgets_bytes, serial_orders

        if self.fallback.error:
            raise self.fallback.error
        no_floor = limit == "interrupted" or _is_published(self.method)
        floor = None if no_floor else serial_orders(self.problem)
        if floor is not None:
            solution = Solution(floor, float("inf"), self.fallback.best.bound_us, "floor")
            schedule = solution.to_schedule(self.problem, self.limits.seconds)
            return self._found(schedule, limit)
        why: dict[Limit, str] = {
            "time": f"in {self.limits.seconds:.1f} s. Maybe allow more time (--time-limit)",
            "interrupted": "before the interruption. Maybe allow more time (--time-limit)",
            "memory": f"before the solver held {self.memory_limit_bytes} bytes. Maybe allow more (--memory-limit)",
        }
        text = (
            f"nothing within the budgets was found {why[limit]}, or raise devices[].memory_bytes to "
            f"{known_budgets_bytes(self.problem)}, which is known to do."
        )
        return ChildResult(None, "no_solution", limit, NoSolutionError(text))


def _is_published(method: str) -> bool:
    """True for a published schedule: what is made here in its stead must be the same one."""
    from solver.methods import METHODS

    return method in METHODS and METHODS[method].orders is not None


class Fallback:
    """The published schedule that was asked for, or the best one for a search; made in a thread, `best` as it goes.

    `error`: why the one that was asked for cannot be made, or the search cannot begin.
    """

    def __init__(self, problem: Problem, limits: Limits, method: str = "auto") -> None:
        self.best = Solution()
        self.error: OptPipeError | None = None
        self._problem, self._method = problem, method
        self._limits = replace(limits, cancel=Cancel())
        self._thread: Thread | None = None

    def begin(self) -> None:
        """Begin, unless that was done before."""
        if self._thread is None:
            self._thread = Thread(target=self.make, name="fallback", daemon=True)
            self._thread.start()

    @property
    def running(self) -> bool:
        """True while schedules are being made."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for the last schedule, so many seconds at most."""
        if self._thread is not None:
            self._thread.join(seconds)

    def stop(self) -> None:
        """Begin no further one: nobody waits for it."""
        self._limits.cancel.request()

    def make(self) -> None:
        """Make the bound, and then the schedules, one after another."""
        from solver.frozen import solution_without_backwards, with_backwards
        from solver.methods import method_named, refuse_unsupported
        from solver.serial import with_statable_peaks
        from solver.solve import search
        from solver.strategy import SharedIncumbent
        from solver.warm_starts import offer_published

        try:
            chosen = method_named(self._method)
            if chosen.orders is not None:
                self.best = search(self._problem, chosen.name, self._limits)
                return
            problem = with_statable_peaks(with_backwards(self._problem))
            refuse_unsupported(chosen, problem)
        except OptPipeError as error:
            self.error = error
            return

        def keep(progress: Progress) -> None:
            self.best = solution_without_backwards(self._problem, progress.solution)

        shared = SharedIncumbent(problem, self._limits, keep)
        self.best = shared.best
        with self._limits.cancel.calling(shared.stop.request):
            offer_published(problem, shared)


INTERPRETED_OPS = 2000
"""Ops up to which published schedules take about a second without compiled kernels."""


def load_uncompiled(problem: Problem, *modules: str) -> None:
    """Import modules while another process compiles their kernels; for a small problem these are interpreted here.

    A fraction of a second of Python is less than seconds of compiling. It is for a process that solves this problem
    alone. Searches are no part of it: they are imported when they begin, and their kernels are compiled by then.
    """
    # Numba looks at this where a kernel is defined; its stubs do not tell of it.
    numba.config.DISABLE_JIT = count_ops(problem) <= INTERPRETED_OPS  # type: ignore[attr-defined]
    try:
        for module in modules:
            import_module(module)
    finally:
        numba.config.DISABLE_JIT = False  # type: ignore[attr-defined]


def load_verifier() -> None:
    """Load what times and verifies schedules, compiled kernel included, by finishing the smallest one there is."""
    from solver.build import build_schedule  # most of what is slow
    from solver.published.one_stage import one_f_one_b

    stage = {"device": 0, "forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    problem = Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "microbatches": 1,
            "devices": [{"memory_bytes": None}],
            "stages": [stage | {"activation_bytes": 0, "backward_weight_bytes": 0}],
        }
    )
    build_schedule(problem, one_f_one_b(problem), 0.0, "", 0.0)
