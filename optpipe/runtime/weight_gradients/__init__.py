"""Split backwards: a layer's backward gives its input gradient at once and leaves its weight gradient for W.

Autograd alone cannot split a backward cheaply: asked for the input gradients only, it keeps the whole graph for a
second pass. So the layers that hold most weights (linear, embedding, convolution) are taught to do it, others can be
registered, and the parameters of any other module get their gradient in B.
"""

from optpipe.runtime.weight_gradients.layers import (
    SplitEmbedding,
    SplitLinear,
    compiled_around,
    compiled_part,
    compiler_failure,
    defer_weight_gradients,
    register_deferred,
    undeferred_layers,
)
from optpipe.runtime.weight_gradients.products import ByHand
from optpipe.runtime.weight_gradients.split import (
    SplitBackward,
    Splitting,
    WeightGradients,
    accumulate,
    accumulate_in_float32,
    gradient_dtype,
    is_distributed,
)

__all__ = [
    "ByHand",
    "SplitBackward",
    "SplitEmbedding",
    "SplitLinear",
    "Splitting",
    "WeightGradients",
    "accumulate",
    "accumulate_in_float32",
    "compiled_around",
    "compiled_part",
    "compiler_failure",
    "defer_weight_gradients",
    "gradient_dtype",
    "is_distributed",
    "register_deferred",
    "undeferred_layers",
]
