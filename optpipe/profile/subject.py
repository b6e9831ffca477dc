"""What is profiled: a model as a list of stage modules, with one microbatch and its loss, as a user's callable says."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from optpipe.errors import InputError, Issue
from optpipe.runtime.messages import Tree, leaves
from optpipe.runtime.stage import Loss

RETURNS = "(stages, inputs, targets, loss)"
"""What a user's callable returns: a list of modules, one microbatch and its target, and loss(output, target)."""


@dataclass(frozen=True)
class Subject:
    """`stages` are applied one after the other to `inputs`, one microbatch; `loss(output, targets)` is its mean."""

    name: str
    stages: Sequence[nn.Module]
    inputs: Tree
    targets: Tree
    loss: Loss

    @property
    def microbatch_size(self) -> int:
        """Sequences in the microbatch: the length of its first tensor, 1 for a scalar."""
        first: Tensor = leaves(self.inputs)[0]
        return first.shape[0] if first.dim() else 1


def load_subject(name: str) -> Subject:
    """Call `package.module:callable`, found from the current folder too, without arguments, and check what it returns.

    Raises InputError that says what is wrong and where.
    """
    with _current_folder_importable():
        build = _callable(name)
        try:
            returned = build()
        except Exception as error:
            refuse(name, "failed", f"raises {_text_of(error)}.")
    return _checked(name, returned)


def refuse(name: str, code: str, detail: str) -> NoReturn:
    """Raise InputError about the model of that name."""
    raise InputError([Issue("", code, detail)], f"model {name}")


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _callable(name: str) -> Callable[[], Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        refuse(name, "bad_name", "is not of the form package.module:callable.")
    try:
        module = import_module(module_name)
    except Exception as error:
        maybe = " Maybe run from the folder that it is in." if isinstance(error, ModuleNotFoundError) else ""
        refuse(name, "not_imported", f"cannot be imported: {_text_of(error)}.{maybe}")
    found = getattr(module, attribute, None)
    if not callable(found):
        close = get_close_matches(attribute, dir(module), n=1)
        maybe = f" Maybe you meant {close[0]}." if close else ""
        what = "has no" if found is None else "has no callable"
        refuse(name, "no_callable", f"module {module_name} {what} {attribute}.{maybe}")
    build: Callable[[], Any] = found
    return build


def _checked(name: str, returned: Any) -> Subject:
    if not isinstance(returned, tuple) or len(returned) != 4:
        shape = (
            f"{type(returned).__name__} of {len(returned)}" if hasattr(returned, "__len__") else type(returned).__name__
        )
        refuse(name, "wrong_return", f"returns {_article(shape)}, but must return the tuple {RETURNS}.")
    stages, inputs, targets, loss = returned
    if not isinstance(stages, list | tuple | nn.ModuleList | nn.Sequential) or not len(stages):
        refuse(name, "no_stages", f"returns {type(stages).__name__} for stages, but must return a list of modules.")
    for s, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            refuse(name, "no_module", f"returns stages[{s}] of type {type(stage).__name__}, but each must be a Module.")
    for field, tree in (("inputs", inputs), ("targets", targets)):
        check_tensors(name, field, tree)
    if not callable(loss):
        refuse(
            name, "no_loss", f"returns {type(loss).__name__} for loss, but must return a function of output and target."
        )
    return Subject(name, list(stages), inputs, targets, loss)


def check_tensors(name: str, field: str, tree: Any) -> None:
    """Refuse what is no tensor, nor a tuple, list or dict of them."""
    parts = leaves(tree)
    for part in parts:
        if not isinstance(part, Tensor):
            refuse(
                name,
                "no_tensor",
                f"returns {type(part).__name__} in {field}, but a tensor, or a tuple, list or dict of them is needed.",
            )
    if not parts:
        refuse(name, "no_tensor", f"returns no tensor in {field}.")


def _text_of(error: Exception) -> str:
    """An error with the place in the user's file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    outside = last is None or last.filename.startswith("<frozen") or last.filename == __file__
    place = "" if outside or last is None else f" at {Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__}: {str(error).rstrip('.')}{place}"


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"
