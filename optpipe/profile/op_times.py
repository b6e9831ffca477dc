"""Times of F, B, W, BW, O and R of every stage, measured with the code that runs them in training.

A round takes a microbatch through all stages forward and then back, as a step does, so that caches find what they would
find there; once with B and W apart, once with BW, once with O and R between. Forward times come from the first two:
the third also pays for the hooks through which activations leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from optpipe.profile.chain import Chain
from optpipe.profile.timing import ClockName, Key, Spread, spread_of, stopwatch_for
from optpipe.runtime.host_slabs import HostSlab

WARM_UP_ROUNDS = 2
"""Rounds that count nothing: threads start, memory is got, slabs take on their sizes."""

OnRound = Callable[[int, int], None]
"""Told before each round: its number, and how many there are, warm-up included."""


def measure_op_times(
    chain: Chain,
    device: torch.device,
    rounds: int,
    clock: ClockName = "wall",
    on_round: OnRound = lambda _round, _rounds: None,
) -> Mapping[int, Mapping[str, Spread]]:
    """For each stage of this process, the times of each kind of op.

    A compiled stage has no B and W. Leaves gradients behind in the stages.
    """
    measuring = _Rounds(chain, device, clock)
    total = WARM_UP_ROUNDS + rounds
    for number in range(total):
        on_round(number, total)
        if number == WARM_UP_ROUNDS:
            measuring.watch.restart()
        measuring.run()
    times: dict[int, dict[str, Spread]] = {s: {} for s in chain.stages}
    for key, samples_us in measuring.watch.samples_us().items():
        times[key.number][key.kind] = spread_of(samples_us)
    return times


class _Rounds:
    """The stages' samples and slabs, and what times them."""

    def __init__(self, chain: Chain, device: torch.device, clock: ClockName) -> None:
        self.watch = stopwatch_for(device, clock)
        self._chain, self._device, self._sample = chain, device, 0
        self._slabs = {s: HostSlab(pinned=device.type == "cuda") for s in chain.stages}
        for stage in chain.stages.values():
            stage.zero_gradients()

    def run(self) -> None:
        split = {s: stage for s, stage in self._chain.stages.items() if stage.splits}
        for s in sorted(split):
            self._forward(s, fused=False)
        for s in sorted(split, reverse=True):
            gradient = self._chain.gradient(s, self._device)
            self.watch.time(Key("B", s), partial(split[s].backward_input, 0, gradient))
            self.watch.time(Key("W", s), partial(split[s].backward_weight, 0))
        for s in sorted(self._chain.stages):
            self._forward(s, fused=True)
        for s, stage in sorted(self._chain.stages.items(), reverse=True):
            self.watch.time(Key("BW", s), partial(stage.backward, 0, self._chain.gradient(s, self._device)))
        for s in sorted(self._chain.stages):
            self._forward_and_copies(s)
        for s, stage in sorted(self._chain.stages.items(), reverse=True):
            stage.backward(0, self._chain.gradient(s, self._device))
        self._sample = (self._sample + 1) % len(self._chain.batch)

    def _forward(self, s: int, *, fused: bool) -> None:
        received, forward = self._chain.received(s, self._device, self._sample), self._chain.stages[s].forward
        target = self._chain.target(s, self._sample)
        self.watch.time(Key("F", s), partial(forward, 0, received, target, offloads=False, fused=fused))

    def _forward_and_copies(self, s: int) -> None:
        stage, slab = self._chain.stages[s], self._slabs[s]
        received, target = self._chain.received(s, self._device, self._sample), self._chain.target(s, self._sample)
        stage.forward(0, received, target, offloads=True, fused=True)
        del received
        self.watch.time(Key("O", s), partial(stage.copy_out, 0, slab))
        stage.free(0)
        stage.allocate(0)
        self.watch.time(Key("R", s), partial(stage.copy_in, 0))
        if slab.too_small:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            slab.grow()
