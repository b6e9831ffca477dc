"""Checkpoint callback: when to write, and what interrupts do."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, perf_counter
from types import FrameType, TracebackType
from typing import Any, Self

from optpipe.errors import CheckpointError
from optpipe.train.callback import Callback
from optpipe.train.checkpoint.files import Disk, final_path, open_folder, retire, steps_in
from optpipe.train.checkpoint.resume import resume
from optpipe.train.checkpoint.write import CheckpointWriter, refuse_unwritten
from optpipe.train.config import TrainingConfig
from optpipe.train.launch import gather_or_raise
from optpipe.train.model import Model
from optpipe.units import bytes_text

LOG = logging.getLogger("optpipe.train.checkpoint")


class CheckpointCallback(Callback):
    """Writer of checkpoints that are due, which ends the run after a signal to any process.

    `on_written` is called with the step and folder of each that is whole. Without a folder it only ends the run.
    `stopped`: training ends before the next step, in every process; `message` then says where its state is and how to
    resume. `failure`: why the last checkpoint could not be written, or None. Training continues then: the checkpoint
    before it is still whole, and the disk may have room at the next one.

    An asynchronous checkpoint is published at the first boundary after all processes have written their part, and at
    the latest when the next is due or the run ends.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: Model,
        interrupts: Interrupts,
        disk: Disk | None = None,
        on_written: Callable[[int, Path], None] | None = None,
    ) -> None:
        self._config, self._model, self._interrupts = config, model, interrupts
        self._disk, self._on_written = disk or Disk(), on_written
        self._at = 0
        self._writer: CheckpointWriter | None = None
        self._begun = 0.0
        self._damaged: list[int] = []
        self._announced = False
        self.stopped, self.message = False, ""
        self.failure: str | None = None

    def resume(self) -> int:
        """Load the newest whole checkpoint, in all processes together; return the step to begin with.

        Creates the folder, so that a path that cannot be written to is refused before the first step, as are stages
        with state that no checkpoint can hold. Raises CheckpointError in every process.
        """
        folder, launch = self._config.checkpoints.folder, self._model.launch
        if folder is None:
            return 0
        gather_or_raise(launch, lambda: open_folder(folder, self._disk) if launch.rank == 0 else None)
        gather_or_raise(launch, lambda: _check_shared(folder))
        gather_or_raise(launch, self._check_state)
        # The agent's store then serves all restarts: https://github.com/pytorch/pytorch/issues/135712
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._log(
                logging.WARNING,
                "torchrun is to start processes again (--max-restarts), but keeps the addresses of those before, to "
                "which the new ones then try to connect. Maybe set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun "
                "is started.",
            )
        self._at, self._damaged = resume(folder, self._config, self._model)
        return self._at

    def _check_state(self) -> None:
        for stage in self._model.stages.values():
            refuse_unwritten(stage.module)

    def is_due(self, step: int) -> bool:
        """True every `every_steps` steps and after the last."""
        config = self._config.checkpoints
        if config.folder is None or step <= self._at:
            return False
        return step % config.every_steps == 0 or step == self._config.steps

    def requests(self) -> bool:
        """True once this process has received a signal, or has written its part of an asynchronous checkpoint."""
        if self._interrupts.requested and not self._announced:
            self._announced = True
            self._log(logging.WARNING, f"{self._interrupts.requested}: ending soon; Ctrl-C again ends at once")
        return self._interrupts.requested is not None or (self._writer is not None and self._writer.written)

    def on_step_boundary(self, step: int) -> None:
        """Publish what has been written, write what is due or a signal calls for; after a signal end the run.

        Raises CheckpointError in every process if the state after the last step cannot be written: no later checkpoint
        would make up for it.
        """
        written = self._writer is not None and self._writer.written
        answers = self._model.launch.gather([self._interrupts.requested, written])
        signals = [name for name, _ in answers if name]
        folder = self._config.checkpoints.folder
        writes = folder is not None and step > self._at and (bool(signals) or self.is_due(step))
        if self._writer is not None and (writes or all(written for _, written in answers)):
            self._finish(self._writer)
        if folder is not None and writes and step > self._at:
            last = bool(signals) or step == self._config.steps
            self._write(folder, step, asynchronous=self._config.checkpoints.asynchronous and not last)
        if signals and step < self._config.steps:
            self.stopped = True
            self.message = self._how_to_go_on(signals[0], step, folder)

    def end(self) -> None:
        """Wait for the thread of a checkpoint that a failed run leaves unpublished."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, folder: Path, step: int, *, asynchronous: bool) -> None:
        begin = perf_counter()
        try:
            writer = CheckpointWriter(folder, self._config, self._model, step, self._disk, asynchronous=asynchronous)
        except CheckpointError as error:
            self._fail(step, error)
            return
        self._begun = begin
        if asynchronous:
            self._writer = writer
            self._log(logging.INFO, f"copied the state of step {step} in {perf_counter() - begin:.2f} s")
        else:
            self._finish(writer)

    def _finish(self, writer: CheckpointWriter) -> None:
        folder, step, self._writer = self._config.checkpoints.folder, writer.step, None
        assert folder is not None, "there is a writer"
        try:
            size_bytes = writer.finish()
        except CheckpointError as error:
            self._fail(step, error)
            return
        self.failure, self._at = None, step
        self._damaged = [other for other in self._damaged if other != step]
        if self._model.launch.rank == 0:
            try:
                retire(folder, self._disk, step, self._config.checkpoints.keep, self._damaged)
            except OSError as error:  # the new checkpoint is written all the same
                LOG.warning("an old checkpoint stays: %s", error)
        took = f"{bytes_text(size_bytes)} in {perf_counter() - self._begun:.2f} s"
        self._log(logging.INFO, f"wrote {final_path(folder, step)}: {took}")
        if self._on_written is not None:
            self._on_written(step, final_path(folder, step))

    def _fail(self, step: int, error: CheckpointError) -> None:
        """Note that a checkpoint could not be written; raise CheckpointError if it is that of the last step."""
        folder = self._config.checkpoints.folder
        assert folder is not None, "there is a folder to write to"
        self.failure = f"the checkpoint of step {step} could not be written: {error} {self._newest(folder)}"
        if step == self._config.steps:
            raise CheckpointError(self.failure) from None
        self._log(logging.WARNING, self.failure)

    def _how_to_go_on(self, name: str, step: int, folder: Path | None) -> str:
        ended = f"{name}: ended after {step} of {self._config.steps} steps"
        if folder is None:
            return f"{ended}. Nothing of the model is kept. Maybe give a folder with --checkpoint."
        if self.failure:
            return f"{ended}; {self.failure}"
        again = "The same command" if self._config.checkpoints.resume != "never" else "The command with --resume auto"
        return f"{ended}; all is in {final_path(folder, step)}. {again} goes on from there."

    def _newest(self, folder: Path) -> str:
        try:
            steps = [step for step in steps_in(folder) if step not in self._damaged]
        except OSError as error:
            return f"{folder} cannot be read: {error.strerror}."
        return f"The newest is {final_path(folder, steps[0])}." if steps else "There is none before it."

    def _log(self, level: int, text: str) -> None:
        if self._model.launch.rank == 0:
            LOG.log(level, "%s", text)


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not there, though rank 0 has made it. Maybe it is not on a file system that all hosts share."
        )


ECHO_S = 0.5
"""A second SIGINT within this time is an echo: launchers pass on what the terminal has already sent to the group."""


class Interrupts:
    """Context in which SIGINT or SIGTERM sets `requested` to its name. Does nothing outside the main thread.

    A signal that is ignored stays ignored: shells ignore SIGINT for background commands of a script. A second SIGINT
    raises KeyboardInterrupt, a third one kills the process. A second SIGTERM changes nothing: schedulers repeat it, and
    use SIGKILL when their grace period is over.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._since = 0.0
        self._before: Mapping[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handled = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, monotonic()
        elif number == signal.SIGINT and monotonic() - self._since > ECHO_S:
            signal.signal(number, signal.SIG_DFL)  # if a C extension delays this exception, the next SIGINT kills
            raise KeyboardInterrupt
