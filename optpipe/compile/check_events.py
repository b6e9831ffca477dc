"""Checks that streams and waits alone keep everything in order: rules, memory of messages, and host buffers.

Each device's list is played with `Clocks`, which know what is over for certain when an action begins. An executor that
keeps streams in order and obeys the waits can then do nothing too early, however long anything takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optpipe.compile.actions import Action, Program, excerpt
from optpipe.compile.dependencies import Key, Rules
from optpipe.compile.events import Clock, Clocks, local_needs
from optpipe.compile.memory import host_bytes
from optpipe.errors import BudgetError, OrderError
from optpipe.orders import Op
from optpipe.problem import Problem


def check_events(program: Program, rules: Rules, problem: Problem | None = None) -> None:
    """Raise OrderError where an action may begin too early, BudgetError where offloads take too much of the host."""
    for d, actions in enumerate(program.devices):
        clocks, host = Clocks(), _Host(program, d, problem)
        for k, (action, needs) in enumerate(zip(actions, local_needs(actions, rules), strict=True)):
            if not all(map(clocks.issued, action.waits)):
                raise _waits_too_early(clocks, d, actions, k)
            clock = clocks.after(clocks.stream(action.kind), action.waits)
            for need in needs:
                if not clocks.covers(clock, need) and need not in action.waits:
                    raise _begins_too_early(need, d, actions, k)
            host.play(action, clocks, clock)
            clocks.issue(action[:3], clock)


def _waits_too_early(clocks: Clocks, device: int, actions: Sequence[Action], place: int) -> OrderError:
    wait = next(wait for wait in actions[place].waits if not clocks.issued(wait))
    return OrderError(
        f"{actions[place]} waits for {wait}, which is not before it in the list of device {device}:\n"
        f"{excerpt(actions, place)}"
    )


def _begins_too_early(need: Key, device: int, actions: Sequence[Action], place: int) -> OrderError:
    return OrderError(
        f"device {device} may begin {actions[place]} before {Op(*need)} is over, which it needs: no wait and no order "
        f"of a stream says so:\n{excerpt(actions, place)}"
    )


@dataclass
class _Host:
    """The slabs of one device while its list is played, and what its offloads hold at most under any timing."""

    program: Program
    device: int
    problem: Problem | None
    last_user: dict[int, Action] = field(default_factory=dict)
    offloaded_bytes: int = 0
    reloaded_bytes: list[int] = field(default_factory=lambda: [0])

    def play(self, action: Action, clocks: Clocks, clock: Clock) -> None:
        """Account for an action that begins when at least the actions of `clock` are over."""
        if action.kind == "O":
            self._check_slab(action, clocks, clock)
            self._check_bytes(action, clock)
        elif action.kind == "R" and self.problem is not None:
            self.reloaded_bytes.append(self.reloaded_bytes[-1] + host_bytes(self.problem, action.stage))

    def _check_slab(self, action: Action, clocks: Clocks, clock: Clock) -> None:
        slabs = self.program.slabs[self.device] if self.program.slabs else ()
        if action.slab is None or not 0 <= action.slab < len(slabs):
            raise OrderError(f"{action.key} on device {self.device} has slab {action.slab} of {len(slabs)}")
        slab = slabs[action.slab]
        if action.stage not in slab.stages:
            raise OrderError(f"{action} on device {self.device}: stage {action.stage} is not among {slab.stages}")
        before = self.last_user.get(action.slab)
        if before and not clocks.covers(clock, ("R", before.stage, before.microbatch)):
            raise OrderError(
                f"device {self.device} may begin {action} while R{before.stage}.{before.microbatch} still reads slab "
                f"{action.slab}: it has no wait for it"
            )
        self.last_user[action.slab] = action

    def _check_bytes(self, action: Action, clock: Clock) -> None:
        if self.problem is None:
            return
        size_bytes = host_bytes(self.problem, action.stage)
        assert action.slab is not None, "checked before"
        slab = self.program.slabs[self.device][action.slab]
        if size_bytes > slab.size_bytes:
            raise OrderError(f"{action} on device {self.device} moves {size_bytes} bytes, its slab {slab.size_bytes}")
        self.offloaded_bytes += size_bytes
        held, budget = self.offloaded_bytes - self.reloaded_bytes[clock[2]], self.problem.host_memory_bytes
        if budget is not None and held > budget:
            raise BudgetError(
                f"device {self.device} may hold {held} bytes on the host at {action}, but host_memory_bytes is "
                f"{budget}. Maybe the schedule lacks waits of its offloads for reloads: run 'optpipe verify' on it."
            )
