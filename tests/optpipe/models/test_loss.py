"""Losses by tokens."""

from __future__ import annotations

import torch

from optpipe.models.loss import LabelLoss, PerToken


def test_the_mean_number_of_tokens_is_of_double_precision() -> None:
    """Ten tokens in three microbatches: a rounded third would change gradients in float64 by 1e-8 of them."""
    targets = [torch.zeros(1, count, dtype=torch.int64) for count in (2, 3, 5)]
    for target, (same, tokens) in zip(targets, PerToken(LabelLoss(shift=False)).with_tokens(targets), strict=True):
        assert same is target
        assert float(tokens) == 10 / 3
