"""Program checker: finds deadlocks, races and memory faults on one machine before anything runs.

Deadlocks: the program is executed as if every device had one stream and every send blocked until its receive (a
rendezvous, as NCCL does for large messages), and every exchange until all devices have come to it. A program that ends
under this rule ends on any transport and with any number of streams, since every wait is for an action earlier in the
list. Races: the dependencies of each action must follow from the order of streams and the waits alone
(`check_events`).

`Clocks` gives the actions that have surely ended when another one starts. So an executor that keeps streams in order
and obeys the waits starts nothing too early, under any durations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from optpipe.compile.events import Clock, Clocks, Key, Rules, local_needs
from optpipe.compile.memory import check_memory, host_bytes, unit_stage
from optpipe.compile.program import EXCHANGES, RECEIVES, SENDS, Action, Message, Program, Slab, excerpt
from optpipe.errors import BudgetError, DeadlockError, OrderError
from optpipe.ops import Op
from optpipe.problem import Problem


def check_program(program: Program, problem: Problem | None = None) -> None:
    """Raise if the program cannot run or exceeds the budgets of `problem`.

    OrderError: an action is repeated or on the wrong device, precedes an action of its device that it needs, needs an
    action that is missing or that no event makes it wait for, two activations use one slab at a time, or messages
    between two devices are received in another order than sent. DeadlockError: devices wait for one another; it names
    the blocked actions. BudgetError: a device, or its slabs on the host, hold more than the problem allows.
    """
    positions = _positions(program)
    rules = Rules.of(program, positions)
    _check_list_order(program, rules, positions)
    _check_first_in_first_out(program)
    check_events(program, rules, problem)
    _check_rendezvous(program)
    if problem is not None:
        check_memory(program, problem)


def _positions(program: Program) -> dict[Key, tuple[int, int]]:
    """Device and list index of each action. Raises OrderError for a repeated or misplaced one."""
    positions: dict[Key, tuple[int, int]] = {}
    for d, actions in enumerate(program.devices):
        for k, action in enumerate(actions):
            key = action[:3]
            if key in positions:
                raise OrderError(f"{action} is in the program more than once")
            if program.on_devices(action.kind):
                if action.stage != d:
                    raise OrderError(f"{action} is on device {d}, but runs on device {action.stage}")
            elif program.placement[action.stage] != d:
                home = program.placement[action.stage]
                raise OrderError(f"{action} is on device {d}, but stage {action.stage} is on device {home}")
            positions[key] = d, k
    return positions


def _check_list_order(program: Program, rules: Rules, positions: dict[Key, tuple[int, int]]) -> None:
    """Each action comes after the actions of its device that it needs."""
    for d, actions in enumerate(program.devices):
        for k, action in enumerate(actions):
            for need in (*rules.needs(action[:3]), *action.waits):
                if need not in positions:
                    raise OrderError(f"{action} needs {Op(*need)}, which is not in the program:\n{excerpt(actions, k)}")
                home, index = positions[need]
                if home == d and index > k:
                    raise OrderError(
                        f"device {d} runs {action} at place {k}, before {Op(*need)} at place {index}, which it needs:\n"
                        f"{excerpt(actions, k)}"
                    )


def _check_first_in_first_out(program: Program) -> None:
    """Each directed pair of devices receives its messages in the order in which they are sent."""
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for d, actions in enumerate(program.devices):
        for action in actions:
            if action.kind in SENDS and action.peer is not None:
                sent[d, action.peer].append(action.message)
            elif action.kind in RECEIVES and action.peer is not None:
                received[action.peer, d].append(action.message)
    for pair in sent.keys() | received.keys():
        if sent[pair] != received[pair]:
            for index, messages in enumerate(zip_longest(sent[pair], received[pair])):
                if messages[0] != messages[1]:
                    as_sent, as_received = ("nothing" if m is None else str(tuple(m)) for m in messages)
                    raise OrderError(
                        f"message {index} from device {pair[0]} to device {pair[1]} is sent as {as_sent} but received "
                        f"as {as_received} (direction, boundary, microbatch). Maybe the lists come from two different "
                        "schedules."
                    )


def _check_rendezvous(program: Program) -> None:
    """Advance every device as far as possible, a send together with its receive. Raises DeadlockError."""
    next_index = [0] * len(program.devices)
    advanced = True
    while advanced:
        advanced = False
        for d, actions in enumerate(program.devices):
            while next_index[d] < len(actions):
                action = actions[next_index[d]]
                if action.kind in EXCHANGES:
                    heads = [_next(program, next_index, other) for other in range(len(program.devices))]
                    if any(head is None or _meeting(head) != _meeting(action) for head in heads):
                        break
                    next_index = [index + (other != d) for other, index in enumerate(next_index)]
                elif action.peer is not None:
                    partner = _next(program, next_index, action.peer)
                    if partner is None or partner.peer != d or partner.message != action.message:
                        break
                    next_index[action.peer] += 1
                next_index[d] += 1
                advanced = True
    if any(index < len(actions) for index, actions in zip(next_index, program.devices, strict=True)):
        raise _deadlock(program, next_index)


def _next(program: Program, next_index: Sequence[int], device: int) -> Action | None:
    actions = program.devices[device]
    return actions[next_index[device]] if next_index[device] < len(actions) else None


def _meeting(action: Action) -> tuple[str, int]:
    """Kind and microbatch of an exchange, equal on all devices."""
    return action.kind, action.microbatch


def _deadlock(program: Program, next_index: Sequence[int]) -> DeadlockError:
    """Find a cycle: each blocked device waits for its peer, which is blocked too."""
    heads = [_next(program, next_index, d) for d in range(len(program.devices))]
    path: list[int] = []
    device = next(d for d, head in enumerate(heads) if head is not None)
    while device not in path:
        path.append(device)
        head = heads[device]
        if head is None:  # a peer of a blocked device is not done: first in, first out holds
            raise OrderError(f"the list of device {device} ends without {heads[path[-1]]}, which others come to")
        if head.kind in EXCHANGES:
            device = next(d for d, other in enumerate(heads) if other is None or _meeting(other) != _meeting(head))
            continue
        assert head.peer is not None, "only messages and exchanges block"
        device = head.peer
    cycle = path[path.index(device) :][::-1]
    blocked = sum(len(a) - k for a, k in zip(program.devices, next_index, strict=True))
    return DeadlockError([str(heads[d]) for d in cycle], blocked)


def check_events(program: Program, rules: Rules, problem: Problem | None = None) -> None:
    """Raise OrderError if an action may start too early, BudgetError if offloads may exceed the host budget."""
    for d, actions in enumerate(program.devices):
        clocks, host = Clocks(), _Host(program, d, problem)
        for k, (action, needs) in enumerate(zip(actions, local_needs(actions, rules), strict=True)):
            for wait in action.waits:
                if not clocks.issued(wait):
                    raise OrderError(
                        f"{action} waits for {wait}, which is not before it in the list of device {d}:\n"
                        f"{excerpt(actions, k)}"
                    )
            clock = clocks.after(clocks.stream(action.kind), action.waits)
            for need in needs:
                if not clocks.covers(clock, need) and need not in action.waits:
                    raise OrderError(
                        f"device {d} may begin {action} before {Op(*need)} is over, which it needs: no wait and no "
                        f"order of a stream says so:\n{excerpt(actions, k)}"
                    )
            host.issue(action, clocks, clock)
            clocks.issue(action[:3], clock)


@dataclass
class _Host:
    """Slabs of one device while its list is issued, and the worst-case host memory of its offloads."""

    program: Program
    device: int
    problem: Problem | None
    last_user: dict[int, Action] = field(default_factory=dict)
    offloaded_bytes: int = 0
    reloaded_bytes: list[int] = field(default_factory=lambda: [0])

    def issue(self, action: Action, clocks: Clocks, clock: Clock) -> None:
        """Account for an action that starts at `clock`. Raises OrderError or BudgetError."""
        if action.kind == "O":
            slab = self._claim_slab(action, clocks, clock)
            if self.problem is not None:
                self._hold(action, slab, clock, self.problem)
        elif action.kind == "R" and self.problem is not None:
            self.reloaded_bytes.append(self.reloaded_bytes[-1] + self._moved_bytes(action, self.problem))

    def _claim_slab(self, action: Action, clocks: Clocks, clock: Clock) -> Slab:
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
        return slab

    def _moved_bytes(self, action: Action, problem: Problem) -> int:
        return host_bytes(*unit_stage(self.program, problem, action.stage, action.microbatch))

    def _hold(self, action: Action, slab: Slab, clock: Clock, problem: Problem) -> None:
        size_bytes = self._moved_bytes(action, problem)
        if size_bytes > slab.size_bytes:
            raise OrderError(f"{action} on device {self.device} moves {size_bytes} bytes, its slab {slab.size_bytes}")
        self.offloaded_bytes += size_bytes
        held, budget = self.offloaded_bytes - self.reloaded_bytes[clock[2]], problem.host_memory_bytes
        if budget is not None and held > budget:
            raise BudgetError(
                f"device {self.device} may hold {held} bytes on the host at {action}, but host_memory_bytes is "
                f"{budget}. Maybe the schedule lacks waits of its offloads for reloads: run 'optpipe verify' on it."
            )
