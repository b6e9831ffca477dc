"""Resuming from a checkpoint: compatibility of the run, and loading."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from optpipe.document import shown
from optpipe.errors import CheckpointError
from optpipe.schedule import Schedule
from optpipe.train.checkpoint.files import (
    GENERATORS,
    SCHEDULE,
    CheckpointDocument,
    buffers_file,
    check_files,
    final_path,
    read_manifest,
    read_tensors,
    stage_file,
    steps_in,
    versions_now,
)
from optpipe.train.checkpoint.write import (
    load_stage,
    parameter_of,
    renamed,
    restore_generators,
    schedule_sha256,
    stage_buffers,
)
from optpipe.train.config import TrainingConfig, flat
from optpipe.train.launch import gather_or_raise
from optpipe.train.model import Model

LOG = logging.getLogger("optpipe.train.checkpoint")


def resume(folder: Path, config: TrainingConfig, model: Model) -> tuple[int, list[int]]:
    """Load the newest whole checkpoint, in all processes together.

    Returns its step (0 without a checkpoint) and the steps of newer, damaged ones. If any process finds a damaged file
    among those that it needs, all fall back to the checkpoint before. Another run's checkpoint is an error instead: no
    fallback could be what the user meant.

    Raises CheckpointError in all processes if there are checkpoints but none is whole, if the newest whole one is of
    another run, and if `config.checkpoints.resume` does not allow what is there.
    """
    mode, begin = config.checkpoints.resume, perf_counter()
    steps = gather_or_raise(model.launch, lambda: steps_in(folder))[0]
    if mode == "never" and steps:
        raise CheckpointError(
            f"checkpoints.resume is 'never' but {final_path(folder, steps[0])} is there already. "
            "Maybe --resume auto goes on from it; another folder begins anew."
        )
    if mode == "must" and not steps:
        raise CheckpointError(
            f"checkpoints.resume is 'must' but {folder} has no checkpoint. Maybe the folder is another."
        )
    damaged: list[int] = []
    for step in steps:
        path = final_path(folder, step)
        try:
            gather_or_raise(model.launch, lambda path=path: _check_whole(path, model))  # type: ignore[misc]
        except CheckpointError as fault:
            if mode == "must":
                raise CheckpointError(f"{fault} Maybe --resume auto takes the one before it.") from None
            if model.launch.rank == 0:
                LOG.warning("refused a checkpoint: %s", fault)
            damaged.append(step)
            continue
        borrowed = any(gather_or_raise(model.launch, lambda path=path: _load(path, model)))  # type: ignore[misc]
        if model.launch.rank == 0:
            LOG.info("resumed from %s in %.2f s", path, perf_counter() - begin)
            if borrowed:
                LOG.warning(
                    "resumed with the buffers of replica 0, such as running statistics, in every replica: the "
                    "checkpoint does not have them for as many replicas as there are now"
                )
        _swap_to_saved_schedule(path, config, model)
        return step, damaged
    if damaged:
        raise CheckpointError(
            f"{folder} has {len(damaged)} checkpoint(s) but none that is whole. Maybe its files were copied in part; "
            "with another folder training begins anew."
        )
    return 0, []


def _check_whole(path: Path, model: Model) -> None:
    """Raise CheckpointError if a file that this process would load is damaged; each process checks its own."""
    document = read_manifest(path)
    names = [SCHEDULE, GENERATORS]
    if _cut_otherwise(document, model):
        names += map(stage_file, range(document.stages))
    elif document.stages == len(model.program.placement):
        names += [name for s in model.stages for name in _files_of(s, document, model)]
        names += [stage_file(shared.places[0][0]) for shared in model.shared if shared.places_in(model.stages)]
    check_files(path, document, sorted({*names}))


def _files_of(s: int, document: CheckpointDocument, model: Model) -> list[str]:
    """Files of a stage; tensors in later ones replace those in earlier ones.

    With the same number of replicas each resumes with its own buffers, if the checkpoint has them (older versions wrote
    those of replica 0 alone).
    """
    own = buffers_file(s, model.launch.replica)
    alike = document.launched.replicas == model.launch.replicas
    return [stage_file(s), own] if alike and own in document.files else [stage_file(s)]


def _load(path: Path, model: Model) -> bool:
    """Load this process's stages; True if their buffers are another replica's, so that numbers will differ."""
    document, launch = read_manifest(path), model.launch
    check_same_run(path, document, model)
    borrowed = False
    for s, stage in model.stages.items():
        names = _files_of(s, document, model)
        tensors = _with_shared(path, _saved(path, document, s, model), s, document, model)
        load_stage(stage.module, model.optimizers.get(s), tensors, f"stages[{s}]")
        own = len(names) > 1 or (launch.replica == 0 and document.launched.replicas == launch.replicas)
        borrowed = borrowed or (not own and bool(stage_buffers(stage.module)))
    if document.launched.processes == model.launch.world:  # a rank of another number of processes has other stages
        restore_generators(read_tensors(path / GENERATORS), model.launch.rank, model.hardware)
    model.step_number = document.step
    return borrowed


def _cut_otherwise(document: CheckpointDocument, model: Model) -> bool:
    """True for a model whose layers have the same names wherever it is cut, and that is cut in other places now."""
    saved, now = document.task.get("cut"), model.task.identity().get("cut")
    return saved is not None and now is not None and saved != now


def _saved(path: Path, document: CheckpointDocument, s: int, model: Model) -> dict[str, Tensor]:
    """Tensors of a stage: all of its files, or those of its own names in the files of all stages of another cut."""
    if not _cut_otherwise(document, model):
        return {name: t for file in _files_of(s, document, model) for name, t in read_tensors(path / file).items()}
    module = model.stages[s].module
    own = {f"buffer.{name}" for name, _ in module.named_buffers()} | {name for name, _ in module.named_parameters()}
    files = [path / stage_file(stage) for stage in range(document.stages)]
    return {n: t for file in files for n, t in read_tensors(file, lambda n: (parameter_of(n) or n) in own).items()}


def _with_shared(
    path: Path, tensors: dict[str, Tensor], s: int, document: CheckpointDocument, model: Model
) -> dict[str, Tensor]:
    """Tensors of a stage, completed by those of shared parameters, which are in the file of their first stage.

    The optimizer state goes to the first stage of this process that has the parameter, whose optimizer updates it.
    Older versions wrote shared parameters with every stage; those copies are ignored.
    """
    others = range(document.stages) if _cut_otherwise(document, model) else ()
    for shared in model.shared:
        (keeper, kept_as), own_places = shared.places[0], shared.places_in(model.stages)
        for name in [name for stage, name in own_places if stage == s and stage != keeper]:
            tensors = {full: tensor for full, tensor in tensors.items() if parameter_of(full) != name}
            kept = {
                full: tensor
                for keeps in others or (keeper,)
                for full, tensor in read_tensors(
                    path / stage_file(keeps),
                    lambda full, of=kept_as: parameter_of(full) == of,  # type: ignore[misc]
                ).items()
            }
            tensors |= {
                renamed(full, name): tensor
                for full, tensor in kept.items()
                if full.startswith("parameter.") or own_places[0] == (s, name)
            }
    return tensors


def _swap_to_saved_schedule(path: Path, config: TrainingConfig, model: Model) -> None:
    """Switch to the schedule that was in use if the run is started as before: with the same schedule, or with none.

    Re-solving may have switched schedules before the checkpoint, and going on with that one keeps numbers and speed. A
    user who starts the run with another schedule wants that one.
    """
    document, saved = read_manifest(path), Schedule.load(path / SCHEDULE)
    started_alike = document.given_schedule == schedule_sha256(config.schedule)
    placement, microbatches = [stage.device for stage in saved.problem.stages], saved.problem.microbatches
    fits = (placement, microbatches) == (list(model.program.placement), model.program.microbatches)
    if started_alike and saved != model.schedule and fits:
        model.swap(saved)
    if model.launch.rank == 0:
        for text in numeric_differences(document, model, same_schedule=saved == model.schedule):
            LOG.warning("resumed %s", text)


_OWN_TO_A_START = {"checkpoints", "output", "online", "device", "check", "evaluate", "timeout_seconds", "data_parallel"}
"""Options that change no number by themselves, or whose effect is compared instead."""


def check_same_run(path: Path, document: CheckpointDocument, model: Model) -> None:
    """Raise CheckpointError that names the first field that differs, with its value there and now."""
    identity, recut = model.task.identity(), _cut_otherwise(document, model)
    fields: list[tuple[str, Any, Any]] = [
        (f"task.{field}", document.task.get(field), identity.get(field))
        for field in sorted(document.task.keys() | identity)
        if field != "cut" or not recut
    ]
    microbatches = model.program.microbatches * model.launch.replicas
    optimizer = dict(flat(document.options)).get("optimizer.name")
    fields += [
        ("seed", document.seed, model.config.seed),
        ("the number of stages", 0 if recut else document.stages, 0 if recut else len(model.program.placement)),
        ("microbatches of a step, of all replicas,", document.batch_microbatches, microbatches),
        ("optimizer.name", optimizer, model.config.optimizer.name),
    ]
    for field, saved, now in fields:
        if saved != now:
            raise CheckpointError(
                f"{field} is {shown(saved)} in {path} but {shown(now)} now. Maybe the folder is that of another run."
            )
    steps = model.config.steps
    if document.step > steps:
        raise CheckpointError(f"steps is {steps} but {path} comes after {document.step} steps. Maybe raise --steps.")


def numeric_differences(document: CheckpointDocument, model: Model, *, same_schedule: bool) -> Iterator[str]:
    """Sentences on why numbers may not have the bits of an uninterrupted run; none if they will."""
    options = dict(flat(document.options))
    for field, now in flat(model.config.to_data()):
        saved = options.get(field)
        irrelevant = field.partition(".")[0] in _OWN_TO_A_START
        if field == "steps":  # the learning rate may go by them
            irrelevant = model.config.optimizer.decay == "none"
        if saved != now and not irrelevant:
            yield f"with {field} {shown(now)}; it was {shown(saved)} before"
    for name, now in versions_now().items():
        saved = document.versions.get(name)
        if saved != now:
            yield f"with {name} {now}; it was {saved} before"
    before, launch = document.launched, model.launch
    if (before.processes, before.replicas) != (launch.world, launch.replicas):
        yield (
            f"in {launch.world} process(es) of {launch.replicas} replica(s), not {before.processes} of "
            f"{before.replicas}: sums may be added in another order"
        )
    if _cut_otherwise(document, model):
        yield "with stages of other layers: sums may be added in another order, and layers that draw draw other numbers"
    if not same_schedule:
        yield "with another schedule than before: sums may be added in another order"
