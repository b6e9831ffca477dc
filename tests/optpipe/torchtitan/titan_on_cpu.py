"""torchtitan 0.3.0's own trainer on the CPU over gloo: `torchrun titan_on_cpu.py`, then what torchtitan.train takes.

As `--module titan_on_cpu` it has the debug model by a planned schedule, with an attention that runs on the CPU. What is
changed here is for the CPU and for torch 2.13 in the place of a nightly one, and none of it is the pipeline's.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

PLANNED = "llama3_debugmodel"


def adapt_torch() -> None:
    """Give torch what torchtitan asks of a GPU and of a newer version; before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: dict[str, Any] = {
        "get_device_name": "cpu",
        "get_device_properties": SimpleNamespace(total_memory=2**34, name="cpu"),
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "current_device": 0,
    }
    for name, value in cpu.items():
        setattr(torch.cpu, name, lambda *_, value=value: value)
    barrier = dist.barrier
    dist.barrier = lambda *given, device_ids=None, **named: barrier(*given, **named)
    dist.set_timeout = lambda timeout, group=None: _set_pg_timeout(timeout, group)


def llama3_debugmodel() -> Any:
    """The debug model as optpipe.torchtitan has it, with scaled dot product attention, and sums that gloo can do."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    from optpipe.torchtitan import config_registry, pipeline_llm

    config = config_registry.llama3_debugmodel()
    for _, _, parent, attribute in list(config.model_spec.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())

    def pipelining(model: Any, **given: Any) -> Any:
        built = pipeline_llm(model, **given)
        for part in built[1]:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        report_deferred(built[0], built[1])
        return built

    config.model_spec = dataclasses.replace(config.model_spec, pipelining_fn=pipelining)
    return config


def report_deferred(schedule: Any, parts: Any) -> None:
    """Print peak and number of layers that split their backward after each step."""
    from optpipe.runtime import MemoryMeter
    from optpipe.runtime.weight_gradients.split import Deferred

    step = schedule.step

    def measured(**given: Any) -> Any:
        meter = MemoryMeter()
        with meter, meter.on(0):
            found = step(**given)
        deferred = sum(isinstance(module, Deferred) for part in parts for module in part.modules())
        print(f"rank {dist.get_rank()} deferred {deferred} peak {meter.peak_bytes[0]}", flush=True)
        return found

    schedule.step = measured


adapt_torch()
if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.argv[0] = "torchtitan.train"
    runpy.run_module("torchtitan.train", run_name="__main__")
