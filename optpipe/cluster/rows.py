"""Tables of measured training steps (CSV): a row is a model, a machine, a strategy, and what was measured.

A blank cell is not stated. Where a column has a companion that ends in `_derived`, that fills the gap. A few figures
that sources print outside their tables are read from `notes` (`NOTED`).
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import nan
from pathlib import Path
from typing import Any

from optpipe.cluster.machine import known_name
from optpipe.cluster.model import Model, named_models, read_model
from optpipe.cluster.software import software_of
from optpipe.cluster.strategy import Precision, Recompute, Sharding, Strategy, Vocabulary
from optpipe.document import known_kind, parse_json, read_bounded, refuse_kind
from optpipe.document_kinds import MEASURED_STEPS
from optpipe.errors import InputError, Issue, shown

MAX_FILE_BYTES = 2**25
MAX_VALUE = 10**9
NEEDED = ("model", "gpus", "sequence")

NOTED: Mapping[str, re.Pattern[str]] = {
    "vocab_size": re.compile(r"\bvocabulary (?:about )?(\d+)(k?)\b"),
    "num_attention_heads": re.compile(r"\b(\d+)() heads\b"),
}
"""Fields of a configuration in the notes of a row, or of its model."""
ASSUMED_VOCABULARY = 50_304
"""Vocabulary of GPT-2, padded, where nobody says."""
ASSUMED_HEAD_WIDTH = 128
VARIANT = re.compile(r"\b(?:kernels|container|method) ([^;]+)")
"""Words in the notes of a row that tell apart the software of one group."""
WITHOUT_PREDICTION = re.compile(r"\b(w/o|without|no) MTP\b")
OVERLAPPED = re.compile(r"\bep\b")
"""Exchanges of experts among what a row says to be overlapped."""
SPREAD: Mapping[str, Vocabulary] = {
    "vocab-1": "spread-ends",
    "vocab-2": "spread-ends",
    "interlaced": "spread-ends",
    "redistribute": "balanced",
    "redis": "balanced",
}
"""Places of embedding and head by method of Vocabulary Parallelism (2411.05288, section 6)."""

SCHEDULES: Mapping[str, str] = {"zbv": "zb-v", "v-zb": "zb-v", "interleaved": "interleaved-1f1b"}
"""Names of schedules in tables that have another one here."""


@dataclass(frozen=True)
class Row:
    """A measured step, or one that ran out of memory (`seconds` is None)."""

    name: str
    software: str
    """Its group, and what tells apart the software of one."""
    machine: str
    model: Model
    strategy: Strategy
    sequence: int
    global_batch: int
    gpus_per_node: int | None
    seconds: float | None
    allocated_gib: float | None
    """Peak on the fullest rank, as the program allocates it."""
    reserved_gib: float | None
    assumptions: tuple[str, ...]
    cells: Mapping[str, str] = field(hash=False, repr=False)


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be predicted, and why."""

    name: str
    reason: str


class _RefusedError(Exception):
    """Reason why a row is skipped."""


def read_rows(path: Path, models: Path | None = None) -> tuple[list[Row], list[Skipped]]:
    """Read the rows of a table; `models`: configurations by name, in addition to those that come with the program.

    Raises InputError if the file is no such table.
    """
    content = read_bounded(path, MAX_FILE_BYTES)
    text = content.decode("utf-8", "replace")
    table = csv.DictReader(io.StringIO(text, newline=""), restval="")
    missing = [name for name in NEEDED if name not in (table.fieldnames or ())]
    if missing:
        refuse_kind(known_kind(content), [MEASURED_STEPS], str(path))
        found = ", ".join((table.fieldnames or [])[:8])
        detail = f"has no column {missing[0]!r} but {shown(found)}. Maybe its first line is no head."
        raise InputError([Issue("", "missing_column", detail)], str(path))
    known = dict(named_models())
    if models is not None:
        more = parse_json(read_bounded(models, MAX_FILE_BYTES), str(models))
        if not isinstance(more, dict):
            detail = "must be an object of configurations by name."
            raise InputError([Issue("", "wrong_kind", detail)], str(models))
        known |= {name: one for name, one in more.items() if isinstance(one, dict)}
    rows, skipped = [], []
    try:
        for number, cells in enumerate(table, 2):
            name = cells.get("id") or f"line {number}"
            try:
                rows.append(_row(name, cells, known))
            except _RefusedError as reason:
                skipped.append(Skipped(name, str(reason)))
    except csv.Error as error:
        raise InputError([Issue(f"line {table.line_num}", "bad_csv", f"cannot be read: {error}.")], str(path)) from None
    return rows, skipped


