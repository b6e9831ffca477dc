"""Atomic writes of output files, and the check before a long run that a file can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from optpipe.errors import InputError, Issue

STDOUT = "-"
"""The output that commands take for stdout, where they print a document alone."""


def check_writable(path: Path, *inputs: Path | None) -> None:
    """Raise InputError if a file could not be written at `path`, before the run whose output it is to hold.

    Nor may it be one of the `inputs`, which would be lost.
    """
    _refuse_stdout(path)
    replaced = _is_replaced(path)
    target = Path(os.path.realpath(path)) if replaced else path
    folder = target.parent
    why = ""
    if os.path.isdir(target):
        why = "it is a folder. Maybe name a file in it."
    elif any(one is not None and os.path.isfile(one) and os.path.realpath(one) == str(target) for one in inputs):
        why = "it is what is read, and would be lost. Maybe name another file."
    elif not os.path.isdir(folder):
        exists = os.path.exists(folder)
        why = f"{folder} is {'a file, not a folder' if exists else 'not a folder. Maybe make it first'}."
    elif os.path.exists(target) and not os.access(target, os.W_OK):
        why = "no permission."
    elif replaced and not os.access(folder, os.W_OK):
        why = f"no permission to write in {folder}."
    elif len(os.fsencode(target.name)) > (longest := os.pathconf(folder, "PC_NAME_MAX")):
        why = f"its name has more than {longest} bytes. Maybe a shorter one."
    if why:
        raise InputError([Issue("", "not_writable", f"cannot be written: {why}")], str(path))


def _refuse_stdout(path: Path) -> None:
    if str(path) == STDOUT:
        raise InputError([Issue("--output", "not_stdout", "is -, but stdout has the summary here. Maybe name a file.")])


def make_folder(path: Path) -> None:
    """Make the folder that --output names, with those above it. Raises InputError where it cannot be one."""
    _refuse_stdout(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else str(error.strerror).lower()
        detail = f"is {path}, which cannot be made a folder: {why}. Maybe name another one."
        raise InputError([Issue("--output", "not_writable", detail)]) from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old content or the new, never a part. Text is written as UTF-8.

    A symbolic link is kept and its target replaced. Anything that is no regular file, such as /dev/stdout or a pipe,
    is written to directly. Raises OSError that names `path`; the old file is then unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if not _is_replaced(path):
            path.write_bytes(data)
            return
        target = os.path.realpath(path)
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(target), prefix=".optpipe-", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(file.name, 0o666 & ~umask)  # temporary files are private; the output is like any other file
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_replaced(path: Path) -> bool:
    """Return whether a rename may put a new file at `path`: not onto a device, a pipe or a folder."""
    return os.path.isfile(path) or not os.path.exists(path)
