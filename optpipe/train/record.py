"""`--trace`: one step of a training run, recorded by all processes and put together. Changes no weight."""

from __future__ import annotations

import platform

import torch

from optpipe.runtime.trace_step import record_step
from optpipe.trace import Trace
from optpipe.trace.assemble import Part, assemble
from optpipe.train.check import planned_peaks
from optpipe.train.config import TrainingConfig
from optpipe.train.model import Batch, Model


def record_trace(config: TrainingConfig, model: Model, batch: Batch, step: int) -> Trace:
    """Run the batch apart from training and record its first replica. In every process, with the same answer."""
    planned = planned_peaks(model, batch)
    part = record_step(model.pipeline, *model.own_part(batch), process=model.launch.rank)
    of_all = model.launch.gather(part.to_data())
    parts = [Part.from_data(data) for data in of_all[: model.launch.pipeline_processes]]
    return assemble(
        parts,
        config.schedule,
        program=model.program.digest,
        step=step,
        planned_peak_bytes=planned,
        source=_source(config, model),
    )


def _source(config: TrainingConfig, model: Model) -> str:
    shape = config.shape
    return (
        f"GPT of {shape.layers} layers {shape.width} wide, {config.microbatch_size} sequences of {shape.sequence} "
        f"bytes a microbatch, {config.dtype}; torch {torch.__version__} on {platform.machine()}, "
        f"{torch.get_num_threads()} threads in each of {model.launch.world} process(es)"
    )