def _row(name: str, cells: Mapping[str, str], models: Mapping[str, Mapping[str, Any]]) -> Row:
    reader = _Cells(cells)
    if (task := cells.get("task", "")) not in ("", "pretrain", "sft"):
        raise _RefusedError(f"task {task!r} does not train all parameters")
    model, assumptions = _model(reader, models)
    notes = cells.get("notes", "")
    variant = found[1].strip().lower() if (found := VARIANT.search(notes)) else ""
    gpus, sequence = reader.size("gpus"), reader.size("sequence")
    tensor, context, pipeline = (reader.size(axis, 1) for axis in ("tp", "cp", "pp"))
    expert, expert_tensor = reader.size("ep", 1), reader.size("etp", 1)
    shared = tensor * context * pipeline
    if gpus % shared:
        raise _RefusedError(f"tp x cp x pp = {shared} does not divide {gpus} GPUs")
    data = gpus // shared
    seconds = reader.number("seconds_per_step")
    tokens_per_s = reader.number("tokens_per_s_per_gpu")
    microbatch_size = reader.number("microbatch")
    microbatches = reader.number("microbatches")
    batch = reader.number("global_batch")
    if batch is None and microbatches and microbatch_size:
        batch = microbatches * microbatch_size * data
    if batch is None and seconds and tokens_per_s:
        batch = seconds * tokens_per_s * gpus / sequence
    if batch is None and seconds is None and tokens_per_s is None:  # it did not run: enough to fill the pipeline
        batch = 4 * pipeline * data * (microbatch_size or 1)
        assumptions = (*assumptions, f"global_batch {batch:g}")
    if batch is None:
        raise _RefusedError("global_batch is not stated")
    if microbatch_size is None:
        microbatch_size = batch / data / microbatches if microbatches else 1
    each = round(microbatch_size) * data
    global_batch = round(batch)
    if each < 1 or global_batch % each:
        raise _RefusedError(f"global_batch {global_batch} is no multiple of dp x microbatch = {each}")
    if seconds is None and tokens_per_s:
        seconds = global_batch * sequence / gpus / tokens_per_s
    if seconds is None and 0 < model.positions < sequence:  # one that was measured had as many
        raise _RefusedError(f"sequence {sequence} is longer than the {model.positions} learned positions of the model")
    virtual = max(1, reader.size("vpp", 1))
    if expert > 1 and not any(layer.feed_forward.experts for layer in model.layers):
        expert = expert_tensor = 1
    if gpus % (pipeline * expert * expert_tensor):
        raise _RefusedError(f"pp x ep x etp = {pipeline * expert * expert_tensor} does not divide {gpus} GPUs")
    if pipeline * virtual > model.most_stages:
        raise _RefusedError(f"{len(model.stack)} layers do not fill {pipeline} x {virtual} stages")
    schedule = cells.get("schedule", "").split(" ")[0]
    strategy = Strategy(
        tensor=tensor,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        pipeline=pipeline,
        virtual=virtual,
        data=data,
        microbatch_size=round(microbatch_size),
        precision=_precision(cells.get("precision", "")),
        sharding=_sharding(cells),
        recompute=_recompute(cells.get("recompute", "")),
        overlap="yes" if expert > 1 and OVERLAPPED.search(cells.get("overlap", "")) else "no",
        sequence_parallel=_sequence_parallel(cells),
        vocabulary=SPREAD.get(variant, "last"),
        schedule=SCHEDULES.get(schedule, schedule) or ("1f1b" if virtual == 1 else "interleaved-1f1b"),
    )
    return Row(
        name,
        "/".join(filter(None, (cells.get("group", ""), variant))),
        known_name(cells.get("machine", "")) or cells.get("machine", ""),
        model,
        strategy,
        sequence,
        global_batch,
        int(nodes) if (nodes := reader.number("gpus_per_node")) else None,
        seconds,
        max(
            filter(None, (reader.number(f"peak_alloc_gib_{rank}_rank") for rank in ("max", "first", "last"))),
            default=None,
        ),
        reader.number("peak_reserved_gib"),
        assumptions,
        cells,
    )


