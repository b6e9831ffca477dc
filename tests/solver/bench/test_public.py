"""What is public of an instance: the best exact value, or what follows from a printed bubble."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optpipe.errors import InputError
from solver.bench.public import Public, load_public
from tests.problems import INSTANCES, REFERENCE
from tests.solver.bench.suites import figures


def loaded(tmp_path: Path, data: Any) -> dict[str, Public]:
    path = tmp_path / "reference.json"
    path.write_text(json.dumps(data))
    return load_public(path)


def test_the_best_exact_value_counts(tmp_path: Path) -> None:
    entry = {"best_public": {"value_us": 90, "scheduler": "best"}, "zb_v_us": 80, "zero_bubble_heuristic_us": 85}
    assert loaded(tmp_path, {"a": entry}) == {"a": Public(80, "ZB-V")}


def test_a_printed_bubble_is_read_as_the_most_that_it_can_mean(tmp_path: Path) -> None:
    public = loaded(tmp_path, {"a": {"public_bubble": {"v-half": 0.2}, "work_us": 800}})["a"]
    assert public.scheduler == "v-half"
    assert public.value_us == pytest.approx(800 / 0.79995)


def test_nothing_known(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"a": {"best_public": None, "work_us": 8}}) == {}


def test_the_reference_of_the_project() -> None:
    public = load_public(INSTANCES / "reference.json")
    assert {name for name, entry in REFERENCE.items() if entry.get("best_public")} <= set(public)
    assert public["zb-1.5b-p8-m24-mem1"].value_us == 1310405


def test_a_wrong_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"best_public\.value_us is missing"):
        loaded(tmp_path, {"a": {"best_public": {"scheduler": "best"}}})
    with pytest.raises(InputError, match="must be an object"):
        loaded(tmp_path, [])


def test_bubble_of_the_public_schedule() -> None:
    """The work of a device is 90, so that a value of 120 has a bubble of a quarter."""
    assert Public(120, "someone's").bubble(figures()) == pytest.approx(0.25)
