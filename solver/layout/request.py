"""A plan as callers of the service ask for it: a model, GPUs of a machine, a sequence and a batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import version
from typing import Annotated, Any

from pydantic import Discriminator, Field, StrictInt, Tag

from optpipe.cluster.machine import Machine, known_name, named_machines
from optpipe.cluster.model import named_models, read_model
from optpipe.cluster.rules import MOST_DEGREE
from optpipe.cluster.software import require_software
from optpipe.document import UNION_TAG, Document
from optpipe.errors import InputError, Issue, shown
from solver.layout.fitting import Job
from solver.layout.strategies import FIELDS, Fixed, check_values

MOST_VALUES = 100
"""Most values of an option that are allowed."""
MOST_TOKENS = 2**24
MOST_SEQUENCES = 10**6

_NAME, _OBJECT = UNION_TAG + "name", UNION_TAG + "object"


def _tag(value: Any) -> str:
    return _NAME if isinstance(value, str) else _OBJECT


_Name = Annotated[str, Field(max_length=100), Tag(_NAME)]
_ModelField = Annotated[_Name | Annotated[dict[str, Any], Tag(_OBJECT)], Discriminator(_tag)]
_MachineField = Annotated[_Name | Annotated[Machine, Tag(_OBJECT)], Discriminator(_tag)]


class PlanRequest(Document):
    """A job to plan. `model` is a name of `optpipe models`, or the object of a `config.json`; `machine` is a name of
    `optpipe machines`, or a document (`optpipe.machine/1`). `fixed`: allowed values by option, one or a list."""

    model: _ModelField
    gpus: StrictInt = Field(ge=1, le=MOST_DEGREE)
    machine: _MachineField
    sequence: StrictInt = Field(ge=1, le=MOST_TOKENS)
    global_batch: StrictInt = Field(ge=1, le=MOST_SEQUENCES)
    software: str = Field(default="", max_length=100)
    fixed: dict[str, Any] = {}

    def job(self) -> Job:
        """The model on the machine. Raises InputError that names the field."""
        config = self._model_config()
        try:
            model = read_model(config, self.model if isinstance(self.model, str) else "")
        except InputError as error:
            issues = [Issue(("model", *issue.loc), issue.code, issue.detail) for issue in error.issues]
            raise InputError(issues) from None
        machine = self._machine()
        software = require_software(self.software, machine.measured_software, "software")
        job = Job(model, machine, self.sequence, self.global_batch, software, self.software)
        if faults := [*job.rules(self.gpus).of_sequence()]:
            raise InputError(faults)
        return job

    def allowed(self) -> Fixed:
        """Allowed values by option, checked. Raises InputError."""
        allowed: dict[str, list[Any]] = {}
        for name, given in self.fixed.items():
            if name not in FIELDS:
                close = get_close_matches(name, FIELDS, 1)
                detail = f"is no option; these are {', '.join(FIELDS)}." + (f" Maybe {close[0]}." if close else "")
                raise InputError([Issue(("fixed", name), "unknown_field", detail)])
            values = given if isinstance(given, list) else [given]
            if not 1 <= len(values) <= MOST_VALUES:
                detail = (
                    f"has {len(values):,} values but must have 1 to {MOST_VALUES}. Maybe leave it out to allow all."
                )
                raise InputError([Issue(("fixed", name), "wrong_length", detail)])
            check_values(name, values, ("fixed", name))
            allowed[name] = values
        return allowed

    def equality_key(self) -> str:
        """Key that only requests with the same plan share, in one version of this program."""
        allowed = {name: sorted(set(values)) for name, values in self.allowed().items()}
        parts = [
            version("optpipe"),
            self._model_config(),
            self._machine().model_dump(),
            self.gpus,
            self.sequence,
            self.global_batch,
            self.software,
            allowed,
        ]
        return "plan " + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _model_config(self) -> Mapping[str, Any]:
        if isinstance(self.model, dict):
            return self.model
        if self.model not in named_models():
            raise _unknown("model", self.model, named_models())
        return named_models()[self.model]

    def _machine(self) -> Machine:
        if isinstance(self.machine, Machine):
            return self.machine
        if (name := known_name(self.machine)) is None:
            raise _unknown("machine", self.machine, named_machines())
        return named_machines()[name]


def _unknown(field: str, name: str, known: Mapping[str, object]) -> InputError:
    close = get_close_matches(name.lower(), known, 1, 0.4)
    maybe = repr(close[0]) if close else f"see GET /v1/{field}s"
    return InputError(
        [Issue(field, f"unknown_{field}", f"is {shown(name)}, which is no known {field}. Maybe {maybe}.")]
    )
