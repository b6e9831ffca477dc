"""The page as it is served: its headers, its files, and nothing inside the document that runs or styles by itself."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.web import PAGE_HEADERS, is_page_path, mount_page
from api.web.terms import TERMS
from optpipe.kinds import KIND
from optpipe.plot.style import BUDGET
from tests.docs.blocks import ROOT

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
    ("path", "expected"),
    [("/", True), ("/static/x/js/main.js", True), ("/docs/", True), ("/v1/schedules", False), ("/staticx", False)],
)
def test_what_needs_no_key(path: str, expected: bool) -> None:
    assert is_page_path(path) is expected


def test_the_documentation_is_served_where_it_was_built(tmp_path: Path) -> None:
    script = 'document.body.dataset.theme = "auto"'
    (tmp_path / "index.html").write_text(f"<script>{script}</script>")
    mount_page(app := FastAPI(docs_url=None), tmp_path)
    with TestClient(app) as client:
        answer = client.get("/docs/")
        digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'self' 'sha256-{digest}';" in answer.headers["content-security-policy"]
        assert client.get("/docs/none.html").status_code == 404
        assert client.get("/docs/%2e%2e/secret").status_code == 404
        assert 'href="/docs/concepts/offload.html"' in client.get("/").text
    mount_page(app := FastAPI(docs_url=None), tmp_path / "none")
    with TestClient(app) as client:
        assert client.get("/docs/").status_code == 404
        assert 'href="/docs/' not in client.get("/").text


def test_terms_lead_to_pages_and_headings_that_are_there() -> None:
    for term in TERMS.values():
        page, _, anchor = term.page.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page.replace(".html", ".md")).read_text(), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, term
