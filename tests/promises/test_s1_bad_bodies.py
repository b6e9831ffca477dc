"""S1: whatever bytes are posted, the answer is a 4xx problem document, at once."""

from __future__ import annotations

import gzip
import json
from itertools import product
from typing import Any

import pytest
from httpx import Client
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.api.harness import PROBLEM, body
from tests.sample import FULL, SEED, examples

ROUTES = ("/v1/schedules", "/v1/plans", "/v1/analyze", "/v1/compare", "/v1/recognize")
FITTING = "/v1/schedules"
AT_ONCE_S = 5.0
"""Time limit of an answer on a busy machine; without care some of these bodies take minutes."""

GOOD = json.dumps(body())
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "blank": b"  \n",
    "NaN": GOOD.replace('"forward_us": 10', '"forward_us": NaN').encode(),
    "Infinity": GOOD.replace('"forward_us": 10', '"forward_us": -Infinity').encode(),
    "1e400": GOOD.replace('"forward_us": 10', '"forward_us": 1e400').encode(),
    "lone surrogate": GOOD.replace("two devices", "\\ud800").encode(),
    "lone surrogate as a key": b'{"\\udfff": 1}',
    "bad UTF-8": GOOD.replace("two devices", "\xff").encode("latin-1"),
    "UTF-16": GOOD.encode("utf-16"),
    "100k brackets": b"[" * 100_000,
    "100k objects": b'{"a":' * 100_000,
    "10k digits": GOOD.replace('"forward_us": 10', '"forward_us": 1' + "0" * 10_000).encode(),
    "10k digits after a point": GOOD.replace('"forward_us": 10', '"forward_us": 0.' + "1" * 10_000).encode(),
    "duplicate key": b'{"problem": {}, ' + GOOD[1:].encode(),
    "duplicate key below": GOOD.replace('"microbatches": 4', '"microbatches": 4, "microbatches": 4').encode(),
    "cut off": GOOD[:-5].encode(),
    "more after it": (GOOD + "{}").encode(),
    "a list": b"[]",
    "a string": b'"problem"',
    "null": b"null",
    "a wrong type": GOOD.replace('"microbatches": 4', '"microbatches": "4"').encode(),
    "true for a number": GOOD.replace('"microbatches": 4', '"microbatches": true').encode(),
    "10k unknown fields": json.dumps({f"field{k}": 0 for k in range(10_000)}).encode(),
    "100k wrong stages": json.dumps({"problem": {**PROBLEM.to_data(), "stages": [0] * 100_000}}).encode(),
    "a number of microbatches": GOOD.replace('"microbatches": 4', '"microbatches": 1e9').encode(),
}


def check_refused(client: Client, route: str, content: bytes) -> dict[str, Any]:
    """The problem document that the body is answered with."""
    headers = {"Content-Type": "application/json"}
    answer = client.post(route, content=content, headers=headers, timeout=AT_ONCE_S)
    assert 400 <= answer.status_code < 500
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == answer.status_code
    assert problem["errors"]
    return problem


SENT = [
    (name, route)
    for (k, name), (r, route) in product(enumerate(BODIES), enumerate(ROUTES))
    if FULL or route == FITTING or (k + r + SEED) % len(ROUTES) == 0
]
"""Bodies and where they are sent: each to the route that would take it but for its fault, and to one that is drawn."""


@pytest.mark.parametrize(("name", "route"), SENT)
def test_bad_bodies(client: Client, name: str, route: str) -> None:
    check_refused(client, route, BODIES[name])


@pytest.mark.parametrize(
    ("change", "pointer", "code"),
    [
        ({"problem": {**PROBLEM.to_data(), "microbatches": -1}}, "/problem/microbatches", "out_of_range"),
        ({"config": {"method": "best"}}, "/config/method", "unknown_method"),
        ({"config": {"metod": "auto"}}, "/config/metod", "unknown_field"),
        ({"a/b~c": 1}, "/a~1b~0c", "unknown_field"),
        ({"config": {"a.b[0]": 1}}, "/config/a.b[0]", "unknown_field"),
        ({"config": {"": 1}}, "/config/", "unknown_field"),
    ],
)
def test_faults_have_their_place(client: Client, change: dict[str, Any], pointer: str, code: str) -> None:
    problem = check_refused(client, "/v1/schedules", json.dumps(body() | change).encode())
    assert [(fault["pointer"], fault["code"]) for fault in problem["errors"]] == [(pointer, code)]


def test_a_misspelt_field_is_told_with_its_neighbour(client: Client) -> None:
    problem = check_refused(client, "/v1/schedules", json.dumps({"problem": {}, "confg": {}}).encode())
    assert any(fault["detail"].endswith("Maybe you meant config.") for fault in problem["errors"])


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_other_media_types(client: Client, media_type: str) -> None:
    answer = client.post("/v1/schedules", content=GOOD.encode(), headers={"Content-Type": media_type})
    assert answer.status_code == 415
    assert answer.json()["errors"][0]["code"] == "not_json"


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "zstd", "gzip, identity"])
def test_compressed_bodies(client: Client, coding: str) -> None:
    for content in (gzip.compress(GOOD.encode()), GOOD.encode()):
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        answer = client.post("/v1/schedules", content=content, headers=headers)
        assert (answer.status_code, answer.headers["Accept-Encoding"]) == (415, "identity")
        assert answer.json()["errors"][0]["code"] == "encoded"


@pytest.mark.parametrize("coding", ["identity", "Identity", ""])
def test_bodies_said_to_be_plain(client: Client, coding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    assert client.post("/v1/schedules?operation=validate", content=GOOD.encode(), headers=headers).status_code == 200


@hypothesis_settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.text(alphabet='{}[]",:\\u0d9tfn-+.eE ', max_size=60).map(str.encode))
def test_any_bytes(client: Client, content: bytes) -> None:
    check_refused(client, "/v1/schedules", content)
