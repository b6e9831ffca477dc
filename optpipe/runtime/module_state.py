"""State of modules besides their parameters: what a forward may change, and how to put it back.

That is buffers, attributes of Python such as counters, lists and caches, and generators of random numbers. It is looked
for in modules, and from their attributes and hooks on in containers, in what functions close over, and in objects of
classes that are no library's. `Weights` puts parameters back. Not put back are globals and attributes of classes,
iterators, and what is outside of the process, such as files. Of globals the generators alone are found, by the names
that the code of a forward uses.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import ismemberdescriptor
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from optpipe.runtime.rng import AllGeneratorStates, OwnGenerator
from optpipe.runtime.weight_gradients import is_distributed

_LIBRARIES = sys.stdlib_module_names | {"numpy", "optpipe", "torch", "transformers"}
"""Packages whose objects and functions are not looked into; of torch's and these' modules the buffers are."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class ModuleState:
    """State of what is reached from `roots` (modules, losses) at the time when this is made.

    With `tensors` false, tensors and arrays keep what a forward writes into them: nothing is copied then. A forward
    that replaces one is undone all the same.
    """

    def __init__(self, roots: Iterable[Any], *, tensors: bool = True) -> None:
        self.generators: list[OwnGenerator] = []
        self._tensors = tensors
        self._put_back: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # holds what it has seen, so that no number is used again
        self._pending = list(roots)
        while self._pending:
            value = self._pending.pop()
            if type(value) not in _ATOMS and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(value)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back but generators, which are for `AllGeneratorStates`."""
        for put_back in self._put_back:
            put_back()

    def _visit(self, value: Any) -> None:
        match value:
            case nn.Parameter():
                pass
            case Tensor():
                self._copy_tensor(value)
            case np.ndarray():
                if self._tensors:
                    self._put_back.append(partial(np.copyto, value, value.copy(), casting="no"))
            case random.SystemRandom():
                pass
            case torch.Generator() | np.random.Generator() | np.random.RandomState() | random.Random():
                self.generators.append(value)
            case array():
                self._put_back.append(partial(_restore_array, value, value[:]))
            case list() | deque() | bytearray():
                self._put_back.append(partial(_restore_sequence, value, list(value)))
                self._pending += value
            case set():
                self._put_back.append(partial(_restore_set, value, set(value)))
            case dict():
                self._put_back.append(partial(_restore_dict, value, dict(value)))
                self._pending += value.values()
            case tuple():
                self._pending += value
            case partial():
                self._pending += [value.func, value.args, value.keywords]
            case MethodType():
                self._pending += [value.__self__, value.__func__]
            case FunctionType():
                if not _of_library(value.__module__):
                    self._visit_function(value)
            case type():
                self._visit_class(value)
            case ModuleType():
                pass
            case nn.Module():
                self._visit_module(value)
            case _ if _is_own(type(value)) or type(value) is SimpleNamespace:
                if hasattr(value, "__dict__"):
                    self._visit_attributes(value, vars(value))
                self._visit_slots(value)

    def _visit_module(self, module: nn.Module) -> None:
        if any(parameter is not None and is_lazy(parameter) for parameter in module._parameters.values()):
            return  # the first forward makes it another module
        if _is_own(type(module)):
            self._visit_attributes(module, {name: part for name, part in vars(module).items() if name != "_parameters"})
        else:
            hooks = [part for name, part in vars(module).items() if name.endswith("_hooks") and part]
            self._pending += [module._buffers, *module._modules.values(), *hooks]

    def _visit_function(self, function: FunctionType) -> None:
        filled = [(cell, cell.cell_contents) for cell in function.__closure__ or () if _is_filled(cell)]
        self._put_back += [partial(setattr, cell, "cell_contents", value) for cell, value in filled]
        self._pending += [*_names_in(function), *(value for _, value in filled)]

    def _visit_attributes(self, value: Any, attributes: dict[str, Any]) -> None:
        own = vars(value)
        self._put_back.append(partial(_restore_dict, own, dict(own)))
        self._pending += [*attributes.values(), type(value)]

    def _visit_slots(self, value: Any) -> None:
        tables = [vars(base) for base in type(value).__mro__ if "__slots__" in vars(base)]
        slots = [part for table in tables for part in table.values() if ismemberdescriptor(part)]
        before = {slot: slot.__get__(value) for slot in slots if hasattr(value, slot.__name__)}
        if slots:
            self._put_back.append(partial(_restore_slots, value, slots, before))
            self._pending += [type(value), *before.values()]

    def _visit_class(self, kind: type) -> None:
        """The functions of a class, for the generators that their code names."""
        for base in kind.__mro__:
            if not _of_library(base.__module__):
                self._pending += [getattr(part, "__func__", part) for part in vars(base).values() if callable(part)]

    def _copy_tensor(self, tensor: Tensor) -> None:
        local: Any = tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
        if self._tensors and type(local) is Tensor and local.layout is torch.strided and not local.is_meta:
            self._put_back.append(partial(_restore_tensor, local, local.detach().clone()))


@contextmanager
def unchanged(roots: Iterable[Any], device: torch.device) -> Iterator[None]:
    """Context after which modules, losses and all generators of random numbers are as before it.

    `device` is where they draw. Parameters and their gradients are the caller's to keep.
    """
    state = ModuleState(roots)
    generators = AllGeneratorStates(device, state.generators)
    try:
        yield
    finally:
        generators.restore()
        state.restore()


class Weights:
    """Weights of a module, which a forward may change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: list[Tensor] | None = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context that restores them. The first time tells which change: of these alone there are copies later."""
        weights = [p for p in self._module.parameters() if not is_lazy(p)] if self._changing is None else self._changing
        copies = [(weight, weight._version, weight.detach().clone()) for weight in weights]
        try:
            yield
        finally:
            changed = [(weight, value) for weight, version, value in copies if weight._version != version]
            self._changing = [weight for weight, _ in changed]
            with torch.no_grad():
                for weight, value in changed:
                    weight.copy_(value)


def own_generators(roots: Iterable[Any]) -> list[OwnGenerator]:
    """Generators that modules and losses hold, or that the code of their classes names."""
    return ModuleState(roots, tensors=False).generators


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _is_own(kind: type) -> bool:
    """True for a class of which any base is no library's; wrappers derive classes from the user's."""
    return not all(_of_library(base.__module__) for base in kind.__mro__)


def _names_in(function: FunctionType) -> list[Any]:
    """Generators, functions and classes that a function names: globals and defaults."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    found = [function.__globals__.get(name) for name in names]
    found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found.append(getattr(function, "__wrapped__", None))
    return [value for value in found if isinstance(value, (*_GENERATORS, FunctionType, type))]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty one raises
    except ValueError:
        return False
    return True


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))


def _restore_sequence(own: Any, before: list[Any]) -> None:
    if len(own) != len(before) or not _same(own, before):
        own.clear()
        own.extend(before)


def _restore_array(own: array[Any], before: array[Any]) -> None:
    own[:] = before


def _restore_set(own: set[Any], before: set[Any]) -> None:
    own.clear()
    own.update(before)


def _restore_dict(own: dict[Any, Any], before: dict[Any, Any]) -> None:
    if list(own) != list(before) or not _same(own.values(), before.values()):
        own.clear()
        own.update(before)


def _restore_slots(own: Any, slots: Iterable[Any], before: dict[Any, Any]) -> None:
    for slot in slots:
        if slot in before:
            slot.__set__(own, before[slot])
        elif hasattr(own, slot.__name__):
            slot.__delete__(own)


def _restore_tensor(own: Tensor, before: Tensor) -> None:
    if own.shape != before.shape:
        own.resize_(before.shape)
    if not torch.equal(own, before):  # a NaN is equal to nothing and copied
        own.copy_(before)
