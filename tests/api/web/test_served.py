"""The page as it is served: its headers, its files, and nothing inside the document that runs or styles by itself."""

from __future__ import annotations

import re

import httpx
import pytest

from api.web import PAGE_HEADERS, is_page_path
from optpipe.kinds import KIND
from optpipe.plot.style import BUDGET

MARKUP_THAT_ACTS = re.compile(r"<style|\son\w+\s*=|\sstyle\s*=|javascript:|<script(?![^>]*\ssrc=)", re.IGNORECASE)


@pytest.fixture(scope="module")
def document(service_url: str) -> httpx.Response:
    return httpx.get(service_url)


def test_the_page_needs_no_key_and_carries_its_policy(document: httpx.Response) -> None:
    assert document.status_code == 200
    assert {name: document.headers[name] for name in PAGE_HEADERS} == dict(PAGE_HEADERS)
    assert document.headers["cache-control"] == "no-cache"


def test_nothing_in_the_document_acts_by_itself(document: httpx.Response) -> None:
    assert not MARKUP_THAT_ACTS.search(document.text)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", document.text)


def test_every_file_of_the_document_is_there_and_kept(service_url: str, document: httpx.Response) -> None:
    paths = sorted(set(re.findall(r"(?:src|href)=\"(/static/[^\"]+)\"", document.text)))
    assert any(path.endswith("/js/main.js") for path in paths)
    with httpx.Client(base_url=service_url) as client:
        answers = {path: client.get(path) for path in paths}
    for path, answer in answers.items():
        assert answer.status_code == 200, path
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_colours_are_those_of_the_pictures(service_url: str, document: httpx.Response) -> None:
    found = re.search(r"\"(/static/[^\"]+/palette\.css)\"", document.text)
    assert found
    palette = httpx.get(service_url + found[1]).text
    for kind, look in KIND.items():
        assert f"--plot-op-{kind.lower()}: {look.colour};" in palette
    assert f"--plot-budget: {BUDGET};" in palette


@pytest.mark.parametrize("path", ["/static/", "/static/0/js/main.js", "/static/../page.py", "/static/%2e%2e/page.py"])
def test_other_paths_are_problems(service_url: str, path: str) -> None:
    answer = httpx.get(service_url + path)
    assert (answer.status_code, answer.headers["content-type"]) in {
        (404, "application/problem+json"),
        (401, "application/problem+json"),
    }


@pytest.mark.parametrize(
    ("path", "expected"), [("/", True), ("/static/x/js/main.js", True), ("/v1/schedules", False), ("/staticx", False)]
)
def test_what_needs_no_key(path: str, expected: bool) -> None:
    assert is_page_path(path) is expected
