"""Checkpoint folders: manifest, files with digests, atomic renames, retention."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, JsonValue
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from optpipe.document import Document, read_document
from optpipe.errors import CheckpointError, InputError, Issue

MAX_MANIFEST_BYTES = 64 * 2**20

PARTIAL = ".partial-"
"""Prefix of the folder in which a checkpoint is written until it is complete."""

_NAME = re.compile(r"step-(\d{10})")


def final_path(folder: Path, step: int) -> Path:
    """Path of the complete checkpoint of a step."""
    return folder / f"step-{step:010d}"


def partial_path(folder: Path, step: int) -> Path:
    """Path at which the checkpoint of a step is being written."""
    return folder / (PARTIAL + final_path(folder, step).name)


def steps_in(folder: Path) -> list[int]:
    """Steps of all checkpoints, newest first; empty if there is no folder. Raises OSError."""
    if not folder.exists():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def read_manifest(path: Path) -> CheckpointDocument:
    """The document of a checkpoint. Raises CheckpointError that names what is wrong with it."""
    manifest = path / MANIFEST
    try:
        return CheckpointDocument.unsealed(read_document(manifest, MAX_MANIFEST_BYTES), str(manifest))
    except InputError as error:
        raise CheckpointError(f"{manifest}: {error}") from None


def check_files(path: Path, document: CheckpointDocument, names: Collection[str]) -> None:
    """Compare files with what was written. Raises CheckpointError naming the first that is another or not there."""
    for name in sorted(names):
        wanted = document.files.get(name)
        if wanted is None:
            raise CheckpointError(f"{path / MANIFEST}: files does not have {name}. Maybe the stages were others.")
        try:
            actual = digest(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}.") from None
        if actual.size_bytes != wanted.size_bytes:
            raise CheckpointError(
                f"{path / name} has {actual.size_bytes:,} bytes but {wanted.size_bytes:,} were written. It is damaged."
            )
        if actual.sha256 != wanted.sha256:
            raise CheckpointError(f"{path / name} has not the SHA-256 of what was written. It is damaged.")


def open_folder(folder: Path, disk: Disk) -> None:
    """Create the folder, clear leftovers and write a probe, so that a read-only disk is found before training.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder, disk)
    probe = folder / f"{PARTIAL}probe"
    disk.make_folder(probe)
    disk.remove(probe)


def clear_leftovers(folder: Path, disk: Disk) -> None:
    """Delete what killed processes have left half written or half deleted. Raises OSError."""
    for path in folder.iterdir():
        if path.name.startswith((PARTIAL, ASIDE)):
            disk.remove(path)


def retire(folder: Path, disk: Disk, newest: int, keep: int, damaged: Collection[int]) -> None:
    """Delete all but the newest `keep` checkpoints up to `newest`, which has just been written. Raises OSError.

    `damaged` ones do not count as kept. Those after `newest` were damaged when the run resumed from an earlier one, and
    stay until training comes past them.
    """
    past = [step for step in steps_in(folder) if step <= newest]
    kept = [step for step in past if step not in damaged][:keep]
    for step in past:
        if step not in kept:
            disk.remove(final_path(folder, step))


Count = Annotated[int, Field(ge=0, lt=2**63)]

FORMAT = "optpipe.checkpoint/2"
FIRST_FORMAT = "optpipe.checkpoint/1"
"""Format of release 0.1.0, which is read: its tensors have the names of a stage's module."""

MANIFEST = "checkpoint.json"
SCHEDULE = "schedule.json"
GENERATORS = "generators.safetensors"


def stage_file(stage: int) -> str:
    """The name of the file that holds a stage."""
    return f"stage-{stage:04d}.safetensors"


def buffers_file(stage: int, replica: int) -> str:
    """The name of the file that holds the buffers of a stage in a replica other than the first."""
    return f"stage-{stage:04d}.replica-{replica}.safetensors"


def loader_file(replica: int) -> str:
    """The name of the file that holds the state of a replica's loader."""
    return f"loader.replica-{replica}.json"


class SavedFile(Document):
    """Size and SHA-256 of a file."""

    size_bytes: Count
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Launched(Document):
    """Processes of the run. Results have the same bits only in the same number."""

    processes: Count
    replicas: Count


class Piece(NamedTuple):
    """Rows of a tensor in a file, from row `first` on, under a name there; a whole tensor is one piece."""

    file: str
    name: str
    first: int = 0


