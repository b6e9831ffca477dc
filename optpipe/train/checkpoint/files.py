"""The folder of a run's checkpoints: `step-0000000100/` each, and what a reader can trust in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from optpipe.document import read_document
from optpipe.errors import CheckpointError, InputError
from optpipe.train.checkpoints.disk import ASIDE, Disk, digest
from optpipe.train.checkpoints.document import MANIFEST, CheckpointDocument

MAX_MANIFEST_BYTES = 64 * 2**20

PARTIAL = ".partial-"
"""What a checkpoint is called until all of it is written."""

_NAME = re.compile(r"step-(\d{10})")


def final_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is once it is whole."""
    return folder / f"step-{step:010d}"


def partial_path(folder: Path, step: int) -> Path:
    """Where it is being written."""
    return folder / (PARTIAL + final_path(folder, step).name)


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoints, the newest first; none where there is no folder. Raises OSError."""
    if not folder.exists():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def read_manifest(path: Path) -> CheckpointDocument:
    """The document of a checkpoint. Raises CheckpointError that names what is wrong with it."""
    manifest = path / MANIFEST
    try:
        return CheckpointDocument.unsealed(read_document(manifest, MAX_MANIFEST_BYTES, {}), str(manifest))
    except InputError as error:
        raise CheckpointError(f"{manifest}: {error}") from None


def check_files(path: Path, document: CheckpointDocument, names: Collection[str]) -> None:
    """Compare files with what was written. Raises CheckpointError naming the first that is another or not there."""
    for name in sorted(names):
        wanted = document.files.get(name)
        if wanted is None:
            raise CheckpointError(f"{path / MANIFEST}: files does not have {name}. Maybe the stages were others.")
        try:
            found = digest(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}.") from None
        if found.size_bytes != wanted.size_bytes:
            raise CheckpointError(
                f"{path / name} has {found.size_bytes:,} bytes but {wanted.size_bytes:,} were written. It is damaged."
            )
        if found.sha256 != wanted.sha256:
            raise CheckpointError(f"{path / name} has not the SHA-256 of what was written. It is damaged.")


def open_folder(folder: Path, disk: Disk) -> None:
    """Make the folder, clear it of leftovers, and change something in it: better now than after an hour of training.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder, disk)
    probe = folder / f"{PARTIAL}probe"
    disk.make_folder(probe)
    disk.remove(probe)


def clear_leftovers(folder: Path, disk: Disk) -> None:
    """Delete what processes that were killed have left half written or half deleted. Raises OSError."""
    for path in folder.iterdir():
        if path.name.startswith((PARTIAL, ASIDE)):
            disk.remove(path)


def retire(folder: Path, disk: Disk, newest: int, keep: int, damaged: Collection[int]) -> None:
    """Delete all but the newest `keep` checkpoints up to `newest`, which has just been written. Raises OSError.

    Those that are `damaged` do not count. Later ones are of a future that was given up because they are damaged; they
    stay until training comes past them.
    """
    for step in _spent(steps_in(folder), newest, keep, damaged):
        disk.remove(final_path(folder, step))


def _spent(steps: Sequence[int], newest: int, keep: int, damaged: Collection[int]) -> list[int]:
    past = [step for step in steps if step <= newest]
    kept = [step for step in past if step not in damaged][:keep]
    return [step for step in past if step not in kept]
