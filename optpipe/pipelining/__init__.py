"""Planned schedules for trainers that are built on `torch.distributed.pipelining`.

`PlannedSchedule` takes the place of torch's schedule classes: it runs the same `PipelineStage` objects by a schedule of
OptPipe, offload and split backwards included. `Recorder` measures what to plan for, in the trainer itself.
"""

from optpipe.pipelining.online import OnlinePlanner, solve_at_start
from optpipe.pipelining.recorder import Recorder, recording_schedule
from optpipe.pipelining.schedule import PlannedSchedule

__all__ = ["OnlinePlanner", "PlannedSchedule", "Recorder", "recording_schedule", "solve_at_start"]
