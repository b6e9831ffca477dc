"""Bounds of one device: usable budget, shortest paths to it, and knapsacks of work in memory.

Fractional knapsacks are filled greedily by time a byte (Dantzig 1957), those with a choice between states along upper
hulls (multiple choice, Sinha and Zoltners 1979). Such a relaxation is at least what any choice of whole microbatches
reaches, so that it may stand in a proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np

from optpipe.kinds import CODE, WHOLE_BACKWARD
from optpipe.problem import Floats, Ints, Problem
from optpipe.stage import Stage
from optpipe.task_graph import lower


class Piece(NamedTuple):
    """Work of `time_us` that needs `size_bytes`."""

    time_us: float
    size_bytes: float

    @property
    def rate(self) -> float:
        """Time for each byte."""
        return self.time_us / self.size_bytes if self.size_bytes else float("inf")


class Held(NamedTuple):
    """States of one microbatch of a stage while a device waits: before its B (`whole`), or with W left (`rest`).

    It is one of the two or neither; each is the work it still offers and the bytes it holds.
    """

    whole: Piece
    rest: Piece = Piece(0, 0)


def most_time_us(pieces: Iterable[Piece], count: int, room_bytes: float) -> float:
    """The most work in `room_bytes` if each piece can be taken up to `count` times, in parts too."""
    total_us = 0.0
    for piece in sorted(pieces, key=lambda piece: -piece.rate):
        number = min(count, room_bytes / piece.size_bytes) if piece.size_bytes else count
        total_us += number * piece.time_us
        room_bytes -= number * piece.size_bytes
    return total_us


def most_held_us(held: Sequence[Held], count: int, room_bytes: float, *, in_parts: bool = False) -> float:
    """The most work that `count` microbatches of each stage in `held` can offer within `room_bytes`.

    Counted in whole microbatches where all stages are alike, unless `in_parts`; in parts otherwise.
    """
    if room_bytes < 0:
        return 0.0
    if in_parts or room_bytes == float("inf") or len(set(held)) > 1:
        pieces = []
        for whole, rest in held:
            # The upper hull of nothing, rest and whole, the best rate first.
            if rest.size_bytes >= whole.size_bytes or rest.rate < whole.rate:
                pieces.append(whole)
            else:
                pieces += [rest, Piece(whole.time_us - rest.time_us, whole.size_bytes - rest.size_bytes)]
        return most_time_us(pieces, count, room_bytes)
    # One kind of stage: every number of microbatches before B, and beside them as many with W left as fit.
    (whole, rest), total, room = held[0], count * len(held), int(room_bytes)
    most = min(total, room // int(whole.size_bytes)) if whole.size_bytes else total
    wholes = np.arange(most + 1)
    rests = total - wholes
    if rest.size_bytes:
        rests = np.minimum(rests, (room - wholes * int(whole.size_bytes)) // int(rest.size_bytes))
    return float((wholes * whole.time_us + rests * rest.time_us).max())


class Knapsack:
    """Pieces of work by time and size, of which as much as possible is to fit, in parts too."""

    def __init__(self, times_us: Floats, sizes: Floats) -> None:
        used = times_us > 0
        times_us, sizes = times_us[used], sizes[used]
        with np.errstate(divide="ignore"):
            order = np.argsort(-times_us / sizes, kind="stable")
        taken = np.concatenate([[0.0], np.cumsum(sizes[order])])
        done_us = np.concatenate([[0.0], np.cumsum(times_us[order])])
        # Pieces of no size come first and need no room: of equal sizes the last counts.
        last = np.append(np.diff(taken) > 0, True)
        self.taken, self.done_us = taken[last], done_us[last]

    def most_us(self, room: float | Floats) -> Floats:
        """The most time within `room` (of each of several); 0 where it is negative."""
        most: Floats = np.where(np.less(room, 0), 0.0, np.interp(room, self.taken, self.done_us))
        return most


def most_held_by_units_us(times_us: Floats, rests_us: Floats, wholes: Floats, rests: Floats, *, room: float) -> float:
    """The most work of units within `room`, each before its B (`wholes`), with W left (`rests`), or neither.

    As `most_held_us` in parts: along the upper hull of the states of each.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rest_rate = np.where(rests > 0, rests_us / rests, np.inf)
        whole_rate = np.where(wholes > 0, times_us / wholes, np.inf)
    only_whole = (rests >= wholes) | (rest_rate < whole_rate)
    pieces_us = np.concatenate([times_us[only_whole], rests_us[~only_whole], (times_us - rests_us)[~only_whole]])
    sizes = np.concatenate([wholes[only_whole], rests[~only_whole], (wholes - rests)[~only_whole]])
    return float(Knapsack(pieces_us, sizes).most_us(room))


