"""Whether a checkpoint is of the run that is to go on from it, and in what the two may differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optpipe.document import shown
from optpipe.errors import CheckpointError
from optpipe.train.checkpoints.document import CheckpointDocument, versions_now
from optpipe.train.config import flat
from optpipe.train.model import Model

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


def what_may_differ(document: CheckpointDocument, model: Model, *, same_schedule: bool) -> Iterator[str]:
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
