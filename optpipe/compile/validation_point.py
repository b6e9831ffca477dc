"""Where each device waits for the verdict over the last step's update: as late in its list as can be.

What a device does before its point may have to be thrown away and repeated with other weights. So before it there are
forwards and copies only, which touch no gradient, and no message is half before it: its send is before the sender's
point exactly if its receive is before the receiver's. Then every device that throws its beginning away finds all its
messages among those that it has asked for, and no device waits for one that comes after a point.
"""

from __future__ import annotations

from optpipe.compile.program import RECEIVES, SENDS, Action, Program, matching_receive, matching_send
from optpipe.ops import Op

BEFORE = ("F", "O", "RELEASE", "PREPARE", "R", *SENDS, *RECEIVES)


def validation_points(program: Program) -> tuple[int, ...]:
    """For each device, how many actions of its list come before its point.

    These are the largest such beginnings: each list is cut before its first backward, then before the first message of
    which the other half is cut off, until there is none.
    """
    points = [_first_backward(actions) for actions in program.devices]
    whole = False
    while not whole:
        kept = {
            action.key for actions, point in zip(program.devices, points, strict=True) for action in actions[:point]
        }
        whole = True
        for device, actions in enumerate(program.devices):
            halves = (
                k for k, a in enumerate(actions[: points[device]]) if a.peer is not None and _other(a) not in kept
            )
            if (place := next(halves, None)) is not None:
                points[device], whole = place, False
    return tuple(points)


def _first_backward(actions: tuple[Action, ...]) -> int:
    return next((k for k, action in enumerate(actions) if action.kind not in BEFORE), len(actions))


def _other(action: Action) -> Op:
    return matching_receive(action.key) if action.kind in SENDS else matching_send(action.key)
