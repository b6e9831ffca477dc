"""Loss of a microbatch: one number, or several terms by name, of which the sum is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import TrainingError

Losses = Tensor | Mapping[str, Tensor]
"""Return value of a loss: one number, or terms by name."""

Loss = Callable[[Any, Any], Losses]
"""Mean loss of one microbatch from the model's output and the target."""

MOST_TERMS = 16


def total_loss(losses: Losses) -> Tensor:
    """The loss that is trained: the sum of the terms, in their order.

    A tensor with one entry counts as a number, as it does for autograd. Raises TrainingError if the loss or a term is
    not one real number as a tensor, or if there is no term or more than `MOST_TERMS`.
    """
    if not isinstance(losses, Mapping):
        return _number(losses, "")
    terms: Mapping[Any, Any] = losses
    for name in terms:
        if not isinstance(name, str) or not name:
            raise TrainingError(f"the loss returns a term with the name {name!r}, but names are texts.")
    if not 0 < len(losses) <= MOST_TERMS:
        raise TrainingError(
            f"the loss returns {len(losses)} terms, but must return 1 to {MOST_TERMS}. Maybe add some of them up."
        )
    total: Tensor = reduce(add, [_number(term, f" as its term {name!r}") for name, term in terms.items()])
    return total


def _number(loss: Any, place: str) -> Tensor:
    """The loss, or a term of it, of shape (). Raises TrainingError if it is not one real number."""
    found = type(loss).__name__
    if isinstance(loss, Tensor):
        found = f"a tensor of shape {list(loss.shape)}"
        if loss.numel() == 1 and not loss.is_floating_point():
            raise TrainingError(
                f"the loss returns {loss.dtype}{place}, which has no gradient, but a loss is one number of floating "
                f"point. Maybe {'its real part' if loss.is_complex() else 'leave out what rounds it to integers'}."
            )
        if loss.numel() == 1:
            return loss.reshape(()) if loss.dim() else loss
    raise TrainingError(
        f"the loss returns {found}{place}, but must return one number, as a tensor, or several by name in a dict. "
        "Maybe take the mean."
    )


class LossTerms:
    """Terms of the losses of a step, by name, as the last stage computes them.

    They are copied to memory of their own that exists before the step begins: no memory of the step holds them.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None
        """Names of the terms; empty for a loss that is one number; None before the first loss."""
        self._values: Tensor | None = None

    def begin_step(self, microbatches: int, device: torch.device) -> None:
        """Begin a step; the terms of the last one are dropped."""
        count = MOST_TERMS if self.names is None else len(self.names)
        self._values = torch.zeros(microbatches, count, dtype=torch.float64, device=device)

    def total(self, microbatch: int, losses: Losses) -> Tensor:
        """Keep the terms of a microbatch and return their sum (`total_loss`).

        Raises TrainingError also if the names are not those of the first microbatch.
        """
        total = total_loss(losses)
        names = tuple(losses) if isinstance(losses, Mapping) else ()
        if self.names is None:
            self.names = names
        if set(names) != set(self.names):
            raise TrainingError(
                f"the loss of microbatch {microbatch} has the terms {_listed(names)}, but that of the first had "
                f"{_listed(self.names)}. Maybe return zero for what does not apply."
            )
        if isinstance(losses, Mapping) and self._values is not None:
            for column, name in enumerate(self.names):
                self._values[microbatch, column].copy_(losses[name].detach().reshape(()))
        return total

    @property
    def values(self) -> Tensor | None:
        """Terms of the step, shape (microbatches, names); None before the first step."""
        return None if self._values is None else self._values[:, : len(self.names or ())]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
