"""Writing a checkpoint: every process its stages, then rank 0 the document that makes them one.

Until all files are on the disk they lie in a folder that no reader looks for; one rename makes it a checkpoint. So
whenever a process or the machine ends, readers find what was there before, or all of the new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from optpipe.errors import CheckpointError
from optpipe.schedule import Schedule
from optpipe.schedule_text import schedule_text
from optpipe.train.checkpoints.disk import Disk
from optpipe.train.checkpoints.document import (
    GENERATORS,
    MANIFEST,
    SCHEDULE,
    CheckpointDocument,
    Launched,
    SavedFile,
    buffers_file,
    stage_file,
    versions_now,
)
from optpipe.train.checkpoints.folder import clear_leftovers, final_path, partial_path
from optpipe.train.checkpoints.generators import as_tensors, generator_states
from optpipe.train.checkpoints.state import stage_buffers, stage_tensors
from optpipe.train.checkpoints.together import together
from optpipe.train.config import TrainingConfig
from optpipe.train.model import Model


def write_checkpoint(folder: Path, config: TrainingConfig, model: Model, step: int, disk: Disk) -> int:
    """Write the checkpoint before `step`, in all processes together; returns its bytes.

    Weights are settled. Whatever had the name before, a damaged checkpoint at best, is replaced. Raises
    CheckpointError in every process if it fails in one; then nothing is left of it.
    """
    try:
        together(model.launch, lambda: _begin(folder, model, step, disk))
        parts = together(model.launch, lambda: _write_stages(partial_path(folder, step), model, disk))
        return max(together(model.launch, lambda: _finish(folder, config, model, step, parts, disk)))
    except CheckpointError:
        if model.launch.rank == 0:
            with suppress(OSError):
                disk.remove(partial_path(folder, step))
        raise


def schedule_sha256(schedule: Schedule | None) -> str | None:
    """By this the schedule that a run is started with is known again; None: it is to find one."""
    return None if schedule is None else hashlib.sha256(schedule_text(schedule).encode()).hexdigest()


def _begin(folder: Path, model: Model, step: int, disk: Disk) -> None:
    if model.launch.rank == 0:
        clear_leftovers(folder, disk)
        disk.make_folder(partial_path(folder, step))


def _write_stages(partial: Path, model: Model, disk: Disk) -> dict[str, Any]:
    """The first replica writes its stages; the others have the same weights, and write their buffers.

    A parameter that stages share is written with the first of them.
    """
    replica, files = model.launch.replica, {}
    for s, stage in model.stages.items():
        if replica == 0:
            elsewhere = {name for shared in model.shared for stage_, name in shared.places[1:] if stage_ == s}
            name, tensors = stage_file(s), stage_tensors(stage.module, model.optimizers.get(s), elsewhere)
        else:
            name, tensors = buffers_file(s, replica), stage_buffers(stage.module)
        if replica == 0 or tensors:
            files[name] = disk.write_tensors(partial / name, tensors).to_data()
    return {"files": files, "generators": generator_states(model.hardware)}


def _finish(
    folder: Path, config: TrainingConfig, model: Model, step: int, parts: Sequence[Mapping[str, Any]], disk: Disk
) -> int:
    """The bytes of the checkpoint; 0 in processes that do not lead."""
    if model.launch.rank:
        return 0
    partial, final = partial_path(folder, step), final_path(folder, step)
    files = {name: SavedFile(**file) for part in parts for name, file in part["files"].items()}
    files[GENERATORS] = disk.write_tensors(partial / GENERATORS, as_tensors([part["generators"] for part in parts]))
    files[SCHEDULE] = disk.write_text(partial / SCHEDULE, schedule_text(model.schedule))
    document = _document(config, model, step, files)
    manifest = disk.write_text(partial / MANIFEST, document.sealed())
    if final.exists():
        disk.remove(final)
    disk.publish(partial, final)
    return document.size_bytes + manifest.size_bytes


def _document(config: TrainingConfig, model: Model, step: int, files: dict[str, SavedFile]) -> CheckpointDocument:
    launch = model.launch
    return CheckpointDocument(
        format="optpipe.checkpoint/1",
        step=step,
        seed=config.seed,
        stages=len(model.program.placement),
        batch_microbatches=model.program.microbatches * launch.replicas,
        task=model.task.identity(),
        options=config.to_data(),
        given_schedule=schedule_sha256(config.schedule),
        launched=Launched(processes=launch.world, replicas=launch.replicas),
        versions=versions_now(),
        files=files,
    )
