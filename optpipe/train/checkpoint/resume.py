"""Going on from a checkpoint: the newest that is whole in the eyes of every process, and only if it is of this run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from torch import Tensor

from optpipe.errors import CheckpointError
from optpipe.schedule import Schedule
from optpipe.train.checkpoints.disk import read_tensors
from optpipe.train.checkpoints.document import GENERATORS, SCHEDULE, CheckpointDocument, buffers_file, stage_file
from optpipe.train.checkpoints.folder import check_files, final_path, read_manifest, steps_in
from optpipe.train.checkpoints.generators import restore_generators
from optpipe.train.checkpoints.likeness import check_same_run, what_may_differ
from optpipe.train.checkpoints.state import load_stage, parameter_of, renamed, stage_buffers
from optpipe.train.checkpoints.together import together
from optpipe.train.checkpoints.writing import schedule_sha256
from optpipe.train.config import TrainingConfig
from optpipe.train.model import Model

LOG = logging.getLogger("optpipe.train.checkpoints")


def resume(folder: Path, config: TrainingConfig, model: Model) -> tuple[int, list[int]]:
    """The step to go on with, and the steps of newer checkpoints that are damaged; in all processes together.

    0 where there is no checkpoint. Raises CheckpointError in all processes: where there is one but none is whole,
    where it is of another run, and where `config.checkpoints.resume` does not allow what is there.
    """
    mode, begin = config.checkpoints.resume, perf_counter()
    steps = together(model.launch, lambda: steps_in(folder))[0]
    _check_mode(folder, steps, mode)
    damaged: list[int] = []
    for step in steps:
        path = final_path(folder, step)
        fault = _fault(path, model)
        if fault is None:
            borrowed = any(together(model.launch, lambda path=path: _load(path, model)))  # type: ignore[misc]
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
        together(model.launch, lambda: _check_whole(path, model))
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
        for text in what_may_differ(document, model, same_schedule=saved == model.schedule):
            LOG.warning("resumed %s", text)


def _place(schedule: Schedule) -> tuple[list[int], int]:
    """What a schedule must share with the one that it is swapped for."""
    return [stage.device for stage in schedule.problem.stages], schedule.problem.microbatches
