"""Program checker: finds deadlocks, races and memory faults on one machine before anything runs.

Deadlocks: the program is played as if every device had one stream and every send waited for its receive (a rendezvous,
as NCCL does with large messages). A program that runs to its end so runs to its end on any transport and with any
number of streams, since every wait is for an action earlier in the list. Races: what must be over when an action
begins has to follow from the order of streams and the waits alone (`check_events`).

Each device's list is played with `Clocks`, which know what is over for certain when an action begins. An executor that
keeps streams in order and obeys the waits can then do nothing too early, however long anything takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from optpipe.compile.events import Clock, Clocks, Key, Rules, local_needs
from optpipe.compile.memory import check_memory, host_bytes
from optpipe.compile.program import RECEIVES, SENDS, Action, Message, Program, excerpt
from optpipe.errors import BudgetError, DeadlockError, OrderError
from optpipe.ops import Op
from optpipe.problem import Problem


def check_program(program: Program, problem: Problem | None = None) -> None:
    """Raise if the program cannot run, or does not fit into the budgets of `problem`.

    OrderError: an action is repeated or on the wrong device, comes before one on its device that it needs, needs one
    that is nowhere or that no event makes it wait for, two activations use one slab at a time, or messages between two
    devices are received in another order than sent. DeadlockError: devices wait for one another; it names the blocked
    actions. BudgetError: a device, or its slabs on the host, hold more than the problem allows.
    """
    places = _places(program)
    rules = Rules(program.placement, places)
    _check_list_order(program, rules, places)
    _check_first_in_first_out(program)
    check_events(program, rules, problem)
    _play(program)
    if problem is not None:
        check_memory(program, problem)


def _places(program: Program) -> dict[Key, tuple[int, int]]:
    """Device and place of each action."""
    places: dict[Key, tuple[int, int]] = {}
    for d, actions in enumerate(program.devices):
        for k, action in enumerate(actions):
            key = action[:3]
            if key in places:
                raise OrderError(f"{action} is in the program more than once")
            if program.placement[action.stage] != d:
                home = program.placement[action.stage]
                raise OrderError(f"{action} is on device {d}, but stage {action.stage} is on device {home}")
            places[key] = d, k
    return places


def _check_list_order(program: Program, rules: Rules, places: dict[Key, tuple[int, int]]) -> None:
    for d, actions in enumerate(program.devices):
        for k, action in enumerate(actions):
            for need in (*rules.needs(action[:3]), *action.waits):
                if need not in places:
                    raise OrderError(f"{action} needs {Op(*need)}, which is not in the program:\n{excerpt(actions, k)}")
                home, index = places[need]
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
            raise OrderError(_mismatch(*pair, sent[pair], received[pair]))


def _mismatch(source: int, target: int, sent: Sequence[Message], received: Sequence[Message]) -> str:
    index = next(
        (k for k, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b), min(len(sent), len(received))
    )

    def at(messages: Sequence[Message]) -> str:
        return str(tuple(messages[index])) if index < len(messages) else "nothing"

    return (
        f"message {index} from device {source} to device {target} is sent as {at(sent)} but received as "
        f"{at(received)} (direction, boundary, microbatch). Maybe the lists come from two different schedules."
    )


def _play(program: Program) -> None:
    """Advance every device as far as it goes; a send and its receive go together. Raises DeadlockError."""
    next_place = [0] * len(program.devices)
    moving = True
    while moving:
        moving = False
        for d, actions in enumerate(program.devices):
            while next_place[d] < len(actions) and _may_go(program, next_place, d):
                action = actions[next_place[d]]
                next_place[d] += 1
                if action.peer is not None:
                    next_place[action.peer] += 1
                moving = True
    if any(index < len(actions) for index, actions in zip(next_place, program.devices, strict=True)):
        raise _deadlock(program, next_place)


def _may_go(program: Program, next_place: Sequence[int], device: int) -> bool:
    """Whether a device's next action can go now: needs on its own device precede it in its list."""
    action = program.devices[device][next_place[device]]
    if action.peer is None:
        return True
    partner = _next(program, next_place, action.peer)
    return partner is not None and partner.peer == device and partner.message == action.message


def _next(program: Program, next_place: Sequence[int], device: int) -> Action | None:
    actions = program.devices[device]
    return actions[next_place[device]] if next_place[device] < len(actions) else None


def _deadlock(program: Program, next_place: Sequence[int]) -> DeadlockError:
    """Each blocked device waits for its peer, which is blocked too: follow them until a device repeats."""
    heads = [_next(program, next_place, d) for d in range(len(program.devices))]
    path: list[int] = []
    device = next(d for d, head in enumerate(heads) if head is not None)
    while device not in path:
        path.append(device)
        head = heads[device]
        assert head is not None, "first in, first out holds, so a peer of a blocked device is not done"
        assert head.peer is not None, "only messages block"
        device = head.peer
    cycle = path[path.index(device) :][::-1]
    blocked = sum(len(a) - k for a, k in zip(program.devices, next_place, strict=True))
    return DeadlockError([str(heads[d]) for d in cycle], blocked)


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


def _waits_too_early(clocks: Clocks, device: int, actions: Sequence[Action], index: int) -> OrderError:
    wait = next(wait for wait in actions[index].waits if not clocks.issued(wait))
    return OrderError(
        f"{actions[index]} waits for {wait}, which is not before it in the list of device {device}:\n"
        f"{excerpt(actions, index)}"
    )


def _begins_too_early(need: Key, device: int, actions: Sequence[Action], index: int) -> OrderError:
    return OrderError(
        f"device {device} may begin {actions[index]} before {Op(*need)} is over, which it needs: no wait and no order "
        f"of a stream says so:\n{excerpt(actions, index)}"
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
