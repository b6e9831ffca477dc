"""One program under a schedule class of torch and under PlannedSchedule: usage same_program_worker.py FOLDER.

FOLDER/cases.json lists the cases: the name of a schedule file, which class of torch, the dtype.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from optpipe.pipelining import PlannedSchedule
from optpipe.schedule import Schedule
from tests.gloo import gloo_group

WIDTH, ENTRIES, ROWS = 8, 11, 2
KWARG_SPEC = {"scale": TensorChunkSpec(0), "shift": TensorChunkSpec(1)}


class Part(nn.Module):
    """A stage: what it computes depends on keyword arguments, one of which is split along dimension 1."""

    def __init__(self, first: bool, last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ENTRIES, WIDTH, dtype=dtype) if first else None
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.down = nn.Linear(3 * WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, ENTRIES, bias=False, dtype=dtype) if last else None

    def forward(self, x: Tensor, kept: Tensor | None = None, *, scale: Tensor, shift: Tensor) -> Any:
        if self.embedding is not None:
            x, kept = self.embedding(x), scale * 2
        assert kept is not None
        x = x + self.down(torch.tanh(self.up(self.norm(x) * scale + shift.T))) * kept
        return self.head(x) if self.head is not None else (x, kept)


def loss_of(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return weight * nn.functional.cross_entropy(output, target)


def batch_of(seed: int, microbatches: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    size = microbatches * ROWS
    x, y = torch.randint(ENTRIES, (2, size), generator=generator)
    scale, shift = (torch.rand((size, 1), generator=generator, dtype=dtype) for _ in range(2))
    return x, y, {"scale": scale, "shift": shift.T.contiguous()}


def parts_of(count: int, dtype: torch.dtype) -> list[Part]:
    torch.manual_seed(3)
    return [Part(s == 0, s == count - 1, dtype) for s in range(count)]


def stages_of(schedule: Schedule, dtype: torch.dtype) -> list[PipelineStage]:
    count = len(schedule.problem.stages)
    parts = parts_of(count, dtype)
    return [
        PipelineStage(parts[s], s, count, torch.device("cpu"))
        for s, stage in enumerate(schedule.problem.stages)
        if stage.device == dist.get_rank()
    ]


def torch_schedule(name: str, path: Path, stages: list[PipelineStage], m: int, **options: Any) -> Any:
    options["kwargs_chunk_spec"] = KWARG_SPEC
    if name == "csv":
        runtime = _PipelineScheduleRuntime(stages, m, **options)
        runtime._load_csv(str(path.with_suffix(".csv")), format="compute_only")
        return runtime
    if name == "1f1b":
        return Schedule1F1B(stages[0], m, **options)
    return {"interleaved": ScheduleInterleaved1F1B, "zbv": ScheduleZBVZeroBubble}[name](stages, m, **options)


def whole(schedule: Any, batch: Any, stages: list[PipelineStage], call: str, **last: Any) -> Any:
    """A call with a whole batch."""
    x, y, kwargs = batch
    args = (x,) if stages[0].is_first else ()
    is_last = any(stage.is_last for stage in stages)
    return getattr(schedule, call)(*args, **kwargs, **({"target": y, **last} if is_last else {}))


def in_lists(schedule: Any, batch: Any, stages: list[PipelineStage], call: str, **last: Any) -> Any:
    """The same call as torchtitan makes it: lists of microbatches."""
    x, y, kwargs = batch
    scales, shifts = kwargs["scale"].split(ROWS), kwargs["shift"].split(ROWS, 1)
    is_last = any(stage.is_last for stage in stages)
    loss_kwargs = {"loss_kwargs": last.pop("loss_kwargs")} if "loss_kwargs" in last else {}
    return getattr(schedule, call)(
        arg_mbs=[(part,) for part in x.split(ROWS)] if stages[0].is_first else None,
        kwarg_mbs=[{"scale": a, "shift": b} for a, b in zip(scales, shifts, strict=True)],
        target_mbs=list(y.split(ROWS)) if is_last else None,
        losses=last.get("losses") if is_last else None,
        **loss_kwargs,
    )


class EvaluatedPlainly:
    """A schedule of torch whose eval() is the whole model in one process.

    Torch's own fails where neighbouring stages share a rank ("can't steal_bwd_input if this stage doesn't have
    backward"), and with scale_grads it divides the gradients that are there once more.
    """

    def __init__(self, schedule: Any, parts: list[Part], m: int) -> None:
        self.step, self._parts, self._m = schedule.step, parts, m

    def eval(self, *args: Tensor, target: Tensor | None = None, losses: Any = None, **kwargs: Tensor) -> Tensor | None:
        if target is None:
            return None
        x, _, _ = batch_of(9, self._m, kwargs["scale"].dtype)
        outputs = []
        for i in range(self._m):
            rows = slice(i * ROWS, (i + 1) * ROWS)
            message: Any = (x[rows],)
            for part in self._parts:
                message = part(*message, scale=kwargs["scale"][rows], shift=kwargs["shift"][:, rows])
            outputs.append(message)
            losses.append(loss_of(message, target[rows]))
        return torch.cat(outputs)


def program(schedule: Any, stages: list[PipelineStage], m: int, dtype: torch.dtype, call: Any) -> dict[str, Any]:
    """Steps, one of them after another without zeroing; an evaluation between them; gradients, losses and outputs."""
    found: dict[str, Any] = {}

    def gradients(name: str) -> None:
        for stage in stages:
            for key, parameter in stage.submod.named_parameters():
                found[f"{name} {stage.stage_index} {key}"] = parameter.grad.clone()

    for k in range(2):
        losses: list[Tensor] = []
        output = call(schedule, batch_of(k, m, dtype), stages, "step", losses=losses, loss_kwargs={"weight": 0.5 + k})
        gradients(f"step {k}")
        found |= {f"output {k}": output} if output is not None else {}
        found |= {f"loss {k}": torch.stack([loss.detach() for loss in losses])} if losses else {}
        losses.clear()
        with torch.no_grad():
            output = call(schedule, batch_of(9, m, dtype), stages, "eval", losses=losses)
        found |= {f"eval {k}": output} if output is not None else {}
        found |= {f"eval loss {k}": torch.stack(losses)} if losses else {}
    return found


def compare(folder: Path, name: str, torch_class: str, dtype_name: str, scale_grads: bool) -> dict[str, float]:
    schedule, dtype = Schedule.load(folder / f"{name}.json"), getattr(torch, dtype_name)
    m = schedule.problem.microbatches
    stages = stages_of(schedule, dtype)
    theirs = torch_schedule(torch_class, folder / f"{name}.json", stages, m, loss_fn=loss_of, scale_grads=scale_grads)
    placement = [stage.device for stage in schedule.problem.stages]
    if scale_grads or any(a == b for a, b in pairwise(placement)):
        theirs = EvaluatedPlainly(theirs, parts_of(len(placement), dtype), m)
    expected = program(theirs, stages, m, dtype, whole)
    errors: dict[str, float] = {}
    for call in (whole, in_lists):
        stages = stages_of(schedule, dtype)
        ours = PlannedSchedule(
            stages, folder / f"{name}.json", loss_fn=loss_of, scale_grads=scale_grads, kwargs_chunk_spec=KWARG_SPEC
        )
        found = program(ours, stages, m, dtype, call)
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        for key, value in expected.items():
            assert found[key].shape == value.shape, key
            error = float((found[key] - value).abs().max() / value.abs().max())
            errors[call.__name__] = max(errors.get(call.__name__, 0.0), error)
    return errors


def main(folder: Path) -> None:
    with gloo_group():
        cases = json.loads((folder / "cases.json").read_text())
        results = [compare(folder, **case) for case in cases]
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
