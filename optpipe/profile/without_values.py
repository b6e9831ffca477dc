"""Runs of a model on tensors without values: shapes and dtypes as in a run on a CPU, and no memory.

Floating-point numbers are torch's fake tensors. Integers and booleans that do not depend on them have their values: so
positions, labels and masks decide what they decide in a run, and stages keep the same bytes. What asks for the value of
any other tensor cannot run so, such as an index by the signs of activations.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import optpipe
from optpipe.profile.subject import Subject, ValuesNeededError
from optpipe.runtime.messages import map_leaves
from optpipe.runtime.torch_private import (
    GROUPED_MM,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    fakes_convertible,
    tree_leaves,
    tree_map_only,
    without_modes,
)

_LIBRARIES = tuple(str(Path(str(package.__file__)).parent) for package in (torch, optpipe))

_SET = torch.ops.aten.set_.source_Storage_storage_offset
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_MEANS = {torch.ops.aten.mse_loss, torch.ops.aten.smooth_l1_loss, torch.ops.aten.binary_cross_entropy}
_MEANS |= {torch.ops.aten.soft_margin_loss}
"""Losses of which a CPU returns the mean in a storage of all."""

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""Logs what its kernels raise, which is ours to tell."""


class WithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which floating-point tensors have no values. Raises ValuesNeededError where one is needed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._contexts = ExitStack()
        self._contexts.enter_context(fakes_convertible())
        self._contexts.enter_context(self._fake)
        self._contexts.callback(_LOG.setLevel, _LOG.level)
        _LOG.setLevel(logging.CRITICAL)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._contexts.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        given = [value for value in tree_leaves((args, named)) if isinstance(value, Tensor)]
        if all(_has_values(tensor) for tensor in given):
            return self._with_values(func, args, named, given)
        for tensor in written_by(func, args, named):
            if not isinstance(tensor, FakeTensor):
                if tensor.dtype is torch.uint8:  # bytes of an activation that was offloaded
                    return tensor
                raise _needs_values(func)
        return self._run(func, args, named)

    def of_subject(self, subject: Subject) -> Subject:
        """The subject with parameters, buffers and microbatch without values. Its modules are changed."""
        memo: dict[int, tuple[Tensor, Tensor]] = {}
        for stage in subject.stages:
            for module in stage.modules():
                tables: list[dict[str, Any]] = [module._parameters, module._buffers]
                for table in tables:
                    for name, tensor in table.items():
                        if tensor is not None:
                            table[name] = memo.setdefault(id(tensor), (tensor, self._of_tensor(tensor)))[1]
        samples = [(subject.inputs, subject.targets), *subject.more]
        (inputs, targets), *more = map_leaves(self._of_tensor, samples)
        return replace(subject, inputs=inputs, targets=targets, more=more)

    def _with_values(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any], given: Sequence[Tensor]) -> Any:
        """An op of integers alone. Floating-point results lose their values; new bytes are for activations."""
        if not given:
            made = self._run(func, args, named)
            if any(_is_number(tensor) or tensor.dtype is torch.uint8 for tensor in _tensors(made)):
                return made
        with without_modes():
            result = func(*args, **named)
        return tree_map_only(Tensor, lambda tensor: self._of_tensor(tensor) if _is_number(tensor) else tensor, result)

    def _run(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if func is _RECURRENT:
            raise ValuesNeededError(f"keeps what only a run tells: a workspace of {func}", _place())
        self._fake.cache_enabled = func is not _SET  # a cache of results would keep the storage alive
        try:
            if func.overloadpacket is GROUPED_MM and args[0].dtype != torch.bfloat16:  # which alone fake tensors know
                made = self._run(func, tuple(_lower(value) for value in args), named)
                return made.to(args[0].dtype)
            result = func(*args, **named)
            if func.overloadpacket in _MEANS and not result.dim():
                return args[0].new_empty(args[0].numel()).as_strided((), ())
            return result
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _needs_values(error.func) from error

    def _of_tensor(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor) or _has_values(tensor):
            return tensor
        with self._fake:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def written_by(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an op into which it writes."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[number] if number < len(args) else named.get(argument.name))


def _lower(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and _is_number(value) else value


def _needs_values(op: object) -> ValuesNeededError:
    return ValuesNeededError(f"depends on the data: {op} needs values", _place())


def _place() -> str:
    """The line of the user's or a model's code that is running."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith((*_LIBRARIES, "<"))]
    inner = [f for f in frames if "site-packages" in f.filename or Path.cwd() in Path(f.filename).parents]
    return f" at {Path(inner[-1].filename).name}:{inner[-1].lineno}" if inner else ""


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has_values(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta and not _is_number(tensor)
