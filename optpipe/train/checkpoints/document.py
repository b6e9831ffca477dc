"""`checkpoint.json` (document `optpipe.checkpoint/1`): what a checkpoint is of, and which files it consists of."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import version
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue

from optpipe.document import Document
from optpipe.errors import InputError, Issue

Count = Annotated[int, Field(ge=0, lt=2**63)]

MANIFEST = "checkpoint.json"
SCHEDULE = "schedule.json"
GENERATORS = "generators.safetensors"


def stage_file(stage: int) -> str:
    """The name of the file that holds a stage."""
    return f"stage-{stage:04d}.safetensors"


def buffers_file(stage: int, replica: int) -> str:
    """The name of the file that holds the buffers of a stage in a replica other than the first."""
    return f"stage-{stage:04d}.replica-{replica}.safetensors"


class SavedFile(Document):
    """Size and SHA-256 of a file."""

    size_bytes: Count
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Launched(Document):
    """How many processes the run had: results have equal bits only in as many."""

    processes: Count
    replicas: Count


class CheckpointDocument(Document):
    """A run between two steps.

    `step`: the steps done, so the number of the next one, which is the data position and that of the random numbers.
    `task`: what the model and its data are (`Task.identity`). `batch_microbatches`: in a step, of all replicas.
    `options`: the configuration of the run. `given_schedule`: SHA-256 of the schedule that the run was started with
    (None: it found one); `schedule.json` is the one in use, which may be another since. `files`: every other file of
    the checkpoint by name.
    """

    format: Literal["optpipe.checkpoint/1"]
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

    @property
    def size_bytes(self) -> int:
        """Of all files but the document itself."""
        return sum(file.size_bytes for file in self.files.values())

    def sealed(self) -> str:
        """The document as text with its own SHA-256 in it: a flipped bit would else pass for another number."""
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
    """What takes part in computing and in writing."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("optpipe", "torch", "safetensors")}


def _sha256_of(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
