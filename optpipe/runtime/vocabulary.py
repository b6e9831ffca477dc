"""A vocabulary layer and its cross entropy with the rows on several devices (Vocabulary Parallelism, arXiv 2411.05288).

Shapes: n tokens of a microbatch, h width, v rows of a device, p devices.

Logits are activations times rows, and a softmax needs all of them. Each device exponentiates its logits less their own
maximum. Devices then exchange three figures a token: that maximum, their sum, and the logit of the label. From these
follows one factor a token by which a device's part becomes its part of the softmax. A factor can be applied after a
product as well. So in Algorithm 2 the first pass already multiplies by the rows, and the gradient of the activation
is there after one exchange; the gradient of the rows can wait. In Algorithm 1 the second pass makes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime.messages import Tree

IGNORED = -100
"""Label of a token that counts in no loss, as in torch."""

Labels = Callable[[Tree], tuple[Tensor, Tensor]]
"""Labels (n) of a target, and the number by which the sum of their losses is divided."""

FIGURES = 3
"""Figures of a token that devices exchange: maximum, sum, logit of the label."""

_LABEL_BYTES = 64
"""Memory for indices and masks that are made of the label of a token."""


def rows_of(vocabulary: int, device: int, devices: int) -> range:
    """Rows of a device: the first ones have one more where they do not divide."""
    least, more = divmod(vocabulary, devices)
    begin = device * least + min(device, more)
    return range(begin, begin + least + (device < more))


def named_layers(stage: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Modules of a stage that name a vocabulary layer of theirs by `vocabulary_layer`: path, module and that name."""
    named = ((path, module, getattr(module, "vocabulary_layer", None)) for path, module in stage.named_modules())
    return [(path, module, str(name)) for path, module, name in named if name]


def holds_other_layers(stage: nn.Module) -> bool:
    """True if a stage has matrices of layers other than the vocabulary layer that it names. Norms have vectors only."""
    heads = [getattr(module, name) for _, module, name in named_layers(stage)]
    own = {id(parameter) for head in heads for parameter in head.parameters()}
    return bool(heads) and any(p.dim() > 1 and id(p) not in own for p in stage.parameters())


@dataclass
class _Part:
    """State of a microbatch on a device between its passes.

    `exponentials` (n, v) of logits less their maximum, `figures` (3, n), `product` (n, h) of exponentials and rows in
    Algorithm 2. Behind the exchange, `factor` (n) makes a softmax of the exponentials.
    """

    activation: Tensor
    labels: Tensor
    divisor: Tensor
    exponentials: Tensor
    figures: Tensor
    product: Tensor | None
    factor: Tensor | None = None


def pass_bytes(shape: tuple[int, int], dtype: torch.dtype, tokens: int, devices: int) -> tuple[int, int]:
    """Memory of a microbatch on a device with rows (v, h): from S to T, and what each takes besides while it runs.

    Not included is the addend of the activation's gradient, which one of them makes and an exchange takes.
    """
    rows, width = shape
    kept, workspace = rows + width + FIGURES * (1 + devices) + 1, FIGURES * devices
    return tokens * kept * dtype.itemsize, tokens * (workspace * dtype.itemsize + _LABEL_BYTES)


