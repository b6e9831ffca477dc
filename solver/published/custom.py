"""A user's own schedule: a function of a Python file, whose answer becomes orders, or an error that names the fault."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from optpipe.errors import DeadlockError, InputError, Issue, MethodError, OrderError, shown
from optpipe.ops import Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.units import bytes_text

DeviceOrder = str | Sequence[str | Op]
OrderFunction = Callable[[Problem], Orders | Sequence[DeviceOrder]]
"""A function of a Problem that returns Orders, or the compute ops of each device in order, by name."""

FORM = "Maybe return a list with one text such as 'F0.0 F0.1 B0.0 W0.0' for each device, or Orders."


def load_function(text: str, field: str) -> OrderFunction:
    """The function of ``FILE.py:NAME``; the file runs as a script would, with its folder first among imports.

    Raises InputError that names `field` where there is no such file or function, or the file fails.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not path.is_file():
        detail = f"is {shown(text)}, but there is no file {shown(file)}. Maybe write it as FILE.py:FUNCTION."
        raise InputError([Issue(field, "no_file", detail)])
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with redirect_stdout(sys.stderr):  # stdout holds the answer of a command
            names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise InputError([Issue(field, "file_failed", f"is {text}, but {path.name} {_raised(error, path)}")]) from None
    finally:
        sys.path.pop(0)
    function = names.get(name)
    if not callable(function):
        functions = [n for n, value in names.items() if getattr(value, "__module__", "") == names["__name__"]]
        known = f"the functions there are {', '.join(functions)}" if functions else "there are no functions in it"
        maybe = f"Maybe {file}:{functions[-1]}." if functions else "Maybe write 'def order(problem): ...'."
        detail = f"is {text}, but {path.name} has no function {shown(name)}; {known}. {maybe}"
        raise InputError([Issue(field, "no_function", detail)])
    return function  # type: ignore[no-any-return]


def custom_orders(name: str, function: OrderFunction, problem: Problem) -> Orders:
    """The orders that a user's function gives for a problem.

    Raises MethodError where it raises, returns something else, or its orders break a rule, deadlock, or hold more than
    the host has. Budgets of devices are left to `solver.methods.published_orders`.
    """
    try:
        with redirect_stdout(sys.stderr):
            returned = function(problem)
    except MethodError as error:
        raise MethodError(f"{name}: {error}") from None
    except (Exception, SystemExit) as error:
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        raise MethodError(f"{name} {_raised(error, Path(file))}") from None
    orders = returned if isinstance(returned, Orders) else _orders(name, returned)
    if len(orders.devices) != len(problem.devices):
        count = len(orders.devices)
        raise MethodError(f"{name} returned {count} devices, but the problem has {len(problem.devices)}. {FORM}")
    try:
        simulation = simulate(problem, orders)
    except OrderError as error:
        raise MethodError(f"{name} returned orders that break a rule: {error}.") from None
    except DeadlockError as error:
        raise MethodError(f"{name}: {error}") from None
    except (AttributeError, TypeError, ValueError) as error:  # lists of something else inside Orders
        raise MethodError(f"{name} returned Orders that cannot be read: {error}. Maybe make its ops by Op.") from None
    held, limit = simulation.host_memory().peak_bytes, problem.host_memory_bytes
    if limit is not None and held > limit:
        raise MethodError(f"{name} offloads {bytes_text(held)} at once, but host_memory_bytes is {bytes_text(limit)}.")
    return orders


def _orders(name: str, returned: Sequence[DeviceOrder]) -> Orders:
    """Orders of the ops by name that a function returned. Raises MethodError for anything else."""
    if isinstance(returned, str) or not isinstance(returned, Sequence):
        raise MethodError(f"{name} returned {shown(returned)}. {FORM}")
    lists = []
    for d, ops in enumerate(returned):
        try:
            text = ops if isinstance(ops, str) else " ".join(map(str, ops))
            lists.append(OpArray.parse(" ".join(text.split())))
        except (TypeError, ValueError) as error:
            raise MethodError(f"{name} returned {shown(ops)} for device {d}: {error}. {FORM}") from None
    return Orders.of_compute(lists)


def _raised(error: BaseException, path: Path) -> str:
    """Sentence on what a user's code raised, and on which line of its file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f" (line {line} of {path.name})" if line else ""
    return f"raised {type(error).__name__}: {str(error) or 'no message'}{where}. Maybe call it from Python to see more."
