"""Linear layers: half of the backward is the weight's matrix product.

Measured for width 256 and 512 rows: B 0.86 ms and W 0.79 ms, where autograd takes 1.5 ms for both at once. From B to
W two activations are held, one of which F held already.
"""

from __future__ import annotations

from torch import Tensor, nn

from optpipe.runtime.weight_gradients.split import Saved, SplitBackward, accumulate, gradient_of, is_distributed


class SplitLinear(SplitBackward[nn.Linear]):
    """``y = x @ weight.T + bias`` for x of shape (..., inputs) and weight of shape (outputs, inputs)."""

    distributed = True
    lower_precision = True

    def handles(self, layer: nn.Linear) -> bool:
        """Weights of its own."""
        return own_weight(layer)

    def forward(self, layer: nn.Linear, x: Tensor) -> tuple[Tensor, Saved]:
        """``x @ weight.T + bias``; keeps the input."""
        return nn.functional.linear(x, layer.weight, layer.bias), (x,)

    def input_gradient(self, layer: nn.Linear, _saved: Saved, gradient: Tensor) -> Tensor:
        """``gradient @ weight``."""
        return gradient @ layer.weight

    def add_weight_gradients(self, layer: nn.Linear, saved: Saved, gradient: Tensor) -> None:
        """Add ``gradient.T @ x`` to the weight's, and the sum over rows to the bias's."""
        weight, bias, (x,) = layer.weight, layer.bias, saved
        rows, columns = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        if weight.requires_grad and weight.dtype == x.dtype and not is_distributed(weight):
            gradient_of(weight).addmm_(rows.T, columns)  # needs no room for the product
        elif weight.requires_grad:
            accumulate(weight, rows.T @ columns)
        if bias is not None and bias.requires_grad:
            accumulate(bias, rows.sum(0))


def own_weight(layer: nn.Module) -> bool:
    """Whether the weight is a parameter, and not computed from others (weight norm, pruning) or yet to be sized."""
    weight = layer._parameters.get("weight")
    return weight is not None and not nn.parameter.is_lazy(weight)