def _model(cells: _Cells, models: Mapping[str, Mapping[str, Any]]) -> tuple[Model, tuple[str, ...]]:
    name = cells.cells.get("model", "")
    if name not in models:
        raise _RefusedError(f"model {name!r} is not known")
    config = {key: value for key, value in models[name].items() if value is not None}
    if layers := cells.number("layers"):
        config["num_hidden_layers"] = int(layers)
    notes, assumptions = cells.cells.get("notes", ""), []
    for key, pattern in NOTED.items():
        text = f"{notes}; {config.get('note', '')}"
        if key not in config and (found := pattern.search(text)):
            config[key] = int(found[1]) * (1000 if found[2] else 1)
    if "hidden_size" in config and "vocab_size" not in config:
        config["vocab_size"] = ASSUMED_VOCABULARY
        assumptions.append(f"vocab_size {ASSUMED_VOCABULARY}")
    if "hidden_size" in config and "num_attention_heads" not in config:
        config["num_attention_heads"] = heads = max(1, int(config["hidden_size"]) // ASSUMED_HEAD_WIDTH)
        config["hidden_size"] = int(config["hidden_size"])
        config.setdefault("head_dim", config["hidden_size"] // heads)
        assumptions.append(f"num_attention_heads {heads}")
    if WITHOUT_PREDICTION.search(notes):
        config = {key: value for key, value in config.items() if key not in ("mtp_layers", "num_nextn_predict_layers")}
    try:
        return _read_once(json.dumps(config), name), tuple(assumptions)
    except InputError as error:
        raise _RefusedError(f"model {name!r}: {error.issues[0]}") from None


@lru_cache(1024)
def _read_once(config: str, name: str) -> Model:
    """The model of a configuration: many rows share one."""
    return read_model(json.loads(config), name)


def _sequence_parallel(cells: Mapping[str, str]) -> bool:
    """True if the notes or the software of the row say so."""
    if said := re.search(r"\bsequence parallel (on|off)\b", cells.get("notes", "")):
        return said[1] == "on"
    return software_of(cells.get("group", "")).sequence_parallel


def _precision(text: str) -> Precision:
    """fp16 is as bf16, and so is none; all kinds of eight bits are one, and so are those of four."""
    if text not in ("", "bf16", "fp16") and not re.search("fp[48]", text):
        raise _RefusedError(f"precision is {text!r}, but must be bf16, fp16, or name fp8 or fp4")
    return "fp4" if "fp4" in text else "fp8" if "fp8" in text else "bf16"


def _sharding(cells: Mapping[str, str]) -> Sharding:
    text = cells.get("fsdp", "").lower()
    if text in ("", "0", "1", "no", "shard_grad_op"):
        return "optimizer"
    return "fsdp"


def _recompute(text: str) -> Recompute:
    if text.startswith("full"):
        return "full"
    return "selective" if text == "selective" or "core_attn" in text else "none"


class _Cells:
    """Numbers of a row."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self.cells = cells

    def number(self, name: str) -> float | None:
        """A positive number, from the column or its derived companion; None where neither states one."""
        for key in (name, f"{name}_derived"):
            if not (text := (self.cells.get(key) or "").strip()):
                continue
            try:
                value = float(text)
            except ValueError:
                value = nan
            if not 0 < value < MAX_VALUE:
                raise _RefusedError(f"{key} is {text!r}, but must be a number between 0 and {MAX_VALUE:,}")
            return value
        return None

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.number(name)
        if value is None:
            if default is None:
                raise _RefusedError(f"{name} is not stated")
            return default
        if value != int(value):
            raise _RefusedError(f"{name} is {value:g}, which is no whole number")
        return int(value)
