"""Changes to a folder of checkpoints that are on the disk once they return, and the reading that trusts nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from optpipe.train.checkpoints.document import SavedFile

ASIDE = ".removed-"
"""What a folder is called while its files are being deleted: not what a reader looks for."""


class Disk:
    """The one place that changes files, so that tests can fill the disk or end the process at each change.

    All methods raise OSError.
    """

    def make_folder(self, path: Path) -> None:
        """A folder that is not there yet, in one that is."""
        path.mkdir()
        sync_folder(path.parent)

    def write_text(self, path: Path, text: str) -> SavedFile:
        """A new file of UTF-8 text."""
        content = text.encode()
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return SavedFile(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> SavedFile:
        """A new safetensors file of tensors on the CPU that share no memory."""
        try:
            save_file(dict(tensors), path)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}.") from None
        path.chmod(0o666 & ~_umask())  # as any other file: safetensors makes it the owner's alone
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return digest(path)

    def publish(self, partial: Path, final: Path) -> None:
        """Give a complete folder the name by which readers find it, which no folder has."""
        sync_folder(partial)
        partial.rename(final)
        sync_folder(final.parent)

    def remove(self, folder: Path) -> None:
        """Delete a folder; readers find it whole or not at all."""
        aside = folder.with_name(ASIDE + folder.name.lstrip("."))
        folder.rename(aside)
        shutil.rmtree(aside)


def digest(path: Path) -> SavedFile:
    """Size and hash of a file as it is. Raises OSError."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return SavedFile(size_bytes=file.tell(), sha256=sha256)


def read_tensors(path: Path, wanted: Callable[[str], bool] = lambda _: True) -> dict[str, Tensor]:
    """Those tensors of a safetensors file whose names are wanted, on the CPU. Raises OSError."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{path}: {error}.") from None


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk, not only the files that they stand for."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
