"""Cuts of a model into stages: by numbers of layers, or by the names of modules."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from optpipe.document import parse_json, read_bounded
from optpipe.errors import InputError, Issue, shown

MAX_CUT_BYTES = 2**24


@dataclass(frozen=True)
class Unit:
    """A part of a model that is not cut: the names of its modules, in the order in which they run."""

    modules: tuple[str, ...]

    def __str__(self) -> str:
        return " and ".join(self.modules)


def evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Spread layers over stages; the first ones get one more where they do not divide."""
    return tuple(layers // stages + (s < layers % stages) for s in range(stages))


def parse_cut(cut: str, units: Sequence[Unit], stages: int | None, field: str = "cut") -> tuple[int, ...]:
    """Read the number of units of each stage from ``5,6,6,5``, or from a JSON file with the module names of each stage.

    The file holds a list of lists, as torchtitan's `module_fqns_per_model_part`. `stages` is how many there must be, if
    that is known. Raises InputError that names `field` and the first name or number that is wrong.
    """
    sizes = _sizes_of_file(Path(cut), units, field) if cut.endswith(".json") else _sizes_of_text(cut, field)
    if stages is not None and len(sizes) != stages:
        _refuse(field, "wrong_count", f"is {cut}, for {len(sizes)} stage(s), but there are {stages}.")
    if sum(sizes) != len(units):
        what = f"{sum(sizes)} layers, but the model is cut into {len(units)}, from {units[0]} to {units[-1]}"
        _refuse(field, "wrong_sum", f"is {cut}, which makes {what}.")
    return sizes


def ranges(sizes: Sequence[int]) -> list[range]:
    """The units of each stage."""
    return [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]


def joined(stages: Sequence[nn.Module], sizes: Sequence[int]) -> list[nn.Module]:
    """Blocks that run one after the other as fewer stages, each of so many of them."""
    return [nn.Sequential(*(stages[n] for n in part)) for part in ranges(sizes)]


_OF_EVERY_MODULE = {*vars(nn.Module())}


def structure(module: nn.Module) -> str:
    """Text that two modules share if they differ in the values of their tensors alone.

    Objects that are no numbers, texts or modules are the same only where they are one object. A module's number among
    the layers (`layer_idx`), which caches ask for, does not count.
    """
    parts: list[object] = []
    for name, part in module.named_modules():
        tables: list[Mapping[str, Tensor | None]] = [part._parameters, part._buffers]
        tensors = [(n, t is None or (t.shape, t.dtype, t.requires_grad)) for table in tables for n, t in table.items()]
        own = {key: value for key, value in vars(part).items() if key not in _OF_EVERY_MODULE and key != "layer_idx"}
        values = [(key, _identity(value)) for key, value in sorted(own.items())]
        hooks = [[*map(id, vars(part)[table].values())] for table in ("_forward_hooks", "_forward_pre_hooks")]
        parts.append((name, type(part), tensors, values, hooks))
    return repr(parts)


def _identity(value: Any) -> object:
    """Key that tells a value from others: an object's number, unless it is made of numbers and texts."""
    match value:
        case bool() | int() | float() | str() | None | torch.dtype() | torch.Size():
            return value
        case list() | tuple():
            return [_identity(part) for part in value]
        case dict():
            return [(key, _identity(part)) for key, part in value.items()]
        case functools.partial():
            return [_identity(part) for part in (value.func, value.args, value.keywords)]
        case MethodType():
            return id(value.__func__)
        case _:
            return id(value)


def _sizes_of_text(cut: str, field: str) -> tuple[int, ...]:
    sizes = []
    for part in cut.split(","):
        part = part.strip()
        if not part.isdecimal() or len(part) > 6 or not int(part):
            detail = f"holds {shown(part)}, but must be numbers of layers above 0. Maybe 5,6,6,5, or a file cut.json."
            _refuse(field, "no_number", detail)
        sizes.append(int(part))
    return tuple(sizes)


def _sizes_of_file(path: Path, units: Sequence[Unit], field: str) -> tuple[int, ...]:
    try:
        parts: Any = parse_json(read_bounded(path, MAX_CUT_BYTES), str(path))
    except InputError as error:
        _refuse(field, "not_read", f"is {path}, which {error}")
    lists = isinstance(parts, list) and all(isinstance(part, list) for part in parts)
    if not lists or not all(isinstance(name, str) for part in parts for name in part):
        _refuse(field, "wrong_type", f"is {path}, which must hold a list of lists of module names, one for each stage.")
    unit_of = {name: u for u, unit in enumerate(units) for name in unit.modules}
    sizes = []
    next_unit = 0
    for s, part in enumerate(parts):
        unknown = [name for name in part if name not in unit_of]
        if unknown:
            known = ", ".join((*units[0].modules, *units[-1].modules))
            _refuse(field, "unknown", f"is {path}, whose stage {s} has no module {unknown[0]!r}. Maybe one of {known}.")
        found = sorted({unit_of[name] for name in part})
        whole = [name for u in found for name in units[u].modules]
        if sorted(part) != sorted(whole):
            missing = next((name for name in whole if name not in part), "")
            what = f"lacks {missing}, which must be in the same stage" if missing else "has a name twice"
            _refuse(field, "no_unit", f"is {path}, whose stage {s} {what}.")
        if found != list(range(next_unit, next_unit + len(found))) or not found:
            expected = units[next_unit] if next_unit < len(units) else "nothing more"
            _refuse(field, "out_of_order", f"is {path}, whose stage {s} must begin with {expected} and go on in order.")
        next_unit += len(found)
        sizes.append(len(found))
    return tuple(sizes)


def _refuse(field: str, code: str, detail: str) -> NoReturn:
    raise InputError([Issue(field, code, detail)])
