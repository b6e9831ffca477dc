"""One device playing its list of actions, from the first to the last or until a message is missing."""

from __future__ import annotations

from contextlib import nullcontext

from optpipe.compile.actions import Action, excerpt
from optpipe.errors import TrainingError
from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.steps import Batch, DeviceParts, Step, StepBuilder
from optpipe.runtime.streams import Work
from optpipe.runtime.trace import Recorder


class Player:
    """A device's place in its list. `point` is how many of its actions come before its validation point."""

    def __init__(self, parts: DeviceParts, point: int = 0) -> None:
        builder = StepBuilder(parts)
        self.number, self.streams, self.slabs = parts.device, parts.streams, parts.slabs
        self._batch = parts.batch
        self._steps = builder.steps()
        self._cells = builder.cells()
        self._gates = [step.gate for step in self._steps]
        self._plain_calls = [step.call for step in self._steps]
        self._calls = self._plain_calls
        self._place = self._end = len(self._steps)
        self._point = point

    def begin(self, batch: Batch, meter: MemoryMeter | None, recorder: Recorder | None) -> None:
        """Back to the start of the list, with a new batch; watched by a meter, a recorder, both or none."""
        self._batch.inputs, self._batch.targets, self._batch.losses = batch.inputs, batch.targets, batch.losses
        watched = meter is not None or recorder is not None
        self._calls = [self._watched(step, meter, recorder) for step in self._steps] if watched else self._plain_calls
        self._place, self._end = 0, len(self._steps)
        self.streams.begin()

    def stop_at_point(self) -> None:
        """Play to the validation point and no further, until `go_on` or `begin_anew`."""
        self._end = self._point

    def go_on(self) -> None:
        """From the validation point to the end of the list."""
        self._end = len(self._steps)

    def begin_anew(self) -> None:
        """From the start of the list, the messages so far dropped; waits for those that were asked for."""
        for cell in self._cells:
            if cell.receipt is not None:
                cell.arrive()
            cell.clear()
        self._place, self._end = 0, len(self._steps)

    def end(self) -> None:
        """After a step: hold nothing of it, and let slabs that were too small grow."""
        self.streams.end()
        self._forget_batch()
        if self.slabs.too_small:
            self.streams.synchronize()  # no copy may be under way
            self.slabs.grow()

    def clear(self) -> None:
        """After an error: nothing is under way any more, and nothing is held."""
        self.streams.synchronize()
        for cell in self._cells:
            cell.clear()
        self._forget_batch()
        self._place = self._end = len(self._steps)

    @property
    def done(self) -> bool:
        """Whether it is where it stops."""
        return self._place == self._end

    @property
    def next_action(self) -> Action:
        """The action whose turn it is."""
        return self._steps[self._place].action

    def advance(self, most: int | None = None) -> int:
        """Run actions, `most` or all, until one needs a message that has not come; returns how many ran."""
        calls, gates = self._calls, self._gates
        place = begin = self._place
        end = self._end if most is None else min(begin + most, self._end)
        try:
            while place < end:
                gate = gates[place]
                if gate is not None and gate.receipt is not None and not gate.receipt.ready():
                    break
                calls[place]()
                place += 1
        except Exception as error:
            self._place = place
            raise TrainingError(self._failure(error)) from error
        self._place = place
        return place - begin

    def excerpt(self) -> str:
        """The list around the place."""
        return excerpt([step.action for step in self._steps], self._place)

    def _forget_batch(self) -> None:
        self._batch.inputs = self._batch.targets = self._batch.losses = ()
        self._calls = self._plain_calls

    def _watched(self, step: Step, meter: MemoryMeter | None, recorder: Recorder | None) -> Work:
        """The call of a step, with its memory counted and its times recorded."""
        counted = self.number if step.counted else None
        number, action, stream = self.number, step.action, self.streams.stream(step.action)

        def call() -> None:
            with meter.on(counted) if meter is not None else nullcontext():
                if recorder is None:
                    step.call()
                    return
                recorder.begin(number, action, stream)
                if step.arrival is not None:
                    step.arrival()
                    recorder.waited()
                step.work()
                recorder.end()

        return call

    def _failure(self, error: Exception) -> str:
        return (
            f"device {self.number} failed at {self.next_action}, action {self._place} of {len(self._steps)}: "
            f"{type(error).__name__}: {error}\n{self.excerpt()}"
        )
