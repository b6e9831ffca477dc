"""torchtitan: a planned schedule in its trainer, without a change to torchtitan.

`--module optpipe.torchtitan --config NAME` takes the configuration of that name of any model of torchtitan, and
`--parallelism.planned_schedule FILE` the schedule, or what is to be done to get one. From a program, `pipeline_llm` is
the `ModelSpec.pipelining_fn`.

Tried with torchtitan 0.3.0, of which it uses two private functions: the one that names the modules of each stage, and
the one that cuts them out of the model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _split_module
from torchtitan.models.common.linear import Linear

from optpipe.errors import TrainingError
from optpipe.pipelining import OnlinePlanner, PlannedSchedule, Recorder, recording_schedule, solve_at_start
from optpipe.placement import devices_of_stages
from optpipe.runtime.weight_gradients import SplitLinear, WeightGradients, defer_weight_gradients, register_deferred
from optpipe.schedule import Schedule

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

LOG = logging.getLogger(__name__)

__all__ = ["OnlineSchedule", "PlannedParallelismConfig", "pipeline_llm", "with_planned_schedule"]

register_deferred(Linear, SplitLinear())  # torch's nn.Linear with a configuration; its own subclasses are left alone


@dataclass(kw_only=True, slots=True)
class PlannedParallelismConfig(ParallelismConfig):  # type: ignore[misc]  # torchtitan has no types here
    """torchtitan's settings of parallelism, with those of OptPipe. One of the first four is to be set."""

    planned_schedule: str = ""
    """A schedule of OptPipe (`optpipe.schedule/1`): it decides number and placement of stages, order, and offload."""
    solve: str = ""
    """A problem (`optpipe.problem/1`) that rank 0 solves before the first step, instead of a schedule."""
    record: str = ""
    """A folder for the records of a few steps, for 'optpipe profile --from-run'. The steps run one microbatch after the
    other, or by `planned_schedule` if it is set too."""
    online: bool = False
    """Record the first steps, solve during the training, and change to the schedules that are found."""
    solve_seconds: float = 30.0
    """Time limit of a search."""
    stage_placement: str = "linear"
    """Placement of stages where there is no schedule yet: linear, interleaved-N, v or v-N."""
    record_modes: str = ""
    """Activation modes to record, by commas, such as full,full+offload; only without `planned_schedule`."""


def with_planned_schedule(config: Trainer.Config) -> Trainer.Config:
    """A configuration of torchtitan's trainer whose pipeline follows `parallelism.planned_schedule`."""
    given = {field.name: getattr(config.parallelism, field.name) for field in fields(config.parallelism)}
    config.parallelism = PlannedParallelismConfig(**given)
    config.model_spec = replace(config.model_spec, pipelining_fn=pipeline_llm)
    return config


def pipeline_llm(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    device: torch.device,
    model_config: Any,
    parallelize_fn: Any,
    loss_fn: Any,
) -> tuple[PlannedSchedule | OnlineSchedule, list[nn.Module], bool, bool]:
    """Cut the model into the stages of the schedule, and those of this rank in parallel as torchtitan does.

    Returns the schedule, the stages' modules with the model's last one at the end, and whether the first and the last
    stage are here. Raises TrainingError where the configuration does not fit the schedule.
    """
    mesh = parallel_dims.get_mesh("pp")
    schedule = _schedule_of(training, parallelism, mesh.size(), device)
    placement = [stage.device for stage in schedule.problem.stages]
    names = parallelism.module_fqns_per_model_part or _generate_llm_fqn_per_model_part(
        len(placement),
        len(model_config.layers),
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    if len(names) != len(placement):
        raise TrainingError(
            f"parallelism.module_fqns_per_model_part has {len(names)} parts but the schedule has {len(placement)} "
            "stages. Maybe cut the model as the problem was cut that was solved."
        )
    stages: list[PipelineStage] = []
    for number in (s for s, rank in enumerate(placement) if rank == mesh.get_local_rank()):
        part = _split_module(model, names[number])
        # torchtitan wraps the forward of each layer as it parallelizes, and would wrap that which does not split.
        defer_weight_gradients(part, WeightGradients())
        stage = PipelineStage(part, number, len(placement), device, group=mesh.get_group("pp"))
        stage.submod = parallelize_fn(
            part,
            parallel_dims=parallel_dims,
            training=training,
            parallelism=parallelism,
            compile_config=compile_config,
            ac_config=ac_config,
            dump_folder=dump_folder,
        )
        stages.append(stage)

    def scalar_loss(*args: Any, **kwargs: Any) -> Tensor:
        loss, _ = loss_fn(*args, **kwargs)
        found: Tensor = loss
        return found

    planned = PlannedSchedule(stages, schedule, loss_fn=scalar_loss, scale_grads=False)
    if parallelism.record:
        Recorder(planned, parallelism.record, name=f"torchtitan, {dump_folder}")
    found = OnlineSchedule(planned, parallelism.solve_seconds) if parallelism.online else planned
    return found, [stage.submod for stage in stages], stages[0].is_first, stages[-1].is_last


class OnlineSchedule:
    """A planned schedule that an `OnlinePlanner` replaces by better ones between steps."""

    def __init__(self, planned: PlannedSchedule, time_limit_s: float) -> None:
        self.planned = planned
        self._planner = OnlinePlanner(planned, time_limit_s=time_limit_s)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `PlannedSchedule.step`, then change to a better schedule if there is one."""
        result = self.planned.step(*args, **kwargs)
        if self._planner.step_done():
            LOG.info("the next step runs by %s", self.planned.schedule.method)
        return result

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Run `PlannedSchedule.eval`."""
        return self.planned.eval(*args, **kwargs)


def _schedule_of(training: Any, parallelism: Any, devices: int, device: torch.device) -> Schedule:
    """The schedule to begin with. Raises TrainingError where none is asked for, or it has other microbatches."""
    path, problem = getattr(parallelism, "planned_schedule", ""), getattr(parallelism, "solve", "")
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if path and problem:
        raise TrainingError("parallelism.planned_schedule and parallelism.solve exclude each other.")
    if path:
        schedule = Schedule.load(path)
    elif problem:
        schedule = solve_at_start(problem, parallelism.solve_seconds, device)
    elif getattr(parallelism, "record", "") or getattr(parallelism, "online", False):
        placement = devices_of_stages(parallelism.stage_placement, devices, None)
        modes = [name.strip() for name in getattr(parallelism, "record_modes", "").split(",") if name.strip()]
        schedule = recording_schedule(placement, microbatches, modes=modes)
    else:
        raise TrainingError(
            "parallelism.planned_schedule is missing. Maybe --parallelism.planned_schedule schedule.json, or "
            "--parallelism.solve problem.json, --parallelism.record FOLDER or --parallelism.online."
        )
    size, planned = parallelism.pipeline_parallel_microbatch_size, schedule.problem.microbatches
    if training.local_batch_size != size * planned:
        raise TrainingError(
            f"training.local_batch_size is {training.local_batch_size} but the schedule has {planned} "
            f"microbatches of parallelism.pipeline_parallel_microbatch_size {size}. "
            f"Maybe set it to {size * planned}."
        )
    return schedule
