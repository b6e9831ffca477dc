"""Lazy exports: names of a package that are imported on first use, so that the package loads in milliseconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def offer(package: str, names: Mapping[str, str]) -> None:
    """Export each name of `names` from `package`, which is being imported, by the module that it is mapped to.

    A name may equal that of its module, as in ``from optpipe import simulate`` and ``from optpipe.simulate import
    simulate``. The import system binds a loaded submodule to its package under the same name; the package keeps the
    exported object instead. The module stays in `sys.modules`, where ``from optpipe.simulate import ...`` finds it.
    """

    class Offering(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in names:
                raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=self)
            setattr(self, name, getattr(import_module(names[name]), name))
            return vars(self)[name]

        def __setattr__(self, name: str, value: Any) -> None:
            if name in names and isinstance(value, ModuleType):
                value = getattr(value, name)
            super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *names})

    sys.modules[package].__class__ = Offering
