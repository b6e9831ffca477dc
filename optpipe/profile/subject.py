"""What is profiled: a model as a list of stage modules, with one microbatch and its loss, as a user's callable says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from optpipe.profile.callables import Named, check_tensors
from optpipe.runtime.messages import Tree, leaves, spec_of, spec_text
from optpipe.runtime.stage import Loss

RETURNS = "(stages, inputs, targets, loss)"
"""What a user's callable returns: a list of modules, one microbatch and its target, and loss(output, target)."""


DATA_RETURNS = "(inputs, targets), two lists with one entry a microbatch"
"""What a user's data callable returns for the number of a step."""

SAMPLES = 4
"""Microbatches that a profile looks at, where it has so many: enough to show sizes that depend on the data."""


@dataclass(frozen=True)
class Subject:
    """`stages` are applied one after the other to `inputs`, one microbatch; `loss(output, targets)` is its mean.

    `more`: inputs and targets of further microbatches, for stages whose sizes depend on the data.
    """

    name: str
    stages: Sequence[nn.Module]
    inputs: Tree
    targets: Tree
    loss: Loss
    more: Sequence[tuple[Tree, Tree]] = ()

    @property
    def microbatch_size(self) -> int:
        """Sequences in the microbatch: the length of its first tensor, 1 for a scalar."""
        first: Tensor = leaves(self.inputs)[0]
        return first.shape[0] if first.dim() else 1


def load_subject(name: str) -> Subject:
    """Call `package.module:callable`, found from the current folder too, without arguments, and check what it returns.

    Raises InputError that says what is wrong and where.
    """
    build = Named("model", name)
    return _checked(build, build())


def batch_of(
    data: Named, step: int, model: str, like: tuple[Tree, Tree], microbatches: int | None = None
) -> tuple[list[Tree], list[Tree]]:
    """What the data callable returns for a step: inputs and targets, one entry a microbatch, each shaped as in `like`.

    Raises InputError where it does not, or where there are not as many as `microbatches` (None: any number above 0).
    """
    returned = data(step)
    if not isinstance(returned, tuple) or len(returned) != 2:
        data.refuse("wrong_return", f"returns {type(returned).__name__}, but must return {DATA_RETURNS}.")
    inputs, targets = returned
    for field, found, tree in (("inputs", inputs, like[0]), ("targets", targets, like[1])):
        if not isinstance(found, list | tuple):
            data.refuse("wrong_return", f"returns {type(found).__name__} for {field}, but must return {DATA_RETURNS}.")
        expected = len(inputs) or 1 if microbatches is None else microbatches
        if len(found) != expected:
            detail = f"returns {len(found)} {field} for step {step}, but a step has {expected} microbatches."
            data.refuse("wrong_count", detail)
        for i, entry in enumerate(found):
            check_tensors(data.name, f"{field}[{i}]", entry, "data")
            shape, wanted = spec_text(spec_of(entry)), spec_text(spec_of(tree))
            if shape != wanted:
                detail = f"returns {shape} as {field}[{i}] of step {step}, but {model} returns {wanted}."
                data.refuse("wrong_shape", detail)
    return list(inputs), list(targets)


def with_samples(subject: Subject, data: str) -> Subject:
    """The subject with microbatches of step 0 of the data callable `data`, at most `SAMPLES`, in place of its own."""
    inputs, targets = batch_of(Named("data", data), 0, subject.name, (subject.inputs, subject.targets))
    return sampled(subject, list(zip(inputs, targets, strict=True)))


def sampled(subject: Subject, batch: Sequence[tuple[Tree, Tree]]) -> Subject:
    """The subject with the first microbatches of a batch, at most `SAMPLES`; one that is repeated counts once."""
    different: list[tuple[Tree, Tree]] = []
    for sample in batch[:SAMPLES]:
        if all(sample[0] is not other[0] for other in different):
            different.append(sample)
    (inputs, targets), *more = different
    return replace(subject, inputs=inputs, targets=targets, more=more)


def _checked(build: Named, returned: Any) -> Subject:
    if not isinstance(returned, tuple) or len(returned) != 4:
        shape = (
            f"{type(returned).__name__} of {len(returned)}" if hasattr(returned, "__len__") else type(returned).__name__
        )
        build.refuse("wrong_return", f"returns {_article(shape)}, but must return the tuple {RETURNS}.")
    stages, inputs, targets, loss = returned
    if not isinstance(stages, list | tuple | nn.ModuleList | nn.Sequential) or not len(stages):
        build.refuse("no_stages", f"returns {type(stages).__name__} for stages, but must return a list of modules.")
    for s, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            build.refuse("no_module", f"returns stages[{s}] of type {type(stage).__name__}, but each must be a Module.")
    check_tensors(build.name, "inputs", inputs)
    check_tensors(build.name, "targets", targets)
    if not callable(loss):
        what = "but must return a function of output and target."
        build.refuse("no_loss", f"returns {type(loss).__name__} for loss, {what}")
    return Subject(build.name, list(stages), inputs, targets, loss)


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"