def ended_before(held: Floats | Ints, room: Floats | Ints, order: Ints | Sequence[int]) -> Ints:
    """For each unit how many must have ended when it begins, of all before it, for the others to fit in its `room`.

    Units begin in ascending order and end in `order`; each has `held` bytes from its begin to its end. More than have
    begun may be asked for: then there is no schedule.
    """
    begun = np.cumsum(held) - held
    ended = np.concatenate([[0], np.cumsum(held[order])])
    counts: Ints = np.maximum.accumulate(np.searchsorted(ended, begun - room, side="left"))
    return counts


def usable_bytes(problem: Problem, device: int) -> float:
    """The device's budget, rounded down to the greatest common divisor of all changes on it; infinite without one.

    Every level of memory is a sum of such changes, so nothing that keeps the budget exceeds this.
    """
    budget = problem.devices[device].memory_bytes
    if budget is None:
        return float("inf")
    graph = lower(problem)
    there = ~np.isnan(graph.of_stages(graph.duration_us))[:, list(problem.stages_of[device])]
    changes = graph.of_stages(graph.device_bytes)[:, list(problem.stages_of[device])]
    divisor = int(np.gcd.reduce(changes[there], axis=None))
    return budget - budget % divisor if divisor else budget


Time = int | float


@dataclass(frozen=True)
class Paths:
    """Times (us) along one microbatch's chain of F and B, from any stage to any other.

    Entry s of each sequence is what comes before stage s (`*_before`) or from stage s on (`*_from`): F and the delays
    of activations, or B and the delays of gradients. Sequences `*_from` have one entry more, the last is 0.
    """

    forward_before: Sequence[Time]
    forward_from: Sequence[Time]
    backward_before: Sequence[Time]
    backward_from: Sequence[Time]
    activations_from: Sequence[Time]
    gradients_from: Sequence[Time]

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """All sums for a problem, each made once."""
        forward = [stage.forward_us for stage in problem.stages]
        backward = [stage.backward_input_us for stage in problem.stages]
        activations, gradients = [*problem.forward_delay_us, 0], [*problem.backward_delay_us, 0]
        return cls(
            forward_before=_sums_before(a + b for a, b in zip(forward, activations, strict=True)),
            forward_from=_sums_from(forward),
            backward_before=_sums_before(a + b for a, b in zip(backward, gradients, strict=True)),
            backward_from=_sums_from(backward),
            activations_from=_sums_from(activations),
            gradients_from=_sums_from(gradients),
        )

    def turnaround_us(self, forward: int, backward: int) -> Time:
        """The least time from the end of F of stage `forward` to the start of B of stage `backward`.

        All F that follow, all B that come before, and the delays between them. A fused backward only makes it longer.
        """
        forward_us = self.forward_from[forward + 1] + self.activations_from[forward]
        return forward_us + self.backward_from[backward + 1] + self.gradients_from[backward]


def _sums_before(times: Iterable[Time]) -> Sequence[Time]:
    return list(accumulate(times, initial=0))[:-1]


def _sums_from(times: Sequence[Time]) -> Sequence[Time]:
    return list(accumulate(reversed(times), initial=0))[::-1]


