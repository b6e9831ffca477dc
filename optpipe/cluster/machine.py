"""Machines: facts of data sheets, and the efficiencies that measured training steps have on them.

A file (`optpipe.machine/1`, TOML) keeps the two apart. `[facts]` are printed by somebody, and `sources` says by whom.
Each `[[efficiencies]]` was fitted to measured steps by `optpipe calibrate`: it says for which precision and software,
on how many rows, and how far predictions then were.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from optpipe.cluster.strategy import Precision
from optpipe.document import Document, read_toml
from optpipe.document_kinds import MACHINE
from optpipe.errors import InputError, Issue, shown
from optpipe.fields import Bytes, Count, TimeUs, reject

MAX_FILE_BYTES = 2**17

Rate = Annotated[int | float, Field(gt=0, le=1e20)]
Share = Annotated[int | float, Field(gt=0, le=100)]

SHARES = (
    "products",
    "attention",
    "experts",
    "memory",
    "tensor",
    "expert",
    "context",
    "pipeline",
    "data",
    "gather",
    "optimizer",
)
FEATURES = (*SHARES, "launch", "step")
"""Kinds of work in a training step, in the order of all arrays of them."""


class Facts(Document):
    """Figures of a data sheet. Rates are in one direction, of one GPU; `gpus_per_node` is a node or an NVLink domain.

    `operations_bf16_per_s` and so on are dense peaks. `host_shared_by` GPUs share the copies to and from the host.
    """

    gpus_per_node: Count
    memory_bytes: Bytes
    memory_bytes_per_s: Rate
    operations_bf16_per_s: Rate
    operations_fp8_per_s: Rate | None = None
    operations_fp4_per_s: Rate | None = None
    link_bytes_per_s: Rate
    link_latency_us: TimeUs = 5
    network_bytes_per_s: Rate | None = None
    network_latency_us: TimeUs = 10
    host_bytes_per_s: Rate | None = None
    host_shared_by: Count = 1

    def operations_per_s(self, precision: Precision) -> float:
        """Peak of matrix products in a precision, or in the next wider one that the machine has."""
        fp8 = self.operations_fp8_per_s or self.operations_bf16_per_s
        peaks = {"bf16": self.operations_bf16_per_s, "fp8": fp8, "fp4": self.operations_fp4_per_s or fp8}
        return float(peaks[precision])

    @property
    def host_rate(self) -> float:
        """Bytes a second to the host, and as many back, where all that share the copies copy; 0: not known."""
        return (self.host_bytes_per_s or 0) / self.host_shared_by

    def bytes_per_s(self, ranks: int) -> float:
        """Rate of a transfer among `ranks` neighbours: that between nodes where they span several."""
        if ranks <= self.gpus_per_node or self.network_bytes_per_s is None:
            return float(self.link_bytes_per_s)
        return float(self.network_bytes_per_s)


class Efficiencies(Document):
    """Shares of the data sheet's rates that kinds of work reach. Above 1 is what mostly hides behind compute.

    `memory`: norms, activation functions and all else that memory's rate bounds. `tensor`, `expert`, `context`,
    `pipeline` and `data`: communication of each kind of parallelism. `gather`: weights and gradients of a layer that
    are sent for each microbatch, where replicas divide them (FSDP), beyond what compute hides.

    `launch_us`: for a layer and pass; `step_us`: for a step. `software` is empty where it is any. The errors are those
    of the `rows` that it was fitted to: the relative error of half of them is below `median_error`.
    """

    precision: Precision = "bf16"
    software: str = Field(default="", max_length=100)
    products: Share
    attention: Share
    experts: Share
    memory: Share
    tensor: Share
    expert: Share
    context: Share
    pipeline: Share
    data: Share
    gather: Share
    optimizer: Share
    launch_us: TimeUs
    step_us: TimeUs
    rows: Annotated[int, Field(ge=0)] = 0
    median_error: Annotated[int | float, Field(ge=0)] | None = None
    worst_error: Annotated[int | float, Field(ge=0)] | None = None
    unseen_model_error: Annotated[int | float, Field(ge=0)] | None = None
    """Median error of each model's rows when all others are fitted."""
    source: str = Field(default="", max_length=1000)

    @property
    def slowdowns(self) -> NDArray[np.float64]:
        """Inverse shares, and seconds for a launch and a step, in the order of FEATURES."""
        inverse = [1 / getattr(self, name) for name in SHARES]
        return np.array([*inverse, self.launch_us / 1e6, self.step_us / 1e6])

    @classmethod
    def of_slowdowns(cls, slowdowns: NDArray[np.float64], **fields: object) -> Self:
        """The inverse of `slowdowns`, to four digits. None is below 0.01: what costs less is hidden."""
        shares = {name: float(f"{1 / max(0.01, slow):.4g}") for name, slow in zip(SHARES, slowdowns, strict=False)}
        launch_us, step_us = (float(f"{seconds * 1e6:.4g}") for seconds in slowdowns[len(SHARES) :])
        return cls.from_data(shares | {"launch_us": launch_us, "step_us": step_us} | fields)


