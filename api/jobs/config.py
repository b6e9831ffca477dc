"""How a job is to be solved: what a caller may ask for, and nothing else."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StrictInt

from optpipe.document import Document, shown
from optpipe.fields import reject
from solver.methods import METHODS


def _method(name: str) -> str:
    if name not in METHODS:
        raise reject("unknown_method", f"is {shown(name)} but must be one of: {', '.join(METHODS)}")
    return name


def _plain(text: str) -> str:
    if not text.isprintable():
        raise reject("not_printable", "holds a control character or half of a surrogate pair")
    return text


Label = Annotated[str, Field(max_length=200), AfterValidator(_plain)]
Tag = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_plain)]


class JobConfig(Document):
    """The method and its limits. Tighter caps of an installation are in `Settings`."""

    method: Annotated[str, AfterValidator(_method)] = "auto"
    time_limit_s: float = Field(default=30.0, ge=0.01, le=1e6, allow_inf_nan=False)
    gap: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    workers: StrictInt = Field(default=1, ge=1, le=1024)
    """Threads of the solve."""
    seed: StrictInt = Field(default=0, ge=0, le=2**31 - 1)
    priority: StrictInt = Field(default=0, ge=-100, le=100)
    """Higher ones are solved first."""
    name: Label = ""
    tags: list[Tag] = Field(default=[], max_length=20)
