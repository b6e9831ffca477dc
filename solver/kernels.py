"""Validity of numba's on-disk kernel cache, and marks of how far an installation is compiled.

Numba recompiles a function if its own file has changed. It does not track what the function uses from other files
(functions, constants, the fields of a table): after an upgrade, old machine code could run on new tables. So the whole
cache is invalidated if any of these files has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import IO

import numba
from numba.core.caching import InTreeCacheLocator, UserProvidedCacheLocator, UserWideCacheLocator
from numba.core.registry import cpu_target

import optpipe
import solver
from solver.cache import default_folder

WARM = "warm"
"""The stage of an installation all of whose kernels are compiled."""

_KERNEL = re.compile(rb"^@njit", re.MULTILINE)
_IMPORT = re.compile(r"^from ((?:optpipe|solver)\.[\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)
_ROOT = Path(solver.__path__[0]).parent


def is_marked(stage: str) -> bool:
    """True if `mark` was called with this stage for the present state of the kernels, of Python and of numba."""
    return any((folder / _name(stage)).exists() for folder in _folders())


def mark(stage: str) -> None:
    """Record a stage as a file in the first writable folder; without one, nothing is recorded."""
    for folder in _folders():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _name(stage)).touch()
            return


def compiler_lock(*, wait: bool) -> IO[str] | None:
    """The compiler lock, held until it is closed here and in every process that it was passed to.

    None where another process holds it and is not to be waited for, or where no folder can be written.
    """
    for folder in _folders():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / _name("lock")).open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                lock.close()
                return None
            return lock
    return None


def are_ready(stage: str) -> bool:
    """True if the kernels of a stage are compiled, or no process is compiling: then they are at their first use."""
    return is_marked(WARM) or is_marked(stage) or not are_being_compiled()


def are_being_compiled() -> bool:
    """True if some process holds the compiler lock."""
    for path in (folder / _name("lock") for folder in _folders()):
        with suppress(OSError), path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


@cache
def load_compiler() -> None:
    """Load what numba loads for its first kernel, in a thread of its own, so that Ctrl-C ends only the wait for it.

    Interrupted amid these modules, numba stays half loaded, and no later kernel of the process would work.
    """
    loading = Thread(target=_load_compiler, name="numba")
    loading.start()
    loading.join()


def _load_compiler() -> None:
    with _loading:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


_loading = Lock()


@cache
def forget_stale() -> None:
    """Invalidate cached kernels that may be of other sources; once for each state of these."""
    if is_marked("fresh"):
        return
    for path in map(_path, sorted(_modules_with_kernels())):
        for index in _indexes(path):
            with suppress(OSError):
                index.unlink()
    _forget_other_marks()
    mark("fresh")


def _forget_other_marks() -> None:
    """Remove marks of other sources: their cached kernels are gone."""
    for path in _folders()[0].glob("*-" + 16 * "[0-9a-f]"):
        stage, _, state = path.name.rpartition("-")
        if stage != "lock" and not _name(stage).endswith(state):
            with suppress(OSError):
                path.unlink()


def _indexes(source: Path) -> Iterator[Path]:
    """Index files of numba's cache for a module, found without importing it.

    They lie where this process keeps them, and nowhere else: another folder's marks would go on to call them compiled.
    """
    for locator in (UserProvidedCacheLocator, InTreeCacheLocator, UserWideCacheLocator):
        found = locator.from_function(_indexes, str(source))  # type: ignore[no-untyped-call]
        if found is not None:
            yield from Path(found.get_cache_path()).glob(f"{source.stem}.*.nbi")
            return


def _folders() -> list[Path]:
    """Folders of marks: next to numba's cache, so that both are lost together, or with the user's caches."""
    own = os.environ.get("NUMBA_CACHE_DIR")
    return [Path(own) if own else Path(__file__).parent / "__pycache__", default_folder()]


@cache
def _name(stage: str) -> str:
    digest = hashlib.sha256(f"{sys.version} {numba.__version__} {_ROOT}".encode())
    for module in sorted(_sources()):
        digest.update(_path(module).read_bytes())
    return f"{stage}-{digest.hexdigest()[:16]}"


def _sources() -> frozenset[str]:
    """The modules with kernels, and those whose constants and tables they use."""
    modules = _modules_with_kernels()
    return modules | {used for module in modules for used in _used_by(module)}


@cache
def _modules_with_kernels() -> frozenset[str]:
    paths = [path for package in (optpipe, solver) for path in Path(package.__path__[0]).rglob("*.py")]
    with_kernels = [path for path in paths if _KERNEL.search(path.read_bytes())]
    return frozenset(".".join(path.relative_to(_ROOT).with_suffix("").parts) for path in with_kernels)


def _used_by(module: str) -> Iterator[str]:
    """Modules that a module imports constants from, or anything from its own room."""
    room = module.split(".")[:2]
    for used, names in _IMPORT.findall(_path(module).read_text()):
        if used.split(".")[:2] == room or any(name.isupper() for name in re.findall(r"\w+", names)):
            yield used


def _path(module: str) -> Path:
    return _ROOT.joinpath(*module.split(".")).with_suffix(".py")
