"""Resuming from a checkpoint: compatibility of the run, and loading."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from optpipe.errors import CheckpointError, shown
from optpipe.schedule import Schedule
from optpipe.train.checkpoint.files import (
    FIRST_FORMAT,
    GENERATORS,
    SCHEDULE,
    CheckpointDocument,
    Piece,
    buffers_file,
    check_files,
    final_path,
    loader_file,
    overlapping,
    read_manifest,
    read_tensor,
    read_tensors,
    stage_file,
    steps_in,
    tensor_names,
    versions_now,
)
from optpipe.train.checkpoint.write import (
    OPTIMIZER,
    OTHER_MODEL,
    REPLICA,
    Names,
    buffer_names,
    load_stage,
    restore_generators,
    row_names,
    saved_of,
    schedule_sha256,
    stage_names,
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
            gather_or_raise(model.launch, partial(_check_whole, path, model))
        except CheckpointError as fault:
            if mode == "must":
                raise CheckpointError(f"{fault} Maybe --resume auto takes the one before it.") from None
            if model.launch.rank == 0:
                LOG.warning("refused a checkpoint: %s", fault)
            damaged.append(step)
            continue
        known = {name for names in model.launch.gather(_names_of(model)) for name in names}
        borrowed = any(gather_or_raise(model.launch, partial(_load, path, model, known)))
        if model.launch.rank == 0:
            LOG.info("resumed from %s in %.2f s", path, perf_counter() - begin)
            if borrowed:
                LOG.warning(
                    "resumed with the buffers of replica 0, such as running statistics, in every replica: the "
                    "checkpoint does not have them for as many replicas as there are now"
                )
        if not read_manifest(path).weights_alone:
            _swap_to_saved_schedule(path, config, model)
        return step, damaged
    if damaged:
        raise CheckpointError(
            f"{folder} has {len(damaged)} checkpoint(s) but none that is whole. Maybe its files were copied in part; "
            "with another folder training begins anew."
        )
    return 0, []


Index = Mapping[str, Sequence[Piece]]
"""Pieces of tensors by name."""


def _names_of(model: Model) -> list[str]:
    return sorted({name for s in model.stages for names, _ in _parts(model, s) for name in names.values()})


def _parts(model: Model, stage: int) -> list[tuple[Names, range | None]]:
    """Names of a stage in a checkpoint: of what it has whole, and of the layer of which it has these rows."""
    whole, divided = (stage_names(model, stage), None), row_names(model, stage)
    if not divided or model.vocabulary is None:
        return [whole]
    return [whole, (divided, model.vocabulary.rows_in(stage))]


def _check_whole(path: Path, model: Model) -> None:
    """Raise CheckpointError if a file that this process would load is damaged; each process checks its own."""
    document = read_manifest(path)
    index = _index(path, document, model)
    own = {
        piece.file
        for s in model.stages
        for names, rows in _parts(model, s)
        for pieces in _tensors_of(index, document, s, model, names).values()
        for piece, _ in overlapping(pieces, rows)
    }
    if (state := loader_file(model.launch.replica)) in document.files:
        own.add(state)
    check_files(path, document, own if document.weights_alone else {SCHEDULE, GENERATORS, *own})


def _load(path: Path, model: Model, known: Collection[str]) -> bool:
    """Load this process's stages; True if their buffers are another replica's, so that numbers will differ.

    `known`: names that parameters and buffers of all processes have in a checkpoint.
    """
    document, launch = read_manifest(path), model.launch
    check_same_run(path, document, model)
    index = _index(path, document, model)
    for name in map(saved_of, index):
        if name not in known and not name.startswith(REPLICA):
            raise CheckpointError(f"{path}: {name} is in the checkpoint but not in the model. {OTHER_MODEL}")
    alike, borrowed = document.launched.replicas == launch.replicas, False
    for s, stage in model.stages.items():
        for names, rows in _parts(model, s):
            wanted = _tensors_of(index, document, s, model, names)
            tensors = {name: read_tensor(path, pieces, rows) for name, pieces in wanted.items()}
            load_stage(stage.module, model.optimizers.get(s), tensors, names, f"stages[{s}]")
        own = alike and (launch.replica == 0 or index.keys() >= {*buffer_names(model, s, launch.replica).values()})
        borrowed = borrowed or (not own and bool(buffer_names(model, s, 0)))
    if document.launched.processes == launch.world:  # a rank of another number of processes has other stages
        restore_generators(read_tensors(path / GENERATORS), launch.rank, model.hardware)
    if model.task.loader is not None:
        state = path / loader_file(launch.replica)
        found = json.loads(state.read_text()) if state.name in document.files else None
        if not document.weights_alone:
            model.task.loader.load(found, document.step)
    model.step_number = document.step
    return borrowed and not document.weights_alone


def _cut_otherwise(document: CheckpointDocument, model: Model) -> bool:
    """True for a model whose layers have the same names wherever it is cut, and that is cut in other places now."""
    saved, now = document.task.get("cut"), model.task.identity().get("cut")
    return document.format != FIRST_FORMAT and saved is not None and now is not None and saved != now


def _index(path: Path, document: CheckpointDocument, model: Model) -> Index:
    """Every tensor of a checkpoint by its name of today. Raises OSError where a file of the first format is damaged."""
    if document.format != FIRST_FORMAT:
        return document.pieces
    found: dict[str, list[Piece]] = {}
    if document.stages != len(model.program.placement):
        return found  # another run's
    for s in range(document.stages):
        for replica in range(document.launched.replicas):
            file = buffers_file(s, replica) if replica else stage_file(s)
            for there in tensor_names(path / file) if file in document.files else ():
                kind, _, local = there.partition(".")
                key, _, local = local.partition(".") if kind == "optimizer" else ("", "", local)
                name = model.task.model_name(s, local)
                name = f"{OPTIMIZER}{name}.{key}" if key else name
                found[f"{REPLICA}{replica}.{name}" if replica else name] = [Piece(file, there)]
    return found


def _tensors_of(index: Index, document: CheckpointDocument, s: int, model: Model, names: Names) -> Index:
    """Tensors of a stage of this process that have one of the names, wherever they are.

    The optimizer state of a parameter that stages share goes to the first stage of this process that has it, whose
    optimizer updates it, and that of one whose rows are held apart to the rows. With the same number of replicas each
    resumes with its own buffers.
    """
    own, replica = {*names.values()}, model.launch.replica
    later = [place for shared in model.shared for place in shared.places_in(model.stages)[1:]]
    updated_elsewhere = {names[local] for stage, local in (*later, *model.followers) if stage == s and local in names}
    found = {}
    for name, at in index.items():
        parameter = saved_of(name)
        if parameter in own and (name == parameter or parameter not in updated_elsewhere):
            found[name] = at
    if replica and document.launched.replicas == model.launch.replicas:
        own_buffers = buffer_names(model, s, replica)
        found |= {names[local]: index[name] for local, name in own_buffers.items() if name in index and local in names}
    return found


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


_OWN_TO_A_START = {
    "checkpoints",
    "output",
    "online",
    "device",
    "check",
    "evaluate",
    "evaluate_every",
    "timeout_seconds",
    "data_parallel",
}
"""Options that change no number by themselves, or whose effect is compared instead."""


def check_same_run(path: Path, document: CheckpointDocument, model: Model) -> None:
    """Raise CheckpointError that names the first field that differs, with its value there and now."""
    identity, recut = model.task.identity(), _cut_otherwise(document, model)
    # The first format did not know the cut of a GPT, which follows from the number of stages.
    uncompared = {"cut"} if recut or "cut" not in document.task else set()
    compared = document.task.keys() if document.weights_alone else document.task.keys() | identity
    fields: list[tuple[str, Any, Any]] = [
        (f"task.{field}", document.task.get(field), identity.get(field)) for field in sorted(compared - uncompared)
    ]
    if not document.weights_alone:
        microbatches = model.microbatches * model.launch.replicas
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