def longest_chain_us(problem: Problem) -> float:
    """One microbatch alone: F through all stages, B back through all, then the W of the first stage.

    A bound on the makespan; on the span of the device of the first stage too, since that chain begins and ends there.
    """
    first = problem.stages[0]
    turnaround_us = Paths.of(problem).turnaround_us(0, 0)
    return first.forward_us + turnaround_us + first.backward_input_us + first.backward_weight_us


@dataclass(frozen=True)
class OnDevice:
    """The device that holds the stages `numbers`, with the `paths` of the whole problem."""

    problem: Problem
    paths: Paths
    numbers: Sequence[int]

    @classmethod
    def each(cls, problem: Problem) -> Sequence[Self]:
        """One instance for each device that has stages."""
        paths = Paths.of(problem)
        return [cls(problem, paths, numbers) for numbers in problem.stages_of if numbers]

    @cached_property
    def stages(self) -> Sequence[Stage]:
        """The stages of this device, first to last."""
        return [self.problem.stages[s] for s in self.numbers]

    @cached_property
    def budget(self) -> float:
        """The bytes that can be used here; infinite without a budget."""
        return usable_bytes(self.problem, self.stages[0].device)

    def value_us(self, span_us: float, to_last_backward_us: float) -> float:
        """Lower bound on the objective, from two bounds: on the device's span, and on that up to its last backward.

        Head and tail of a device (Carlier 1982): the device of stage 0 begins earlier by F of the stages before this
        device, and after its last backward the gradient still passes B of these, and W of stage 0 follows. For the
        makespan the device's own span begins after that head as well.
        """
        low = self.numbers[0]
        head_us, tail_us = self.paths.forward_before[low], self.paths.backward_before[low]
        through_us = head_us + to_last_backward_us + tail_us + self.problem.stages[0].backward_weight_us
        return max(through_us, span_us + (head_us if self.problem.objective == "makespan" else 0))


def split_backward_suffices(problem: Problem) -> bool:
    """True if some optimum has no fused backward, so that what is proved of split ones holds for all.

    B with W right behind it does all that BW does, no later, and hands its gradient over earlier. The microbatches stay
    in order: a BW counts as a B (docs/adr/0006), and the W of a stage may be put in order among themselves, since all
    of them are alike. Only where a budget counts and BW needs less memory beside the activation than B and W do,
    fusing can be worth it; and a stage that cannot split its backward has fused ones alone.
    """
    return not any(fusing_may_help(problem, s) for s in range(len(problem.stages)))


def fusing_may_help(problem: Problem, s: int) -> bool:
    """True if BW of a stage may keep a budget that B and W of it do not, or if the stage cannot split its backward.

    On the other stages all may be split. Beside what a backward holds of the activation, B needs its workspace, or what
    it leaves for W, and W its own beside that; BW needs its own workspace. A backward that recomputes within itself
    holds less than the activation, and maybe less than what B leaves. Where W of units differ, it matters which is
    first: B(i) BW(j) W(i) runs W of j before that of i, as no B and W in order do.
    """
    graph = lower(problem)
    if not graph.trained[s]:
        return False
    weight = graph.type_of("W", s, 0, 0) + np.arange(graph.shape[3])
    costs = np.column_stack([graph.duration_us[weight], graph.device_bytes[weight]])
    # A fused backward may overtake a W that is longer, or frees less, than its own.
    if not graph.splits[s] or (costs != costs[0]).any():
        return True
    if problem.devices[graph.device[s]].memory_bytes is None:
        return False
    changes = graph.of_stages(graph.device_bytes)[:, s]
    for half, whole in WHOLE_BACKWARD.items():
        options = [option for option in range(graph.options[s]) if graph.has(half, s, option)]
        parts = np.concatenate([changes[CODE[half], options], changes[CODE["W"], options, :, :1]], axis=-1)
        if (np.cumsum(parts, axis=-1).max(axis=-1) > changes[CODE[whole], options, :, 0]).any():
            return True
    return False