class CheckpointDocument(Document):
    """A run between two steps.

    `step`: the steps done, so the number of the next one, which is the data position and that of the random numbers.
    `task`: what the model and its data are (`Task.identity`). `batch_microbatches`: in a step, of all replicas.
    `options`: the configuration of the run. `given_schedule`: SHA-256 of the schedule that the run was started with
    (None: it found one); `schedule.json` is the one in use, which may be another since. `files`: every other file of
    the checkpoint by name. `tensors`: the file of each whole tensor; empty in the first format. `divided`: for each
    other tensor the files that have rows of it, with the number of the first.
    """

    format: Literal["optpipe.checkpoint/1", "optpipe.checkpoint/2"]
    step: Count
    seed: Count
    stages: Count
    batch_microbatches: Count
    task: dict[str, JsonValue]
    options: dict[str, JsonValue]
    given_schedule: str | None
    launched: Launched
    versions: dict[str, str]
    files: dict[str, SavedFile]
    tensors: dict[str, str] = {}
    divided: dict[str, dict[str, Count]] = {}

    @property
    def pieces(self) -> dict[str, list[Piece]]:
        """Pieces of each tensor, in the order of its rows."""
        divided = {
            name: sorted((Piece(file, name, first) for file, first in files.items()), key=lambda piece: piece.first)
            for name, files in self.divided.items()
        }
        return {name: [Piece(file, name)] for name, file in self.tensors.items()} | divided

    @property
    def weights_alone(self) -> bool:
        """True for a checkpoint that no run has written (`optpipe checkpoint from-hf`): a run begins with it."""
        return SCHEDULE not in self.files

    @property
    def size_bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(file.size_bytes for file in self.files.values())

    def sealed(self) -> str:
        """Document as text that holds its own SHA-256: JSON alone would not show a flipped bit in a number."""
        data = self.to_data()
        return json.dumps(data | {"sha256": _sha256_of(data)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def unsealed(cls, data: Any, source: str) -> Self:
        """The document from parsed JSON. Raises InputError."""
        if isinstance(data, dict):
            data = dict(data)
            if data.pop("sha256", None) != _sha256_of(data):
                raise InputError([Issue("sha256", "damaged", "is not that of the document.")], source)
        return cls.from_data(data, source)


def versions_now() -> dict[str, str]:
    """Versions of Python and of the packages on which the numbers and the files depend."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("optpipe", "torch", "safetensors")}


def _sha256_of(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


ASIDE = ".removed-"
"""Prefix of a folder while its files are being deleted, so that readers never see it in part."""


class Disk:
    """All changes to files, in one class that tests replace to fail, or to kill the process, at each of them.

    All methods raise OSError.
    """

    def make_folder(self, path: Path) -> None:
        """Create a folder in one that exists."""
        path.mkdir()
        sync_folder(path.parent)

    def write_text(self, path: Path, text: str) -> SavedFile:
        """Write a new file of UTF-8 text."""
        content = text.encode()
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return SavedFile(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    def write_tensors(
        self, path: Path, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] | None = None
    ) -> SavedFile:
        """Write a new safetensors file of tensors on the CPU that share no memory.

        `first_rows`: number of the first row of each tensor of which the file has some rows.
        """
        metadata = None
        if first_rows:  # what torch's HuggingFaceStorageReader puts tensors together by
            offsets = {
                n: {"saved_offsets": [first_rows.get(n, 0), *[0] * t.dim()][: t.dim()]} for n, t in tensors.items()
            }
            metadata = {"DCP_SHARDING_INFO": json.dumps(offsets)}
        try:
            save_file(dict(tensors), path, metadata)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}.") from None
        mask = os.umask(0)  # the only way to read it
        os.umask(mask)
        path.chmod(0o666 & ~mask)  # as any other file: safetensors makes it readable by its owner alone
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return digest(path)

    def publish(self, partial: Path, final: Path) -> None:
        """Rename a complete folder to the name that readers look for, which must be free.

        The order is that of a commit: names of the files on the disk, then the rename, then its own entry.
        """
        sync_folder(partial)
        partial.rename(final)
        sync_folder(final.parent)

    def remove(self, folder: Path) -> None:
        """Delete a folder. Readers find it whole or not at all."""
        aside = folder.with_name(ASIDE + folder.name.lstrip("."))
        folder.rename(aside)
        shutil.rmtree(aside)


def digest(path: Path) -> SavedFile:
    """Size and SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return SavedFile(size_bytes=file.tell(), sha256=sha256)


def read_tensors(path: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors of these names (None: all) of a safetensors file, on the CPU. Raises OSError."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
    except SafetensorError as error:
        raise OSError(f"{path}: {error}.") from None


def overlapping(pieces: Sequence[Piece], rows: range | None) -> Iterator[tuple[Piece, slice]]:
    """Pieces with any of these rows of the tensor (None: all), and which of their own rows these are."""
    ends: list[int | None] = [piece.first for piece in pieces[1:]]
    for piece, end in zip(pieces, [*ends, None], strict=True):
        if rows is None:
            yield piece, slice(None)
        elif piece.first < rows.stop and (end is None or end > rows.start):
            yield piece, slice(max(0, rows.start - piece.first), rows.stop - piece.first)


def read_tensor(folder: Path, pieces: Sequence[Piece], rows: range | None = None) -> Tensor:
    """A tensor of a checkpoint, or these rows of it, on the CPU; a scalar is read whole. Raises OSError."""
    parts = []
    for piece, own in overlapping(pieces, rows):
        path = folder / piece.file
        try:
            with safe_open(path, framework="pt") as file:
                saved = file.get_slice(piece.name)
                parts.append(saved[own] if rows is not None and saved.get_shape() else file.get_tensor(piece.name))
        except SafetensorError as error:
            raise OSError(f"{path}: {error}.") from None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def tensor_names(path: Path) -> list[str]:
    """Names in a safetensors file. Raises OSError."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise OSError(f"{path}: {error}.") from None


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk; fsync of a file does not flush its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
