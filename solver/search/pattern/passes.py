"""The compute passes of a round as arrays: what the compiled parts of the search work on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optpipe.memory import device_effect
from optpipe.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KINDS = "FBW"


@dataclass(frozen=True)
class Passes:
    """The passes of as many microbatches (`lanes`, mostly one) as a round of a pattern runs.

    Lane l of stage s counts as stage ``l * S + s``, so that there are ``lanes * S`` = `stages` of them; pass
    ``kind * stages + stage`` is the F, B or W (kind 0, 1, 2) of one. `before` is the pass whose result each pass needs
    (-1: none), `lag_us` the least time from that one's start to its own. The first 2/3 of `chain` are F and B in the
    order in which each microbatch takes them, the rest is W. `at_start` and `at_end` are bytes; `stage_bytes` and
    `weight_bytes` are held after F and after B.
    """

    lanes: int
    stages: int
    devices: int
    duration_us: Floats
    device: Ints
    before: Ints
    lag_us: Floats
    chain: Ints
    at_start: Ints
    at_end: Ints
    stage_bytes: Ints
    weight_bytes: Ints

    @property
    def size(self) -> int:
        """How many passes a microbatch has: F, B and W of each stage."""
        return 3 * self.stages

    @property
    def model_stages(self) -> int:
        """The stages of the problem, S."""
        return self.stages // self.lanes

    def of_device(self, device: int) -> Ints:
        """The passes of a device: F and B of its stages, then their W."""
        return np.flatnonzero(self.device == device)

    def work_us(self) -> Floats:
        """For each device, the time of one round's passes."""
        return np.bincount(self.device, self.duration_us, self.devices).astype(np.float64)

    def alone_us(self) -> Floats:
        """Starts of a microbatch's passes that never wait: how one microbatch runs alone, with each W after its B."""
        start = np.zeros(self.size)
        for p in self.chain.tolist():
            if self.before[p] >= 0:
                start[p] = start[self.before[p]] + self.lag_us[p]
        return start

    @staticmethod
    def of(problem: Problem, lanes: int = 1) -> Passes:
        """The passes of a problem, for rounds of `lanes` microbatches."""
        count = len(problem.stages)
        pairs = [(kind, stage) for kind in KINDS for stage in problem.stages]
        effects = [device_effect(stage, kind) for kind, stage in pairs]
        duration = np.array([stage.duration_us(kind) for kind, stage in pairs], np.float64)
        backward = 2 * count - 1 - np.arange(count)
        chain = np.concatenate([np.arange(count), backward])
        before = np.full(3 * count, -1, np.int64)
        before[chain[1:]] = chain[:-1]
        before[2 * count :] = count + np.arange(count)
        delay = np.zeros(3 * count)
        delay[1:count] = problem.forward_delay_us
        delay[count : 2 * count - 1] = problem.backward_delay_us
        lag = np.where(before >= 0, duration[before] + delay, 0.0)

        def floats(values: Floats) -> Floats:
            return np.tile(values.reshape(3, -1), (1, lanes)).ravel()

        def ints(values: list[int]) -> Ints:
            return np.tile(np.array(values, np.int64).reshape(-1, count), (1, lanes)).ravel()

        def laned(passes: Ints, lane: int) -> Ints:
            kind, stage = np.divmod(passes, count)
            return np.where(passes < 0, -1, kind * lanes * count + lane * count + stage)

        needed = np.stack([laned(before, lane) for lane in range(lanes)]).reshape(lanes, 3, count)
        chains = [laned(chain, lane) for lane in range(lanes)]
        weights = [laned(backward + count, lane) for lane in range(lanes)]
        return Passes(
            lanes=lanes,
            stages=lanes * count,
            devices=len(problem.devices),
            duration_us=floats(duration),
            device=ints([stage.device for _, stage in pairs]),
            before=needed.transpose(1, 0, 2).ravel(),
            lag_us=floats(lag),
            chain=np.concatenate(chains + weights),
            at_start=ints([effect.at_start for effect in effects]),
            at_end=ints([effect.at_end for effect in effects]),
            stage_bytes=ints([stage.activation_bytes for stage in problem.stages]),
            weight_bytes=ints([stage.backward_weight_bytes for stage in problem.stages]),
        )
