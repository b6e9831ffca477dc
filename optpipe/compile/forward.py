"""Evaluation: a program of forwards alone, for any placement."""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.compile.actions import Action


def forward_lists(placement: Sequence[int], microbatches: int, devices: int) -> tuple[tuple[Action, ...], ...]:
    """One list a device, in waves: wave k holds F of every stage s and microbatch i with s + i = k.

    As in lowering there is one global sequence, and each message is one entry of it, right after the F that makes
    it. A forward needs one of the wave before, so the sequence is a way to run the lists, whatever the placement.
    Within a wave earlier stages come first: a receive is issued before the forward that runs while its message comes.
    """
    lists: list[list[Action]] = [[] for _ in range(devices)]
    for wave in range(len(placement) + microbatches - 1):
        for s in range(max(0, wave - microbatches + 1), min(len(placement), wave + 1)):
            home, i = placement[s], wave - s
            lists[home].append(Action("F", s, i))
            if s + 1 < len(placement) and placement[s + 1] != home:
                peer = placement[s + 1]
                lists[home].append(Action("SEND_F", s, i, peer=peer))
                lists[peer].append(Action("RECV_F", s + 1, i, peer=home))
    return tuple(map(tuple, lists))
