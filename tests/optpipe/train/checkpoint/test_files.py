"""The disk full, or the process killed, at every single change of the folder: what was there before still is."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from optpipe.errors import CheckpointError
from optpipe.train.checkpoint.files import Disk, SavedFile, final_path, steps_in
from optpipe.train.checkpoint.write import stage_names, stage_tensors
from optpipe.train.model import Model
from tests.optpipe.train.checkpoint.runs import Run, config_of, run

When = Literal["before", "half", "after"]


class Killed(BaseException):
    """The process is gone: nothing that it would do on an error is done."""


class FaultyDisk(Disk):
    """Fails at the change number `at`: before it, in its middle or after it."""

    def __init__(self, at: int, when: When, error: Callable[[], BaseException]) -> None:
        self.changes, self._at, self._when, self._error = 0, at, when, error

    def make_folder(self, path: Path) -> None:
        self._change(lambda: super(FaultyDisk, self).make_folder(path))

    def write_text(self, path: Path, text: str) -> SavedFile:
        return self._written(path, lambda: super(FaultyDisk, self).write_text(path, text))

    def write_tensors(
        self, path: Path, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] | None = None
    ) -> SavedFile:
        return self._written(path, lambda: super(FaultyDisk, self).write_tensors(path, tensors, first_rows))

    def publish(self, partial: Path, final: Path) -> None:
        self._change(lambda: super(FaultyDisk, self).publish(partial, final))

    def remove(self, folder: Path) -> None:
        self._change(lambda: super(FaultyDisk, self).remove(folder), lambda: self._half_removed(folder))

    def _written(self, path: Path, write: Callable[[], SavedFile]) -> SavedFile:
        files: list[SavedFile] = []

        def half() -> None:
            write()
            os.truncate(path, path.stat().st_size // 2)

        self._change(lambda: files.append(write()), half)
        return files[0]

    def _half_removed(self, folder: Path) -> None:
        aside = folder.with_name(".removed-" + folder.name.lstrip("."))
        folder.rename(aside)
        next(aside.iterdir(), aside / "none").unlink(missing_ok=True)

    def _change(self, whole: Callable[[], None], half: Callable[[], None] | None = None) -> None:
        self.changes += 1
        if self.changes != self._at:
            whole()
            return
        if self._when == "after":
            whole()
        elif self._when == "half" and half:
            half()
        raise self._error()


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def at_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A folder with the checkpoint of step 2 alone, and the run that has come to step 4 since."""
    folder = tmp_path_factory.mktemp("kept")
    run(config_of(folder, keep=1), until=2)
    there = config_of(folder, keep=1, every_steps=4)
    at_four = run(there, until=3)
    at_four.losses |= {3: at_four.model.step(at_four.model.task.batch(3))[0].loss}
    assert steps_in(folder) == [2]
    return folder, at_four


def tensors_of(model: Model) -> dict[str, Tensor]:
    return {
        name: tensor
        for s, stage in model.stages.items()
        for name, tensor in stage_tensors(stage.module, model.optimizers[s], stage_names(model, s)).items()
    }


def attempt(kept: Path, folder: Path, at_four: Run, disk: Disk) -> None:
    """Write the checkpoint of step 4 beside that of step 2, which it replaces."""
    if not folder.exists():
        shutil.copytree(kept, folder)
    checkpoints = type(at_four.checkpoints)(
        config_of(folder, keep=1, every_steps=4), at_four.model, at_four.checkpoints._interrupts, disk
    )
    checkpoints.on_step_boundary(4)
    at_four.checkpoints = checkpoints


def changes_of_one_checkpoint(kept: Path, folder: Path, at_four: Run) -> int:
    disk = FaultyDisk(0, "before", full)
    attempt(kept, folder, at_four, disk)
    assert steps_in(folder) == [4]
    return disk.changes


