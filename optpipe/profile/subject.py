"""What is profiled: a model as a list of stage modules, with one microbatch and its loss, as a user's callable says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from optpipe.profile.callables import Named, check_tensors
from optpipe.runtime.messages import Tree, leaves
from optpipe.runtime.stage import Loss

RETURNS = "(stages, inputs, targets, loss)"
"""What a user's callable returns: a list of modules, one microbatch and its target, and loss(output, target)."""


@dataclass(frozen=True)
class Subject:
    """`stages` are applied one after the other to `inputs`, one microbatch; `loss(output, targets)` is its mean."""

    name: str
    stages: Sequence[nn.Module]
    inputs: Tree
    targets: Tree
    loss: Loss

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
