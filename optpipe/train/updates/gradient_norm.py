"""The 2-norm of all gradients of the model, put together from its stages.

Each stage's sum of squares is computed in float64, parameter by parameter in their order, and stages are added up in
the order of their numbers. So the norm has the same bits wherever the stages are, and whenever it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as torch.nn.utils.clip_grad_norm_ does."""


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Of all entries, a float64 scalar on the device of the gradients; 0 without any."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return torch.stack(norms).square().sum()


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """What to multiply gradients by so that their norm is at most `clip_norm`; 1.0 where it is already."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + EPSILON))
