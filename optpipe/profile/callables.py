"""What users name as `package.module:callable`: found, called, and refused with the place that is wrong."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from optpipe.errors import InputError, Issue
from optpipe.runtime.messages import leaves


class Named:
    """A callable by its name; `role` says in errors what it is there for, such as "model" or "data"."""

    def __init__(self, role: str, name: str) -> None:
        self.role, self.name = role, name
        with _current_folder_importable():
            self._call = self._find()

    def __call__(self, *arguments: Any) -> Any:
        """What it returns. Raises InputError with the place in the user's file where it failed."""
        with _current_folder_importable():
            try:
                return self._call(*arguments)
            except Exception as error:
                given = f" when called with {', '.join(map(str, arguments))}" if arguments else ""
                self.refuse("failed", f"raises {_text_of(error)}{given}.")

    def refuse(self, code: str, detail: str) -> NoReturn:
        """Raise InputError about it."""
        refuse(self.name, code, detail, self.role)

    def _find(self) -> Callable[..., Any]:
        module_name, _, attribute = self.name.partition(":")
        if not module_name or not attribute:
            self.refuse("bad_name", "is not of the form package.module:callable.")
        try:
            module = import_module(module_name)
        except Exception as error:
            maybe = " Maybe run from the folder that it is in." if isinstance(error, ModuleNotFoundError) else ""
            self.refuse("not_imported", f"cannot be imported: {_text_of(error)}.{maybe}")
        found = getattr(module, attribute, None)
        if not callable(found):
            close = get_close_matches(attribute, dir(module), n=1)
            maybe = f" Maybe you meant {close[0]}." if close else ""
            what = "has no" if found is None else "has no callable"
            self.refuse("no_callable", f"module {module_name} {what} {attribute}.{maybe}")
        call: Callable[..., Any] = found
        return call


def refuse(name: str, code: str, detail: str, role: str = "model") -> NoReturn:
    """Raise InputError about the model, or what else it is, of that name."""
    raise InputError([Issue("", code, detail)], f"{role} {name}")


def check_tensors(name: str, field: str, tree: Any, role: str = "model") -> None:
    """Refuse what is no tensor, nor a tuple, list or dict of them."""
    parts = leaves(tree)
    for part in parts:
        if not isinstance(part, Tensor):
            what = "but a tensor, or a tuple, list or dict of them is needed."
            refuse(name, "no_tensor", f"returns {type(part).__name__} in {field}, {what}", role)
    if not parts:
        refuse(name, "no_tensor", f"returns no tensor in {field}.", role)


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code may have changed the path itself
            sys.path.remove(here)


def _text_of(error: Exception) -> str:
    """An error with the place in the user's file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    outside = last is None or last.filename.startswith("<frozen") or last.filename == __file__
    place = "" if outside or last is None else f" at {Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__}: {str(error).rstrip('.')}{place}"
