"""The allocator's way of measuring stages finds what the counter of storages finds, where both see the same memory."""

from __future__ import annotations

import pytest
import torch

from optpipe.profile import op_sizes
from optpipe.profile.chain import chain_of
from optpipe.profile.op_sizes import measure_op_sizes
from optpipe.runtime import MemoryMeter
from optpipe.runtime.host_slabs import HostSlab
from optpipe.runtime.stage import Stage
from tests.optpipe.profile.subjects import CPU, WIDTH, perceptron


def allocator_reads(meter: MemoryMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test the allocator's figures are the meter's, which counts no host memory."""
    copy_out = Stage.copy_out

    def uncounted(stage: Stage, microbatch: int, slab: HostSlab) -> None:
        with meter.on(None):
            copy_out(stage, microbatch, slab)

    monkeypatch.setattr(Stage, "copy_out", uncounted)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: meter.live_bytes[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: meter.peak_bytes[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: meter.restart_peak())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_both_ways_agree(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(perceptron((WIDTH, 64, 32, WIDTH)), CPU, 4, range(3))
    counted = measure_op_sizes(chain, CPU)[stage].largest
    with MemoryMeter() as meter, meter.on(0):
        allocator_reads(meter, monkeypatch)
        assert op_sizes._AllocatorProbe(chain, stage, CPU).sizes() == counted
        assert meter.live_bytes[0] == 0, "nothing is left alive"
