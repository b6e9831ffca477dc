"""Schedules that are found while a trainer runs: its steps are recorded, rank 0 solves meanwhile, all ranks change.

Running a schedule needs no solver here: `python -m optpipe` solves, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from optpipe.errors import TrainingError
from optpipe.pipelining.recorder import Recorder, write_records
from optpipe.pipelining.schedule import PlannedSchedule
from optpipe.runtime.distributed import gather_json
from optpipe.schedule import Schedule
from optpipe.trace.record import RankRecord
from optpipe.units import time_text

QUICK_METHOD = "ada-offload"
"""A published schedule that keeps every budget and takes milliseconds to make."""


class OnlinePlanner:
    """Records steps of a `PlannedSchedule`, has a better schedule searched for, and changes to it between steps.

    Every rank makes one, and calls `step_done` after each step: a collective of all processes in one of `every` steps.
    Rank 0 first takes a published schedule that keeps the budgets, then what a search finds in `time_limit_s` (None: no
    search).
    `memory_bytes` is the memory of a device for the model, by default that of the GPU, of which a share `margin` is
    left free; on the CPU there is no limit by default.
    """

    def __init__(
        self,
        schedule: PlannedSchedule,
        *,
        memory_bytes: int | None = None,
        margin: float = 0.1,
        time_limit_s: float | None = 30.0,
        every: int = 5,
        steps: int = 3,
        skip: int = 2,
    ) -> None:
        device = schedule.stages[0].device
        if memory_bytes is None and device.type == "cuda":
            memory_bytes = torch.cuda.get_device_properties(device).total_memory
        self._schedule, self._every, self._device = schedule, every, device
        self._memory = [] if memory_bytes is None else [f"--memory={memory_bytes}", f"--memory-margin={margin}"]
        self._time_limit_s = time_limit_s
        self._folder = TemporaryDirectory(prefix="optpipe-online-")
        self._recorder: Recorder | None = Recorder(schedule, Path(self._folder.name) / "own", steps=steps, skip=skip)
        self._running: subprocess.Popen[str] | None = None
        self._commands: list[list[str]] = []
        self._count = 0
        self.log: list[str] = []

    @property
    def done(self) -> bool:
        """True on rank 0 when the search is over."""
        return self._recorder is None and self._running is None and not self._commands

    def step_done(self) -> bool:
        """Gather records, look for a result, change schedules; True if the next step runs by another schedule."""
        self._count += 1
        if self._recorder is not None:
            if not self._recorder.done:
                return False
            self._gather(self._recorder)
            self._recorder = None
        if self._count % self._every:
            return False
        return self._schedule.replan(self._found())

    def close(self) -> None:
        """End the search, if one runs."""
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
            self._running = None
        self._commands.clear()
        self._folder.cleanup()

    def _gather(self, recorder: Recorder) -> None:
        """Collect the records of all ranks on rank 0, whose disk need not be that of the others, and begin."""
        assert recorder.record is not None, "it is done"
        records = gather_json(recorder.record.to_data(), device=self._device)
        if dist.get_rank() != 0:
            return
        folder = Path(self._folder.name)
        (folder / "records").mkdir()
        write_records(map(RankRecord.from_data, records), folder / "records")
        solve = ["solve", self._problem, "-o", self._result]
        self._commands = [
            ["profile", "--from-run", str(folder / "records"), "-o", self._problem, *self._memory],
            [*solve, "--method", QUICK_METHOD],
        ]
        if self._time_limit_s is not None:
            self._commands.append([*solve, "--time-limit", str(self._time_limit_s)])

    @property
    def _problem(self) -> str:
        return str(Path(self._folder.name) / "problem.json")

    @property
    def _result(self) -> str:
        return str(Path(self._folder.name) / "schedule.json")

    def _found(self) -> Schedule | None:
        """On rank 0 the schedule of a search that is over, once. A search that fails ends no training.

        A published method may be none for the stages, such as those that are compiled; then the search is next.
        """
        found = None
        if self._running is not None:
            if self._running.poll() is None:
                return None
            _, errors = self._running.communicate()
            if self._running.returncode:
                self.log.append(f"the search failed: {errors.strip()[-1000:]}")
                if not Path(self._problem).exists():
                    self._commands.clear()
            elif Path(self._result).exists():
                found = Schedule.load(self._result)
                self.log.append(f"{found.method}: {time_text(found.value_us)} a step predicted")
            self._running = None
        if self._commands:
            self._running = begin_optpipe(self._commands.pop(0))
        return found


def begin_optpipe(arguments: list[str]) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, which is no rank of the run."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"):
        alone.pop(name, None)
    command = [sys.executable, "-m", "optpipe", *arguments]
    return subprocess.Popen(command, env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def solve_at_start(problem: str | Path, time_limit_s: float, device: torch.device) -> Schedule:
    """The schedule that rank 0 finds for a problem file, on every rank. A collective of all processes.

    Raises TrainingError in all of them where none was found.
    """
    answer: dict[str, object] | None = None
    if dist.get_rank() == 0:
        with TemporaryDirectory(prefix="optpipe-solve-") as folder:
            result = Path(folder) / "schedule.json"
            running = begin_optpipe(["solve", str(problem), "-o", str(result), "--time-limit", str(time_limit_s)])
            _, errors = running.communicate()
            answer = {"error": f"'optpipe solve {problem}' found no schedule: {errors.strip()[-1000:]}"}
            if running.returncode == 0:
                answer = {"schedule": Schedule.load(result).to_data()}
    found = gather_json(answer, device=device)[0]
    if "error" in found:
        raise TrainingError(found["error"])
    return Schedule.from_data(found["schedule"])
