"""Private names of torch, all that the runtime uses: what no public name offers, in one place, each with its reason.

FSDP2's are in `optpipe.pipelining.fsdp`. Elsewhere only attributes of tensors, storages and modules are read that torch
does not document but has had for years: `_version`, `_cdata`, `_parameters`, `_buffers`, `_modules`, dicts of hooks,
`_compiled_call_impl`. What torch.compile needs is here too, whose modules may never have been loaded.

Tried with torch 2.9.1, 2.10.0, 2.11.0, 2.12.1 (tests/optpipe/pipelining/test_torch_versions.py) and 2.13.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

# A tensor whose storage holds its negative, such as the imaginary part of a conjugate.
from torch import _neg_view as negative_view
from torch import nn

# Tensors of shapes and dtypes alone, which run without memory.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# The end of torch.autograd.backward, without its checks of shapes, which the engine makes again: they take half of the
# time of an empty backward.
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.autograd.graph import saved_tensors_hooks

# The one way to see every allocation of an operator.
from torch.utils._python_dispatch import TorchDispatchMode

# Integers keep their values among fake tensors: their ops run as if no mode was entered.
from torch.utils._python_dispatch import _disable_current_modes as without_modes

# Outputs of transformers are trees that it registers there.
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import _VersionWrapper as KeptByCheckpoint

# Operations of each product, which FlopCounterMode adds up over modules instead of passes.
from torch.utils.flop_counter import flop_registry

__all__ = [
    "ANY_LEAF",
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "GROUPED_MM",
    "GROUPED_PRODUCTS",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "KeptByCheckpoint",
    "TorchDispatchMode",
    "computes_given_gradients_alone",
    "fakes_convertible",
    "flop_registry",
    "is_compiler_error",
    "is_transforming",
    "kept_by_checkpoints",
    "negative_view",
    "run_backward",
    "saving_through",
    "tree_leaves",
    "tree_map_only",
    "uses_of_memory",
    "within_checkpoint",
    "without_modes",
]

GROUPED_PRODUCTS: list[Any] = [
    multiply
    for multiply in (getattr(nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if multiply is not None
]
"""Products of groups of rows with matrices of their own; older versions have the private name alone."""


GROUPED_MM = torch.ops.aten._grouped_mm
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Ops as a dispatch mode sees them: public functions end in these on a CPU."""


@contextmanager
def kept_by_checkpoints(wrap: Callable[[Any], KeptByCheckpoint]) -> Iterator[None]:
    """Context in which selective activation checkpoints wrap what they keep by `wrap`.

    It is in a cache of theirs, which hooks of autograd do not see; torch.utils.checkpoint wraps each value by the class
    of this name.
    """
    torch.utils.checkpoint._VersionWrapper = wrap  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.utils.checkpoint._VersionWrapper = KeptByCheckpoint  # type: ignore[misc]


@contextmanager
def fakes_convertible() -> Iterator[None]:
    """Context in which modules of fake tensors can be moved and cast.

    They are swapped with their new values, which torch refuses where the fake mode itself has weak references to them.
    Of fakes on one device the data can be set instead.
    """
    swap, torch.utils.swap_tensors = torch.utils.swap_tensors, _set_data
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.data = new


def saving_through(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> AbstractContextManager[Any]:
    """Context in which autograd saves tensors through these functions.

    Autograd calls `pack` from within compiled functions, where torch.compile would go on to take any function that is
    called for the first time.
    """
    if "torch._dynamo" in sys.modules:
        pack = torch.compiler.disable(pack)  # type: ignore[no-untyped-call]
    return saved_tensors_hooks(pack, unpack)


ANY_LEAF = torch.zeros((), requires_grad=True)
"""A leaf that an autograd function takes as an input, to ask `computes_given_gradients_alone` in its backward."""

_ITS_NODE = torch.autograd.graph.get_gradient_edge(ANY_LEAF).node


def computes_given_gradients_alone() -> bool:
    """True in a backward by torch.autograd.grad, or one with `inputs`, which adds to no other `.grad`.

    Asked by the backward of a function that takes `ANY_LEAF`: the engine comes to all leaves where it has no inputs.
    """
    executed: bool = torch._C._will_engine_execute_node(_ITS_NODE)
    return not executed


def is_transforming() -> bool:
    """True within torch.func.vmap, grad, jvp and the like, or within torch.autograd.forward_ad.dual_level.

    An autograd function with a backward alone is an error there.
    """
    forward_mode: int = torch.autograd.forward_ad._current_level
    return forward_mode >= 0 or torch._C._are_functorch_transforms_active()


def is_compiler_error(error: Exception) -> bool:
    """True for an error of torch.compile. Where nothing was compiled its module need not be loaded."""
    dynamo = sys.modules.get("torch._dynamo.exc")
    return dynamo is not None and isinstance(error, dynamo.TorchDynamoException)


def uses_of_memory(tensor: torch.Tensor) -> int:
    """How many tensors, and other objects, refer to the memory of a tensor."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


def within_checkpoint() -> bool:
    """True in the first run of what torch.utils.checkpoint is to run again, other than by use_reentrant."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__
