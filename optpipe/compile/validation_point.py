"""Validation points: where each device waits for the outcome of the last step's update, as late as possible.

A device may have to discard its actions before the point and repeat them with other weights (post-validation, Zero
Bubble). So only forwards, recomputations and copies come before it, which touch no gradient, and no message crosses it:
a send is before the sender's point exactly if its receive is before the receiver's. Then a device that rolls back has
asked for all messages that it discards, and no device waits for a message that is sent after a point.
"""

from __future__ import annotations

from optpipe.compile.program import RECEIVES, SENDS, Program, matching_receive, matching_send
from optpipe.kinds import COPIES

BEFORE = ("F", "C", *COPIES, "RELEASE", "PREPARE", *SENDS, *RECEIVES)


def validation_points(program: Program) -> tuple[int, ...]:
    """Number of actions of each device before its point.

    The greatest fixpoint: each list is cut before its first backward, then before the first message whose
    other half is cut off, until there is none.
    """
    points = [
        next((k for k, action in enumerate(actions) if action.kind not in BEFORE), len(actions))
        for actions in program.devices
    ]
    changed = True
    while changed:
        kept = {
            action.key for actions, point in zip(program.devices, points, strict=True) for action in actions[:point]
        }
        changed = False
        for device, actions in enumerate(program.devices):
            for k, action in enumerate(actions[: points[device]]):
                if action.peer is None:
                    continue
                match = matching_receive(action.key) if action.kind in SENDS else matching_send(action.key)
                if match not in kept:
                    points[device], changed = k, True
                    break
    return tuple(points)
