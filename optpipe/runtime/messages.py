"""Messages between stages: trees of tensors, of one shape or one for each microbatch (`optpipe.runtime.shapes`).

A tree is a tensor, or a tuple, list or dict of trees. A stage receives the tree that the previous stage returned. The
gradient of a tree has the same form, with None for every tensor without a gradient: always for integers and booleans,
and for others on which nothing depends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import TrainingError

Tree = Any
"""A message: `Tensor | tuple[Tree, ...] | list[Tree] | dict[str, Tree]`, a recursive type that mypy cannot check."""

Gradient = Any
"""The gradient of a message: a tree in which a leaf may be None."""

Spec = Any
"""Shapes of a message: a tree with a `MessageSpec` for each tensor."""


@dataclass(frozen=True)
class MessageSpec:
    """Shape and dtype of a tensor that crosses a boundary; its gradient has the same."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> MessageSpec:
        """Spec of a tensor. Raises TrainingError for any other value."""
        if not isinstance(tensor, Tensor):
            raise no_tensor(tensor)
        return MessageSpec(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """A tensor with undefined contents."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def size_bytes(self) -> int:
        """Size of the message."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def has_gradient(self) -> bool:
        """True for floating-point and complex tensors."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def leaves(tree: Any) -> list[Any]:
    """Leaves of a tree from left to right, those of a dict in sorted order of its keys."""
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, dict):
        return [leaf for key in _keys(tree) for leaf in leaves(tree[key])]
    return [tree]


def rebuild(tree: Any, new_leaves: Iterable[Any]) -> Any:
    """A tree of the same form with other leaves, given in the order of `leaves`."""
    return _rebuild(tree, iter(new_leaves))


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same form with every leaf changed."""
    return rebuild(tree, [change(leaf) for leaf in leaves(tree)])


def tensors(tree: Tree | Gradient) -> list[Tensor]:
    """The leaves that are not None."""
    return [leaf for leaf in leaves(tree) if leaf is not None]


def message_spec(tree: Tree) -> Spec:
    """Spec of a message. Raises TrainingError if it holds anything but tensors."""
    return map_leaves(MessageSpec.of, tree)


def output_spec(tree: Tree) -> Spec:
    """Spec of what a stage returns to the next one. Raises TrainingError also if it holds a sparse or nested tensor."""
    for part in leaves(tree):
        if isinstance(part, Tensor) and (part.layout is not torch.strided or part.is_nested):
            kind = "nested tensor" if part.is_nested else f"tensor of layout {part.layout}"
            raise TrainingError(
                f"a stage returned a {kind}, but only dense ones go from stage to stage. Maybe make it dense "
                "(to_dense, to_padded_tensor), and the other again in the next stage."
            )
    return message_spec(tree)


def _keys(tree: dict[Any, Any]) -> list[Any]:
    """Keys of a dict in their order. Raises TrainingError where they have none."""
    try:
        return sorted(tree)
    except TypeError:
        raise bad_keys(tree) from None


def bad_keys(tree: dict[Any, Any]) -> TrainingError:
    """Error for a dict whose keys have no order, or cannot be sent to other processes."""
    names = " and ".join(sorted({type(key).__name__ for key in tree}))
    return TrainingError(
        f"a dict among the inputs or outputs of a stage has keys of {names}, but they must be all str or all int. "
        "Maybe use texts."
    )


def no_tensor(part: Any) -> TrainingError:
    """Error for a stage output that is not a tensor."""
    return TrainingError(
        f"a stage returned {type(part).__name__} in its output, but only tensors and tuples, lists and dicts of "
        "them go from stage to stage. Maybe leave it out of what the module returns."
    )


def size_bytes(spec: Spec) -> int:
    """Bytes of a message."""
    return sum(leaf.size_bytes for leaf in leaves(spec))


def spec_text(spec: Spec) -> str:
    """One-line text of a spec, such as ``(float32[2, 8], {mask: bool[2]})``."""
    if isinstance(spec, tuple | list):
        return f"({', '.join(map(spec_text, spec))})"
    if isinstance(spec, dict):
        return "{" + ", ".join(f"{key}: {spec_text(spec[key])}" for key in sorted(spec)) + "}"
    return str(spec)


def _rebuild(tree: Any, new: Iterator[Any]) -> Any:
    if isinstance(tree, tuple):
        parts = [_rebuild(part, new) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [_rebuild(part, new) for part in tree]
    if isinstance(tree, dict):
        changed = {key: _rebuild(tree[key], new) for key in _keys(tree)}
        return {key: changed[key] for key in tree}
    return next(new)
