"""Memory of every stage's ops: by the counter of storages on the CPU, by the caching allocator on a GPU.

The allocator also sees what kernels take for themselves, and rounds each allocation up to 512 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from optpipe.profile.chain import Chain
from optpipe.runtime.host_slabs import HostSlab
from optpipe.runtime.stage import Stage
from optpipe.runtime.stage_sizes import SizeRange, StageSizes, measure_samples, size_range, until_alike


def measure_op_sizes(chain: Chain, device: torch.device) -> Mapping[int, SizeRange]:
    """For each stage of this process, what its microbatches take. Leaves gradients behind in the stages."""
    if device.type == "cuda":
        samples = range(len(chain.batch))
        return {
            s: size_range(until_alike(_AllocatorProbe(chain, s, device, i).sizes() for i in samples))
            for s in chain.stages
        }
    return {
        s: measure_samples(stage, chain.samples[s], chain.before(s), chain.after(s))
        for s, stage in chain.stages.items()
    }


class _AllocatorProbe:
    """One microbatch through a stage, twice, as `measure_stage` does it.

    Written against torch 2.13 and not yet run: no GPU was at hand.
    """

    def __init__(self, chain: Chain, stage: int, device: torch.device, sample: int = 0) -> None:
        self._chain, self._number, self._device, self._sample = chain, stage, device, sample
        self._stage: Stage = chain.stages[stage]

    def sizes(self) -> StageSizes:
        self._stage.zero_gradients()
        self._forward(fused=True)
        self._backward()  # libraries take their workspaces the first time, and keep them
        activation, work_f = self._held_and_work(partial(self._forward, fused=True))
        offload = self._offload_and_reload()
        change, work_bw = self._held_and_work(self._backward)
        workspace = {"F": work_f - activation, "BW": work_bw}
        if self._stage.splits:
            split_activation, split_work_f = self._held_and_work(partial(self._forward, fused=False))
            workspace["F"] = max(workspace["F"], split_work_f - split_activation)
            activation = max(activation, split_activation)
            change, workspace["B"] = self._held_and_work(lambda: self._stage.backward_input(0, self._gradient()))
            _, workspace["W"] = self._held_and_work(lambda: self._stage.backward_weight(0))
        workspace = {kind: max(size, 0) for kind, size in workspace.items()}
        return StageSizes(activation, max(activation + change, 0), min(offload, activation), workspace)

    def _held_and_work(self, op: Callable[[], object]) -> tuple[int, int]:
        """How many bytes more are held after an op than before, and how many more at its peak."""
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        op()
        after, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        return after - before, peak - before

    def _forward(self, *, fused: bool) -> None:
        target = self._chain.target(self._number, self._sample)
        received = self._chain.received(self._number, self._device, self._sample)
        self._stage.forward(0, received, target, offloads=True, fused=fused)

    def _backward(self) -> None:
        self._stage.backward(0, self._gradient())

    def _gradient(self) -> object:
        return self._chain.gradient(self._number, self._device)

    def _offload_and_reload(self) -> int:
        held = torch.cuda.memory_allocated(self._device)
        self._stage.copy_out(0, HostSlab())
        torch.cuda.synchronize(self._device)
        self._stage.free(0)
        moved = held - torch.cuda.memory_allocated(self._device)
        self._stage.allocate(0)
        self._stage.copy_in(0)
        return moved
