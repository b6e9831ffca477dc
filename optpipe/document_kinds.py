"""Kinds of files that people hand in, recognised by their content: errors say what a file is and what it is for.

Every reader of documents refuses other kinds through `kind_of_data` (parsed JSON) and `kind_of_text` (all else).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class DocumentKind(NamedTuple):
    """A kind of file: what it is, as a noun phrase, and the likely next step of who has one."""

    name: str
    maybe: str


FORMATS = {
    "problem": DocumentKind("a problem", "Maybe run 'optpipe solve' or 'compare' on it."),
    "schedule": DocumentKind(
        "a schedule", "Maybe use 'optpipe verify', 'compare' or 'plot', or run it with 'optpipe train --schedule'."
    ),
    "layers": DocumentKind("a layer profile", "Maybe run 'optpipe plan' on it, with --devices."),
    "trace": DocumentKind("a measured step", "Maybe use 'optpipe trace', or give the schedule that it ran."),
    "record": DocumentKind("the record of one rank", "Maybe give its folder to 'optpipe trace'."),
    "plan": DocumentKind("a plan", "Maybe write launch files of its folder with 'optpipe export'."),
    "suite": DocumentKind("a suite", "Maybe use 'optpipe bench'."),
}
"""The program's own documents, by the name in their `format` (``optpipe.problem/1``)."""

TRANSFORMERS_CONFIG = DocumentKind(
    "the config.json of a transformers model",
    "Maybe give it to 'optpipe plan' with --gpus, write its sizes into a table for 'optpipe profile --from-table' "
    "(docs/profile.md), or measure the model with 'optpipe profile --model hf:FOLDER'.",
)
CHROME_TRACE = DocumentKind(
    "a Chrome trace, such as a profile of torch.profiler",
    "Maybe give the profiles of all ranks to 'optpipe trace'.",
)
GZIP = DocumentKind(
    "a file packed by gzip", "Maybe unpack it; 'optpipe trace' reads packed profiles of torch.profiler as they are."
)
TORCH_CSV = DocumentKind(
    "a schedule CSV of torch",
    "Maybe use 'optpipe verify', 'compare' or 'plot', or write a document with 'optpipe export --to schedule' or "
    "'--to problem'.",
)
MEGATRON_LAYOUT = DocumentKind(
    "a layout string of Megatron-LM", "Maybe give a layer profile, and this with 'optpipe plan --layout'."
)
MACHINE = DocumentKind(
    "a machine (optpipe.machine/1, TOML)", "Maybe use 'optpipe machines' or name it with '--machine'."
)
MEASURED_STEPS = DocumentKind("a table of measured steps (CSV)", "Maybe use 'optpipe calibrate'.")
SIZE_TABLE = DocumentKind("a table of sizes (TOML)", "Maybe use 'optpipe profile --from-table'.")
TRAINING_SETTINGS = DocumentKind("a file of training settings (TOML)", "Maybe use 'optpipe train --config'.")
SERVICE_SETTINGS = DocumentKind("a file of the service's settings (TOML)", "Maybe name it in OPTPIPE_CONFIG_FILE.")

_LAYER_COUNTS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}
_WIDTHS = {"hidden_size", "n_embd", "d_model", "dim", "model_type", "architectures"}

TORCH_ACTION = re.compile(
    r"(?P<stage>\d{1,6})(?P<letter>[FIBW])(?P<microbatch>\d{1,6})"
    r"|\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*|\d+(SEND|RECV)_[FB]\d+|\((?P<halves>[^()]*)\)OVERLAP_F_B",
    re.ASCII,
)
"""A cell of torch's CSV, as `_Action` of torch.distributed.pipelining prints it."""

MEGATRON_LAYOUT_TEXT = re.compile(r"(?=[^|]*E)[EtmL|,()*\d\s]+", re.ASCII)
"""Form of a Megatron-LM layout: embedding E, layers t, MTP m and loss L, stages divided by ``|``."""

_HEAD_BYTES = 4096

_GZIP_HEAD = "\x1f\ufffd"
"""First bytes of a packed file as UTF-8 with replacements, which is also how a browser reads it as text."""


def kind_of_data(data: Any) -> DocumentKind | None:
    """The kind of a JSON value, None where it is unknown."""
    if isinstance(data, list):
        is_trace = bool(data) and all(isinstance(event, dict) and {"ph", "name"} <= event.keys() for event in data[:8])
        return CHROME_TRACE if is_trace else None
    if not isinstance(data, dict):
        return None
    own, _, name = str(data.get("format", "")).partition("/")[0].partition(".")
    if own == "optpipe":
        return FORMATS.get(name)
    if "traceEvents" in data:
        return CHROME_TRACE
    inner = data.get("text_config")  # vision-language models have the language model's sizes there
    if _is_config(data) or (isinstance(inner, dict) and ("model_type" in data or _is_config(inner))):
        return TRANSFORMERS_CONFIG
    return None


def _is_config(data: dict[str, Any]) -> bool:
    return bool(_LAYER_COUNTS & data.keys() and _WIDTHS & data.keys()) or {"model_type", "architectures"} <= data.keys()


def kind_of_text(content: bytes) -> DocumentKind | None:
    """The kind of a file that is no JSON, by its first bytes; None where it is unknown."""
    text = content[:_HEAD_BYTES].decode("utf-8", "replace")
    if text.startswith(_GZIP_HEAD):
        return GZIP
    head = text.strip()
    if MEGATRON_LAYOUT_TEXT.fullmatch(head):
        return MEGATRON_LAYOUT
    cells = [cell.strip().strip('"') for line in head.splitlines()[:1] for cell in line.split(",")]
    if any(TORCH_ACTION.fullmatch(cell) for cell in cells[:64]):
        return TORCH_CSV
    if re.search(r"^\[(model|machine|parallel)\]\s*(#.*)?$", head, re.MULTILINE):
        return SIZE_TABLE
    return None
