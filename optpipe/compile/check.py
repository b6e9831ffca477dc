"""Checks a program before it runs: a deadlock or a race on many devices is found here, on one.

Deadlocks: the program is played as if every device had one stream and every send waited for its receive (a rendezvous,
as NCCL does with large messages). A program that runs to its end so runs to its end on any transport and with any
number of streams, since every wait is for an action earlier in the list. Races: what must be over when an action
begins has to follow from the order of streams and the waits alone (`optpipe.compile.check_events`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from optpipe.compile.actions import RECEIVES, SENDS, Action, Message, Program, excerpt
from optpipe.compile.check_events import check_events
from optpipe.compile.dependencies import Key, Rules
from optpipe.compile.memory import check_memory
from optpipe.errors import DeadlockError, OrderError
from optpipe.orders import Op
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
                home, place = places[need]
                if home == d and place > k:
                    raise OrderError(
                        f"device {d} runs {action} at place {k}, before {Op(*need)} at place {place}, which it needs:\n"
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
    place = next(
        (k for k, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b), min(len(sent), len(received))
    )

    def at(messages: Sequence[Message]) -> str:
        return str(tuple(messages[place])) if place < len(messages) else "nothing"

    return (
        f"message {place} from device {source} to device {target} is sent as {at(sent)} but received as "
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
    if any(place < len(actions) for place, actions in zip(next_place, program.devices, strict=True)):
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
    circle = path[path.index(device) :][::-1]
    blocked = sum(len(a) - k for a, k in zip(program.devices, next_place, strict=True))
    return DeadlockError([str(heads[d]) for d in circle], blocked)
