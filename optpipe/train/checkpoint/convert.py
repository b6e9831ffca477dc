"""Checkpoints for other programs, and from them: folders of transformers, and torch's own distributed checkpoints."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from optpipe.errors import CheckpointError, InputError, Issue
from optpipe.models.hugging_face import PART, PREFIX, HuggingFace, save_weights
from optpipe.runtime.shared_parameters import shared_parameters
from optpipe.train.checkpoint.files import (
    FIRST_FORMAT,
    FORMAT,
    MANIFEST,
    CheckpointDocument,
    Disk,
    check_files,
    final_path,
    open_folder,
    partial_path,
    read_manifest,
    read_tensor,
    stage_file,
    steps_in,
    versions_now,
)
from optpipe.train.checkpoint.write import OPTIMIZER, REPLICA, stage_tensors

COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "generation_config.json",
    "chat_template*",
)
"""Files that a folder of transformers has in addition to configuration and weights."""


def to_hugging_face(checkpoint: Path, folder: Path) -> int:
    """Write the weights of a checkpoint for `from_pretrained`; returns its step.

    `checkpoint` is one of them, or the folder of a run, whose newest is taken. Files of a tokenizer come from the
    folder that the run was started with, if it is still there. Raises CheckpointError where the checkpoint is damaged
    or not of a model of transformers.
    """
    path, document = _newest(checkpoint)
    if not isinstance(document.task.get("configuration"), dict) or not isinstance(document.task.get("model"), str):
        raise CheckpointError(
            f"{path} is not of a model of transformers (--model {PREFIX}FOLDER). Maybe another run is."
        )
    weights = {n: t for n, t in _tensors(path, document).items() if not n.startswith((OPTIMIZER, REPLICA))}
    try:
        save_weights(document.task, weights, folder)
    except InputError as error:
        raise CheckpointError(f"{path} {error}") from None
    model = document.options.get("model")
    begun_with = Path(str(model["name"]).removeprefix(PREFIX)) if isinstance(model, dict) else Path()
    for pattern in COPIED if begun_with.is_dir() else ():
        for file in begun_with.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copy(file, folder)
    return document.step


def to_torch(checkpoint: Path, folder: Path) -> int:
    """Write weights and optimizer state as `torch.distributed.checkpoint.save` does by default; returns the step.

    The checkpoint itself is one for torch's `HuggingFaceStorageReader`; programs that read only torch's own files, with
    their pickled list of tensors, read this copy. Nothing here reads it. Raises CheckpointError where the checkpoint is
    damaged.
    """
    path, document = _newest(checkpoint)
    tensors = {name: t for name, t in _tensors(path, document).items() if not name.startswith(REPLICA)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(tensors, checkpoint_id=folder, no_dist=True)
    return document.step


def from_hugging_face(name: str, folder: Path, dtype: torch.dtype) -> int:
    """Write the weights of a model of transformers as a checkpoint of step 0; returns how many tensors they are.

    A run whose checkpoints are in `folder` begins with them, with any cut, schedule, data and seed. One layer at a time
    is in memory. Raises InputError where the model cannot be read or has no weights, and CheckpointError where the
    folder has checkpoints already or cannot be written.
    """
    model, disk = HuggingFace(f"{PREFIX}{name}", dtype=dtype), Disk()
    if not model.weights:
        raise InputError([Issue("", "no_weights", "has no weights in safetensors.")], f"model {name}")
    try:
        if steps_in(folder):
            raise CheckpointError(f"{folder} has checkpoints already. Maybe another folder.")
        open_folder(folder, disk)
        partial, files = partial_path(folder, 0), {}
        names: dict[str, str] = {}
        disk.make_folder(partial)
        for u in range(len(model.units)):
            stages = model.build_stages({u})
            elsewhere = {local for shared in shared_parameters(stages) for s, local in shared.places[1:] if s == u}
            own = [*stages[u].named_parameters(), *stages[u].named_buffers()]
            saved = {local: local.removeprefix(PART) for local, _ in own if local not in elsewhere}
            if tensors := stage_tensors(stages[u], None, saved):
                files[stage_file(u)] = disk.write_tensors(partial / stage_file(u), tensors)
                names |= dict.fromkeys(tensors, stage_file(u))
        document = CheckpointDocument.from_data(
            {
                "format": FORMAT,
                "step": 0,
                "seed": 0,
                "stages": len(model.units),
                "batch_microbatches": 0,
                "task": {key: value for key, value in model.identity().items() if key != "weights"},
                "options": {"model": {"name": f"{PREFIX}{name}"}},
                "given_schedule": None,
                "launched": {"processes": 0, "replicas": 0},
                "versions": versions_now(),
                "files": {file: saved_file.to_data() for file, saved_file in files.items()},
                "tensors": names,
            },
            "",
        )
        disk.write_text(partial / MANIFEST, document.sealed())
        disk.publish(partial, final_path(folder, 0))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}.") from None
    return len(names)


def _newest(checkpoint: Path) -> tuple[Path, CheckpointDocument]:
    """The checkpoint, or the newest in a folder of a run, with its manifest."""
    path = checkpoint
    if not (path / MANIFEST).exists():
        steps = steps_in(checkpoint)
        if not steps:
            raise CheckpointError(f"{checkpoint} has no checkpoint. Maybe it is another folder.")
        path = final_path(checkpoint, steps[0])
    document = read_manifest(path)
    if document.format == FIRST_FORMAT:
        raise CheckpointError(
            f"{path} has the format {FIRST_FORMAT}, whose tensors have no names of their model. Maybe resume the run "
            "for a step, which writes it anew."
        )
    return path, document


def _tensors(path: Path, document: CheckpointDocument) -> dict[str, Tensor]:
    """All tensors of a checkpoint, checked."""
    pieces = document.pieces
    check_files(path, document, {piece.file for of_tensor in pieces.values() for piece in of_tensor})
    try:
        return {name: read_tensor(path, of_tensor) for name, of_tensor in pieces.items()}
    except OSError as error:
        raise CheckpointError(str(error)) from None
