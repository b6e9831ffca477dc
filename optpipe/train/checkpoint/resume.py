"""Resuming from a checkpoint: compatibility of the run, and loading."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
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
    """The step to go on with, and the steps of newer checkpoints that are damaged; in all processes together.

    0 where there is no checkpoint. Raises CheckpointError in all processes: where there is one but none is whole,
    where it is of another run, and where `config.checkpoints.resume` does not allow what is there.
    """
    mode, begin = config.checkpoints.resume, perf_counter()
    steps = gather_or_raise(model.launch, lambda: steps_in(folder))[0]
    _check_mode(folder, steps, mode)
    damaged: list[int] = []
    for step in steps:
        path = final_path(folder, step)
        fault = _fault(path, model)
        if fault is None:
            borrowed = any(gather_or_raise(model.launch, lambda path=path: _load(path, model)))  # type: ignore[misc]
            if model.launch.rank == 0:
                LOG.info("resumed from %s in %.2f s", path, perf_counter() - begin)
                if borrowed:
                    LOG.warning("resumed %s", _BORROWED)
            _go_on_with_its_schedule(path, config, model)
            return step, damaged
        if mode == "must":
            raise CheckpointError(f"{fault} Maybe --resume auto takes the one before it.")
        if model.launch.rank == 0:
            LOG.warning("refused a checkpoint: %s", fault)
        damaged.append(step)
    if damaged:
        raise CheckpointError(
            f"{folder} has {len(damaged)} checkpoint(s) but none that is whole. Maybe its files were copied in part; "
            "with another folder training begins anew."
        )
    return 0, []


def _check_mode(folder: Path, steps: Sequence[int], mode: str) -> None:
    if mode == "never" and steps:
        raise CheckpointError(
            f"checkpoints.resume is 'never' but {final_path(folder, steps[0])} is there already. "
            "Maybe --resume auto goes on from it; another folder begins anew."
        )
    if mode == "must" and not steps:
        raise CheckpointError(
            f"checkpoints.resume is 'must' but {folder} has no checkpoint. Maybe the folder is another."
        )


def _fault(path: Path, model: Model) -> str | None:
    """What is damaged in it for any process; each looks at the files that it would load."""
    try:
        gather_or_raise(model.launch, lambda: _check_whole(path, model))
    except CheckpointError as error:
        return str(error)
    return None


def _check_whole(path: Path, model: Model) -> None:
    document = read_manifest(path)
    names = [SCHEDULE, GENERATORS]
    if document.stages == len(model.program.placement):
        names += [name for s in model.stages for name in _files_of(s, document, model)]
        names += [stage_file(shared.places[0][0]) for shared in model.shared if shared.places_in(model.stages)]
    check_files(path, document, sorted({*names}))


def _files_of(s: int, document: CheckpointDocument, model: Model) -> list[str]:
    """The files of a stage, later ones over earlier ones.

    In as many replicas as before each has its own buffers, where the checkpoint has them (older versions kept those of
    replica 0 alone).
    """
    own = buffers_file(s, model.launch.replica)
    alike = document.launched.replicas == model.launch.replicas
    return [stage_file(s), own] if alike and own in document.files else [stage_file(s)]


def _load(path: Path, model: Model) -> bool:
    """Whether this process has taken over buffers that may not be what its replica would have come to."""
    document, launch = read_manifest(path), model.launch
    check_same_run(path, document, model)
    borrowed = False
    for s, stage in model.stages.items():
        names = _files_of(s, document, model)
        tensors = {name: tensor for file in names for name, tensor in read_tensors(path / file).items()}
        tensors = _with_shared(path, tensors, s, model)
        load_stage(stage.module, model.optimizers.get(s), tensors, f"stages[{s}]")
        own = len(names) > 1 or (launch.replica == 0 and document.launched.replicas == launch.replicas)
        borrowed = borrowed or (not own and bool(stage_buffers(stage.module)))
    if document.launched.processes == model.launch.world:
        restore_generators(read_tensors(path / GENERATORS), model.launch.rank, model.hardware)
    model.step_number = document.step
    return borrowed


def _with_shared(path: Path, tensors: dict[str, Tensor], s: int, model: Model) -> dict[str, Tensor]:
    """The tensors of a stage, with those of parameters that are kept with an earlier stage.

    An optimizer has them in the first stage of each process alone. (Older versions wrote them with every stage.)
    """
    for shared in model.shared:
        (keeper, kept_as), here = shared.places[0], shared.places_in(model.stages)
        for name in [name for stage, name in here if stage == s and stage != keeper]:
            tensors = {full: tensor for full, tensor in tensors.items() if parameter_of(full) != name}
            kept = read_tensors(path / stage_file(keeper), lambda full, of=kept_as: parameter_of(full) == of)  # type: ignore[misc]
            tensors |= {
                renamed(full, name): tensor
                for full, tensor in kept.items()
                if full.startswith("parameter.") or here[0] == (s, name)
            }
    return tensors


_BORROWED = (
    "with the buffers of replica 0, such as running statistics, in every replica: the checkpoint does not have them "
    "for as many replicas as there are now"
)


def _go_on_with_its_schedule(path: Path, config: TrainingConfig, model: Model) -> None:
    """Swap in the schedule that was in use, if the run is started as it was before: with the same one, or with none.

    Whoever starts it with another one means that one.
    """
    document, saved = read_manifest(path), Schedule.load(path / SCHEDULE)
    started_alike = document.given_schedule == schedule_sha256(config.schedule)
    if started_alike and saved != model.schedule and _place(saved) == _place(model.schedule):
        model.swap(saved)
    if model.launch.rank == 0:
        for text in numeric_differences(document, model, same_schedule=saved == model.schedule):
            LOG.warning("resumed %s", text)


def _place(schedule: Schedule) -> tuple[list[int], int]:
    """What a schedule must share with the one that it is swapped for."""
    return [stage.device for stage in schedule.problem.stages], schedule.problem.microbatches


_OWN_TO_A_START = {"checkpoints", "output", "online", "device", "check", "evaluate", "timeout_seconds", "data_parallel"}
"""Options that change no number by themselves, or that are compared by what follows from them."""


def check_same_run(path: Path, document: CheckpointDocument, model: Model) -> None:
    """Raises CheckpointError that names the first field that differs, with its value there and now."""
    for field, saved, now in _fields(document, model):
        if saved != now:
            raise CheckpointError(
                f"{field} is {shown(saved)} in {path} but {shown(now)} now. Maybe the folder is that of another run."
            )
    steps = model.config.steps
    if document.step > steps:
        raise CheckpointError(f"steps is {steps} but {path} comes after {document.step} steps. Maybe raise --steps.")


def numeric_differences(document: CheckpointDocument, model: Model, *, same_schedule: bool) -> Iterator[str]:
    """Sentences on why the numbers to come may not have the bits of an uninterrupted run; none where they have."""
    options = dict(flat(document.options))
    for field, now in flat(model.config.to_data()):
        saved = options.get(field)
        no_matter = field.partition(".")[0] in _OWN_TO_A_START
        if field == "steps":  # the learning rate may go by them
            no_matter = model.config.optimizer.decay == "none"
        if saved != now and not no_matter:
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
    if not same_schedule:
        yield "with another schedule than before: sums may be added in another order"


def _fields(document: CheckpointDocument, model: Model) -> Iterator[tuple[str, Any, Any]]:
    now = model.task.identity()
    for field in sorted(document.task.keys() | now):
        yield f"task.{field}", document.task.get(field), now.get(field)
    yield "seed", document.seed, model.config.seed
    yield "the number of stages", document.stages, len(model.program.placement)
    microbatches = model.program.microbatches * model.launch.replicas
    yield "microbatches of a step, of all replicas,", document.batch_microbatches, microbatches
    yield "optimizer.name", dict(flat(document.options)).get("optimizer.name"), model.config.optimizer.name