class VocabularyShard:
    """Some rows of a vocabulary layer, from row `first` of `vocabulary` on, with the passes of its cross entropy.

    `weight` (v, h). `labels` reads a target. Gradients are those of `gradient_scale` times the loss; that of `weight`
    is added to `.grad`. Of the passes and exchanges of a microbatch, `combine` comes behind `make_logits` of all
    devices. Then come `take_gradient` and, in any order, `add_weight_gradient` in Algorithm 2 (`barriers` 1); in
    Algorithm 1 (`barriers` 2) `add_weight_gradient` comes first. Where there is no backward, `drop` ends a microbatch.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        first: int,
        vocabulary: int,
        labels: Labels,
        *,
        gradient_scale: float = 1.0,
        barriers: Literal[1, 2] = 1,
    ) -> None:
        self.weight, self.barriers = weight, barriers
        self._first, self._vocabulary, self._labels, self._scale = first, vocabulary, labels, gradient_scale
        self._parts: dict[int, _Part] = {}
        self._gradients: dict[int, Tensor] = {}

    def make_logits(self, microbatch: int, activation: Tensor, target: Tree, *, evaluates: bool = False) -> None:
        """S: exponentials of the logits, and in Algorithm 2, unless it `evaluates`, their product with the rows.

        Raises TrainingError for a label that is no row of the layer.
        """
        labels, divisor = self._labels(target)
        self._check(labels)
        weight = self.weight.detach()
        logits = activation.flatten(0, -2) @ weight.T
        figures = logits.new_zeros(FIGURES, len(logits))
        tokens, rows = self._own(labels)
        figures[2, tokens] = logits[tokens, rows]
        torch.amax(logits, 1, out=figures[0])
        exponentials = logits.sub_(figures[0][:, None]).exp_()
        torch.sum(exponentials, 1, out=figures[1])
        product = exponentials @ weight if self.barriers == 1 and not evaluates else None
        self._parts[microbatch] = _Part(activation, labels, divisor, exponentials, figures, product)

    def figures(self, microbatch: int) -> Tensor:
        """Figures (3, n) of the device's logits, to be gathered."""
        return self._parts[microbatch].figures

    def combine(self, microbatch: int, gathered: Sequence[Tensor]) -> None:
        """Take in the figures of all devices."""
        part = self._parts[microbatch]
        maxima, sums, of_labels = torch.stack([*gathered], 1)
        maximum = maxima.amax(0)
        total = maxima.sub_(maximum).exp_().mul_(sums).sum(0)
        part.factor = part.figures[0].sub(maximum).exp_().div_(total)
        part.figures = torch.stack([maximum, total, of_labels.sum(0)])

    def loss(self, microbatch: int) -> Tensor:
        """Loss of a microbatch, the same on all devices, behind `combine`."""
        part = self._parts[microbatch]
        maximum, total, of_label = part.figures
        entropy: Tensor = (maximum + total.log() - of_label)[part.labels != IGNORED]
        return entropy.sum() / part.divisor.to(entropy.dtype)

    def take_gradient(self, microbatch: int) -> Tensor:
        """This device's addend of the gradient of the activation."""
        if self.barriers == 2:
            return self._gradients.pop(microbatch)
        part = self._parts[microbatch]
        assert part.product is not None, "S has made it"
        assert part.factor is not None, "combined after S"
        gradient, part.product = part.product.mul_(part.factor[:, None]), None
        tokens, rows = self._own(part.labels)
        gradient.index_add_(0, tokens, self.weight.detach()[rows], alpha=-1)
        return gradient.mul_(self._weights(part)[:, None]).view_as(part.activation)

    def add_weight_gradient(self, microbatch: int) -> None:
        """T: add the gradient of the rows, and in Algorithm 1 make that of the activation."""
        part = self._parts.pop(microbatch)
        assert part.factor is not None, "combined after S"
        weights = self._weights(part)
        gradient = part.exponentials.mul_((part.factor * weights)[:, None])
        tokens, rows = self._own(part.labels)
        gradient[tokens, rows] -= weights[tokens]
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad.addmm_(gradient.T, part.activation.flatten(0, -2))
        if self.barriers == 2:
            self._gradients[microbatch] = (gradient @ self.weight.detach()).view_as(part.activation)

    def drop(self, microbatch: int) -> None:
        """Drop the state of a microbatch that has no backward."""
        del self._parts[microbatch]

    def clear(self) -> None:
        """Drop the state of all microbatches, after an error."""
        self._parts.clear()
        self._gradients.clear()

    def _check(self, labels: Tensor) -> None:
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= self._vocabulary))]
        if len(wrong):
            raise TrainingError(
                f"a label is {int(wrong[0])} but must be from 0 to {self._vocabulary - 1}, or {IGNORED} to count in no "
                "loss. Maybe the vocabulary of the data is larger than that of the model."
            )

    def _own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens whose label is a row of this device, and those rows."""
        rows = labels - self._first
        tokens = ((rows >= 0) & (rows < len(self.weight)) & (labels >= 0)).nonzero().squeeze(1)
        return tokens, rows[tokens]

    def _weights(self, part: _Part) -> Tensor:
        """Gradient of each token's loss (n)."""
        counted = (part.labels != IGNORED).to(part.figures.dtype)
        return counted.mul_(self._scale / part.divisor.to(counted.dtype))
