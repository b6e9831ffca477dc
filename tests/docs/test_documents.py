"""The page of document formats names every field, and none that is not there; its examples are read."""

from __future__ import annotations

import json
import re

import pytest

from optpipe.document import Document
from optpipe.layers import Layer, LayerProfile
from optpipe.problem import Device, Problem
from optpipe.schedule import DevicePlan, Schedule, ScheduledOp
from optpipe.stage import ActivationMode, Stage
from tests.docs.blocks import ROOT, blocks_of

PAGE = ROOT / "docs" / "reference" / "documents.md"
DOCUMENTS: dict[str, tuple[type[Document], dict[str, type[Document]]]] = {
    "Problem": (Problem, {"devices": Device, "stages": Stage}),
    "Activation modes": (ActivationMode, {}),
    "Schedule": (Schedule, {"devices": DevicePlan}),
    "Layers": (LayerProfile, {"layers": Layer}),
}


@pytest.mark.parametrize("title", DOCUMENTS)
def test_every_field_is_told_and_no_other(title: str) -> None:
    whole, lists = DOCUMENTS[title]
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section
    rows = re.findall(r"^\| (`[^|]*`) \|", section[1], re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    fields = [name for name in whole.model_fields if name not in lists]
    fields += [f"{part}[].{name}" for part, of in lists.items() for name in of.model_fields]
    assert sorted(told) == sorted(fields)


def test_the_examples_are_read() -> None:
    problem, modes, op = (json.loads(block.text) for block in blocks_of(PAGE) if block.language == "json")
    assert Problem.from_data(problem).microbatches == 4
    stage = Stage.from_data(problem["stages"][0] | {"modes": modes})
    assert [mode.recomputed_bytes for mode in stage.choices] == [0, 0, 40, 90, 90]
    assert str(ScheduledOp.from_data(op).key) == "F0.2"
