"""What ops take in training: timed in steps of it, in place of what was measured before the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from optpipe.orders import KINDS
from optpipe.problem import Problem
from optpipe.profile.measured import Gather, Measured, StageFigures
from optpipe.profile.timing import Spread, spread_of
from optpipe.runtime.trace import Timing

OpTimes = Mapping[int, Mapping[str, Spread]]
"""By stage and kind of op."""


def op_times(timings: Iterable[Timing], gather: Gather) -> OpTimes:
    """The spread of every kind of op of every stage over all microbatches of the steps that were timed.

    Of replicas, the slowest counts, for which the others wait. Called by all processes together.
    """
    samples: dict[str, dict[str, list[float]]] = {}
    for timing in timings:
        action = timing.action
        if action.kind in KINDS:
            kinds = samples.setdefault(str(action.stage), {})
            kinds.setdefault(action.kind, []).append((timing.end_ns - timing.start_ns) / 1000)
    mine = {s: {kind: asdict(spread_of(us)) for kind, us in kinds.items()} for s, kinds in samples.items()}
    found: dict[int, dict[str, Spread]] = {}
    for part in gather(mine):
        for s, kinds in part.items():
            times = found.setdefault(int(s), {})
            for kind, data in kinds.items():
                times[kind] = max((Spread(**data), *_known(times, kind)), key=lambda spread: spread.median_us)
    return found


def retimed(measured: Measured, times: OpTimes) -> Measured:
    """The same model with the times of ops in training.

    A kind that no step had keeps its share of the stage: it is scaled as those that were timed.
    """
    return replace(measured, stages=[_retimed(f, times.get(s, {})) for s, f in enumerate(measured.stages)])


def drift(before: Problem, after: Problem) -> float:
    """How much op times have changed: of the device where most did, the changes over the times before.

    It is the sum over the device's stages and kinds of |after - before|, over the sum of before.
    """
    return max(_drift(before, after, stages) for stages in before.stages_of)


def _known(times: Mapping[str, Spread], kind: str) -> Sequence[Spread]:
    return [times[kind]] if kind in times else []


def _retimed(figures: StageFigures, times: Mapping[str, Spread]) -> StageFigures:
    timed = times.keys() & figures.times.keys()
    was = sum(figures.times[kind].median_us for kind in timed)
    scale = sum(times[kind].median_us for kind in timed) / was if was else 1.0
    others = {kind: _scaled(spread, scale) for kind, spread in figures.times.items() if kind not in timed}
    return replace(figures, times=others | {kind: times[kind] for kind in timed})


def _scaled(spread: Spread, scale: float) -> Spread:
    return Spread(spread.median_us * scale, spread.lower_us * scale, spread.upper_us * scale, spread.count)


def _drift(before: Problem, after: Problem, stages: Sequence[int]) -> float:
    pairs = [
        (before.stages[s].duration_us(kind), after.stages[s].duration_us(kind))
        for s in stages
        for kind in ("F", "B", "W", *(("O", "R") if before.stages[s].offload and after.stages[s].offload else ()))
    ]
    total = sum(was for was, _ in pairs)
    return sum(abs(now - was) for was, now in pairs) / total if total else 0.0