@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_killed_at_any_change_the_newest_whole_checkpoint_is_there(
    at_four: tuple[Path, Run], when: When, tmp_path: Path
) -> None:
    """Whatever is found afterwards loads, and is the state of step 2 or of step 4, bit for bit."""
    kept, arrived = at_four
    of_step = {2: tensors_of(run(config_of(kept, keep=1), until=2).model), 4: tensors_of(arrived.model)}
    changes = changes_of_one_checkpoint(kept, tmp_path / "whole", arrived)
    found = []
    for at in range(1, changes + 1):
        folder = tmp_path / f"killed {at}"
        with pytest.raises(Killed):
            attempt(kept, folder, arrived, FaultyDisk(at, when, Killed))
        resumed = run(config_of(folder, keep=1, resume="must"), until=0)
        found.append(resumed.model.step_number)
        wanted = of_step[resumed.model.step_number]
        assert all(torch.equal(wanted[name], tensor) for name, tensor in tensors_of(resumed.model).items())
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert found == sorted(found)
    assert set(found) == {2, 4}


@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_full_disk_is_told_and_training_goes_on(
    at_four: tuple[Path, Run], when: When, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, arrived = at_four
    changes = changes_of_one_checkpoint(kept, tmp_path / "whole", arrived)
    for at in range(1, changes + 1):
        folder = tmp_path / f"full {at}"
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            attempt(kept, folder, arrived, FaultyDisk(at, when, full))
        written = arrived.checkpoints.failure is None
        assert written == (at == changes), "only deleting the old one comes after the new one is whole"
        assert set(steps_in(folder)) >= {4 if written else 2}
        [told] = caplog.messages
        assert "No space left on device" in told
        if not written:
            assert str(final_path(folder, max(steps_in(folder)))) in told


class SlowDisk(Disk):
    """Writes tensors once it is told to."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def write_tensors(
        self, path: Path, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] | None = None
    ) -> SavedFile:
        assert self.goes_on.wait(60)
        return super().write_tensors(path, tensors, first_rows)


def test_training_goes_on_while_a_copy_of_the_state_is_written(tmp_path: Path) -> None:
    """A late write holds the state of the step at which it was due; before it there is no checkpoint."""
    disk, seen = SlowDisk(), []

    def before(step: int) -> None:
        seen.append(steps_in(tmp_path / "beside"))
        if step == 5:
            disk.goes_on.set()

    beside = run(config_of(tmp_path / "beside", every_steps=3, asynchronous=True), disk=disk, before=before)
    assert seen == [[]] * 6
    assert steps_in(tmp_path / "beside") == [6, 3]
    waiting = run(config_of(tmp_path / "waiting", every_steps=3))
    assert beside.losses == waiting.losses
    for step in (3, 6):
        files = [final_path(tmp_path / kind, step) for kind in ("beside", "waiting")]
        for name in ("stage-0000.safetensors", "stage-0001.safetensors", "schedule.json"):
            assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()


def test_a_run_that_fails_leaves_no_thread_and_nothing_unwhole(tmp_path: Path) -> None:
    disk = SlowDisk()
    config = config_of(tmp_path, every_steps=3, asynchronous=True)
    failed = run(config, disk=disk, until=4)
    disk.goes_on.set()
    failed.checkpoints.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "optpipe-checkpoint"]
    assert steps_in(tmp_path) == []
    assert list(run(config).losses) == list(range(6))


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """The run has nothing else to show for itself."""
    ready = run(config_of(tmp_path, every_steps=100), until=5)
    ready.model.step(ready.model.task.batch(5))
    ready.checkpoints._disk = FaultyDisk(2, "half", full)
    with pytest.raises(CheckpointError, match=r"step 6 could not be written: No space left on device\. There is none"):
        ready.checkpoints.on_step_boundary(6)


def test_a_limit_that_the_kernel_sets_is_told(at_four: tuple[Path, Run], tmp_path: Path) -> None:
    """No fault of the test's making: files may not grow beyond what a stage takes, in the middle of which it fails."""
    kept, arrived = at_four
    shutil.copytree(kept, tmp_path / "limited")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        attempt(kept, tmp_path / "limited", arrived, Disk())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert arrived.checkpoints.failure is not None
    assert "File too large" in arrived.checkpoints.failure
    assert steps_in(tmp_path / "limited") == [2]
