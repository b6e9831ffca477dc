"""The page of document formats names every field, and none that is not there; its examples are read."""

from __future__ import annotations

import json
import re

import pytest

from instances import uniform
from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import load_model
from optpipe.cluster.software import MEGATRON
from optpipe.document import Document
from optpipe.layers import Layer, LayerProfile
from optpipe.problem import Device, Problem
from optpipe.schedule import DevicePlan, Schedule, ScheduledOp
from optpipe.spread import SpreadPass
from optpipe.stage import ActivationMode, Stage
from solver.layout.cluster_plan import plan_cluster
from solver.layout.fitting import Job
from solver.limits import Limits
from tests.docs.blocks import ROOT, blocks_of

PAGE = ROOT / "docs" / "reference" / "documents.md"
DOCUMENTS: dict[str, tuple[type[Document], dict[str, type[Document]]]] = {
    "Problem": (Problem, {"devices": Device, "stages": Stage}),
    "Activation modes": (ActivationMode, {}),
    "Spread passes": (SpreadPass, {}),
    "Schedule": (Schedule, {"devices": DevicePlan}),
    "Layers": (LayerProfile, {"layers": Layer}),
}


def fields_of(title: str) -> list[str]:
    """The fields that the section names."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section
    rows = re.findall(r"^\| (`[^|]*`) \|", section[1], re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("title", DOCUMENTS)
def test_every_field_is_told_and_no_other(title: str) -> None:
    whole, lists = DOCUMENTS[title]
    told = fields_of(title)
    fields = [name for name in whole.model_fields if name not in lists]
    fields += [f"{part}[].{name}" for part, of in lists.items() for name in of.model_fields]
    assert sorted(told) == sorted(fields)


def test_every_field_of_a_plan() -> None:
    job = Job(load_model("llama-3.1-8b"), named_machines()["h100"], 4096, 32, MEGATRON)
    plan = plan_cluster(job, 8, {"pp": [2], "tp": [2]}, Limits(0.1)).document()
    fields = set(plan) | {f"strategies[].{name}" for one in plan["strategies"] for name in one}
    searched = {"strategies[].solved"}
    assert sorted(fields_of("Plan")) == sorted(fields | searched)


def test_the_examples_are_read() -> None:
    problem, modes, spread, op = (json.loads(block.text) for block in blocks_of(PAGE) if block.language == "json")
    assert Problem.from_data(problem).microbatches == 4
    stage = Stage.from_data(problem["stages"][0] | {"modes": modes})
    assert [mode.recomputed_bytes for mode in stage.choices] == [0, 0, 40, 90, 90]
    assert Problem.from_data(uniform(4, 8).to_data() | spread).pass_names == ("S", "T")
    assert str(ScheduledOp.from_data(op).key) == "F0.2"
