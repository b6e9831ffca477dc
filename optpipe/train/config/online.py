"""`[online]`: where the schedule comes from when none is given, and whether better ones are sought while training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from optpipe.errors import Issue
from optpipe.placements import devices_of_stages
from optpipe.train.config.setting import Group, setting


@dataclass(frozen=True)
class OnlineConfig(Group):
    """Profile, solve, train; and with `online` profile and solve again beside the training."""

    table: ClassVar[str] = "online"

    mode: Literal["off", "first", "online"] = setting(
        "off",
        "off: train as a given schedule says; first: profile and solve, then train; online: train at once, profile "
        "and solve beside it, and change to a better schedule between two steps",
    )
    devices: int | None = setting(None, "devices of the pipeline, where no schedule says so", least=1, most=4096)
    placement: str = setting("linear", "of stages on devices: linear, interleaved-2 (or more), v (or v-4)")
    microbatches: int | None = setting(None, "in a step; default: two a device", least=1, most=65536)
    memory_bytes: int | None = setting(
        None,
        "what a device has for the model, weights and optimizer included; default: no limit, and with a schedule given "
        "what that takes",
        least=1,
        flag="memory",
    )
    time_limit_s: float = setting(30.0, "seconds of each search", above=0, most=1e6, flag="time_limit")
    workers: int = setting(1, "threads of a search beside the training", least=1, most=1024)
    rounds: int = setting(8, "of measuring each op, before the first step", least=1, most=10000)
    first_step: int = setting(3, "the first step of training whose ops are timed", least=0, most=10**9)
    record_steps: int = setting(3, "steps whose ops are timed each time", least=1, most=1000)
    every_steps: int = setting(100, "steps from one timing to the next", least=1, most=10**9)
    drift: float = setting(0.1, "share by which a device's op times must change before it is solved anew", above=0)
    least_gain: float = setting(0.01, "share of the step that a new schedule must save to be taken", least=0, most=1)
    save: Path | None = setting(None, "where the schedule in use at the end is written", flag="save_schedule")

    @property
    def on(self) -> bool:
        """Whether anything is measured or solved."""
        return self.mode != "off"

    def placed(self, prefix: str = "--") -> tuple[int, ...]:
        """The device of each stage, where no schedule says so. Raises InputError; fields are named after `prefix`."""
        return devices_of_stages(self.placement, self.devices, None, prefix)

    def conflicts(self) -> Iterator[Issue]:
        """A new schedule is judged by steps that are not timed op by op."""
        if self.every_steps <= self.record_steps:
            detail = (
                f"is {self.every_steps} but must be above record_steps, which is {self.record_steps}. "
                "Maybe it is meant in steps, not in seconds."
            )
            yield Issue("every_steps", "too_small", detail)
