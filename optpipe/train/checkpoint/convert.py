"""Checkpoints as folders of transformers: the weights, without optimizers and whatever else a run goes on with."""

from __future__ import annotations

import shutil
from pathlib import Path

from optpipe.errors import CheckpointError, InputError
from optpipe.models.hugging_face import PREFIX, save_weights
from optpipe.train.checkpoint.files import (
    MANIFEST,
    CheckpointDocument,
    check_files,
    final_path,
    read_manifest,
    read_tensors,
    stage_file,
    steps_in,
)

BESIDE = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "generation_config.json", "chat_template*")
"""Files that a folder of transformers has beside configuration and weights."""


def to_hugging_face(checkpoint: Path, folder: Path) -> int:
    """Write the weights of a checkpoint for `from_pretrained`; returns its step.

    `checkpoint` is one of them, or the folder of a run, whose newest is taken. Files of a tokenizer come from the
    folder that the run was started with, if it is still there. Raises CheckpointError where the checkpoint is damaged
    or not of a model of transformers.
    """
    path = checkpoint
    if not (path / MANIFEST).exists():
        steps = steps_in(checkpoint)
        if not steps:
            raise CheckpointError(f"{checkpoint} has no checkpoint. Maybe it is another folder.")
        path = final_path(checkpoint, steps[0])
    document = read_manifest(path)
    if not _of_transformers(document):
        raise CheckpointError(
            f"{path} is not of a model of transformers (--model {PREFIX}FOLDER). Maybe another run is."
        )
    names = [stage_file(s) for s in range(document.stages)]
    check_files(path, document, names)
    weights = {}
    for name in names:
        for full, tensor in read_tensors(path / name, lambda full: not full.startswith("optimizer.")).items():
            weights[full.partition(".")[2]] = tensor
    try:
        save_weights(document.task, weights, folder)
    except InputError as error:
        raise CheckpointError(f"{path} {error}") from None
    model = document.options.get("model")
    begun_with = Path(str(model["name"]).removeprefix(PREFIX)) if isinstance(model, dict) else Path()
    for pattern in BESIDE if begun_with.is_dir() else ():
        for file in begun_with.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copy(file, folder)
    return document.step


def _of_transformers(document: CheckpointDocument) -> bool:
    return isinstance(document.task.get("configuration"), dict) and isinstance(document.task.get("model"), str)
