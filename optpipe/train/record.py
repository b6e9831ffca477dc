"""`--trace`: one step of a training run, recorded by all processes and put together. Changes no weight, no buffer."""

from __future__ import annotations

import platform

import torch

from optpipe.runtime.trace_step import record_step
from optpipe.trace import Trace
from optpipe.trace.assemble import Part, assemble
from optpipe.train.check import planned_peaks, unchanged
from optpipe.train.config import ModelConfig
from optpipe.train.hardware import hardware_name
from optpipe.train.model import Model
from optpipe.train.task import Batch


def record_trace(model: Model, batch: Batch, step: int) -> Trace:
    """Run the batch apart from training and record its first replica, with the schedule in use.

    Called by all processes together, with the same answer.
    """
    planned = planned_peaks(model, batch)
    own, rank = model.own_part(batch), model.launch.rank
    with unchanged(model):
        part = record_step(model.pipeline, *own, process=rank, device=model.hardware)
    of_all = model.launch.gather(part.to_data())
    parts = [Part.from_data(data) for data in of_all[: model.launch.pipeline_processes]]
    return assemble(
        parts,
        model.schedule,
        program=model.program.digest,
        step=step,
        planned_peak_bytes=planned,
        source=_source(model),
    )


def _source(model: Model) -> str:
    return (
        f"{model.task.name}, {_precision(model.config.model)}; torch {torch.__version__} on "
        f"{hardware_name(model.hardware, platform.machine())}, "
        f"{torch.get_num_threads()} threads in each of {model.launch.world} process(es)"
    )


def _precision(config: ModelConfig) -> str:
    return f"{config.dtype}, autocast to {config.autocast}" if config.autocast else config.dtype
