"""Losses by tokens: sums over a microbatch, divided by the tokens of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from optpipe.runtime.loss import Losses
from optpipe.runtime.messages import Tree

IGNORED = -100
"""Label of a position that counts in no loss, as in torch and transformers."""


class CountedLoss(Protocol):
    """A loss that knows how many tokens it is the mean of.

    `count` is called with the targets of every microbatch before the first forward of a step. The loss is then called
    with `tokens`, their mean over all microbatches of all replicas, and divides its sum by that: so the mean over the
    microbatches, which is what is trained, is the mean over the tokens of the batch.
    """

    def count(self, target: Any) -> int:
        """Tokens of a microbatch that count."""
        ...

    def __call__(self, output: Any, target: Any, tokens: Tensor) -> Losses:
        """The loss of a microbatch, or its terms by name; `tokens` is a float tensor without dimensions."""
        ...


def is_counted(loss: Any) -> TypeGuard[CountedLoss]:
    """True for a loss with a `count`."""
    return callable(getattr(loss, "count", None))


class PerToken:
    """A `CountedLoss` as a loss of output and target; the target comes with the number of tokens (`with_tokens`)."""

    def __init__(self, loss: CountedLoss) -> None:
        self.loss = loss

    def __call__(self, output: Tree, target: tuple[Tree, Tensor]) -> Losses:
        """The loss of a microbatch."""
        return self.loss(output, *target)

    def with_tokens(self, targets: Sequence[Tree], whole: Callable[[int], int] = int) -> list[Tree]:
        """The targets of a whole batch, each with the mean number of tokens of a microbatch, at least one in all.

        Targets that are None are those of other processes: `whole` makes the tokens of the batch of the others'.
        """
        own = [target for target in targets if target is not None]
        total = max(1, whole(sum(map(self.loss.count, own)))) if own else 1
        mean = torch.tensor(total / len(targets), dtype=torch.float64)
        return [target if target is None else (target, mean.clone()) for target in targets]


class LabelLoss:
    """Cross entropy of logits and labels, of those labels that are not `IGNORED`.

    With `shift` the label of a position is that of the next one, as in transformers' causal language models: labels are
    the inputs. The output is the logits, of shape (..., classes), or a dict with these and an `auxiliary` loss, a mean
    over the microbatch: then the loss has two terms, `cross_entropy` and `auxiliary`, this one `coefficient` times.
    """

    def __init__(self, *, shift: bool, coefficient: float = 0.0) -> None:
        self.shift, self.coefficient = shift, coefficient

    def count(self, target: Tensor) -> int:
        """Labels that are not ignored."""
        return int((self._labels(target) != IGNORED).sum())

    def __call__(self, output: Tree, target: Tensor, tokens: Tensor) -> Losses:
        """Sum over the labels, divided by `tokens`, and the auxiliary loss."""
        logits = output["logits"] if isinstance(output, dict) else output
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        entropy = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            self._labels(target).reshape(-1),
            ignore_index=IGNORED,
            reduction="sum",
        )
        loss: Tensor = entropy / tokens.to(logits.dtype)
        if not isinstance(output, dict):
            return loss
        return {"cross_entropy": loss, "auxiliary": self.coefficient * output["auxiliary"]}

    def shifted(self, target: Tensor) -> Tensor:
        """The label of each position at the position itself, as a loss without `shift` takes it."""
        return self._labels(target)

    def _labels(self, target: Tensor) -> Tensor:
        return nn.functional.pad(target[..., 1:], (0, 1), value=IGNORED) if self.shift else target
