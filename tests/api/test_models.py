"""Reading of request bodies: bounded work for bodies with any number of faults."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from api.errors import HttpError
from api.models import MOST_FAULTS, SubmissionBody, read_document
from optpipe.document import Document, parse_json
from optpipe.schedule import Schedule
from solver.solve import solve
from tests.api.harness import PROBLEM, body


def faults_of(model: type[Document], data: Any) -> list[tuple[str, str]]:
    with pytest.raises(HttpError) as refused:
        read_document(model, json.dumps(data).encode())
    assert refused.value.status == 422
    return [(fault.pointer, fault.code) for fault in refused.value.faults]


def test_a_list_is_checked_up_to_its_first_wrong_item_in_a_large_body() -> None:
    data = {"devices": [{"compute": []}] * 60_000}
    text = json.dumps(data).encode()
    began = time.thread_time()
    parse_json(text)
    parsed = time.thread_time()
    faults = faults_of(Schedule, data)
    took_s = time.thread_time() - parsed
    assert any(pointer.startswith("/devices/0/") and code == "missing" for pointer, code in faults)
    assert not any(pointer.startswith("/devices/1") for pointer, _ in faults)
    assert took_s < 3 * (parsed - began) + 0.5  # 240,000 faults take several times as long


def test_the_first_faults_are_listed_and_the_others_counted() -> None:
    data = body()
    data["problem"]["stages"] = [{**data["problem"]["stages"][0], "forward_us": -1}] * 100
    faults = faults_of(SubmissionBody, data)
    assert len(faults) == MOST_FAULTS + 1
    assert faults[0][0] == "/problem/stages/0/forward_us"
    assert faults[-1] == ("", "more")


def test_large_bodies_are_read_like_small_ones() -> None:
    schedule = solve(PROBLEM, "1f1b")
    text = schedule.to_json().encode()
    assert read_document(Schedule, text + b" " * 2**17) == read_document(Schedule, text) == schedule