class Machine(Document):
    """A kind of GPU in the nodes and network around it. `aliases`: its names in measured tables and drivers."""

    format: Literal["optpipe.machine/1"]
    name: str = Field(min_length=1, max_length=100)
    aliases: list[str] = []
    facts: Facts
    sources: dict[str, str] = {}
    efficiencies: Annotated[list[Efficiencies], Field(max_length=1000)] = []

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        keys = [(one.software, one.precision) for one in self.efficiencies]
        if twice := [key for key in keys if keys.count(key) > 1]:
            detail = f"has two entries of software {twice[0][0]!r} and precision {twice[0][1]!r}. Maybe leave one out"
            raise reject("duplicate_efficiencies", detail)
        return self

    @classmethod
    def load(cls, machine: str | Path) -> Self:
        """Read a machine by its name or its TOML file. Raises InputError that names the field, or the nearest name."""
        known = named_machines()
        if (name := known_name(str(machine))) is not None:
            return cls.model_validate(known[name].model_dump())
        path = Path(machine)
        if not path.exists():
            close = get_close_matches(str(machine).lower(), known, 1, 0.4)
            detail = f"is {shown(str(machine))}, which is no known machine and no file. Maybe "
            detail += f"{close[0]!r}." if close else "see `optpipe machines`."
            raise InputError([Issue("--machine", "unknown_machine", detail)])
        return cls.from_data(read_toml(path, MAX_FILE_BYTES, MACHINE), str(path))

    def with_margin(self, share: float) -> Machine:
        """The machine with a share of each GPU's memory kept free."""
        memory_bytes = int(self.facts.memory_bytes * (1 - share))
        return self.model_copy(update={"facts": self.facts.model_copy(update={"memory_bytes": memory_bytes})})

    def to_toml(self) -> str:
        """The machine as TOML, which `load` reads."""
        data = self.model_dump(exclude_none=True, exclude_defaults=True)
        tables = {"facts": data.pop("facts"), "sources": data.pop("sources", {})}
        entries = data.pop("efficiencies", [])
        lines = _assignments(data)
        for name, table in tables.items():
            lines += ["", f"[{name}]", *_assignments(table)] if table else []
        for entry in entries:
            lines += ["", "[[efficiencies]]", *_assignments(entry)]
        return "\n".join(lines) + "\n"

    @property
    def measured_software(self) -> list[str]:
        """Software whose steps the efficiencies are fitted to."""
        return [one.software for one in self.efficiencies]

    def efficiencies_of(self, precision: Precision, software: str = "") -> Efficiencies:
        """The entry of a precision and software, else of the group of software before its last ``/``, else of any
        software, else of 16 bits, else the defaults, which are a guess from other machines."""
        by_key = {(one.software, one.precision): one for one in self.efficiencies}
        parts = software.split("/")
        chain = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
        for name in (*chain, ""):
            if (name, precision) in by_key:
                return by_key[name, precision]
        for name in (*chain, ""):
            if (name, "bf16") in by_key:
                return by_key[name, "bf16"]
        return DEFAULT_EFFICIENCIES


def _assignments(table: Mapping[str, Any]) -> list[str]:
    """Lines of a TOML table of numbers, texts and lists of texts, all of which TOML writes as JSON does."""
    return [f"{name} = {json.dumps(value)}" for name, value in table.items()]


DEFAULT_EFFICIENCIES = Efficiencies(
    products=0.74,
    attention=0.45,
    experts=0.55,
    memory=0.77,
    tensor=0.8,
    expert=0.77,
    context=1.7,
    pipeline=1.0,
    data=2.5,
    gather=1.0,
    optimizer=0.8,
    launch_us=100,
    step_us=30_000,
    source="Guessed from what other machines reach; nothing of this machine was measured.",
)


def known_name(text: str) -> str | None:
    """Name of a machine that comes with the program, by this or an alias of it, in any case; None for others."""
    known = {alias.lower(): one.name for one in named_machines().values() for alias in (one.name, *one.aliases)}
    return known.get(text.lower())


@cache
def named_machines() -> dict[str, Machine]:
    """Machines that come with the program, by name."""
    folder = files("optpipe.cluster") / "machines"
    found = {}
    for file in sorted(folder.iterdir(), key=lambda one: one.name):
        if file.name.endswith(".toml"):
            machine = Machine.from_data(tomllib.loads(file.read_text(encoding="utf-8")), file.name)
            found[machine.name] = machine
    return found
