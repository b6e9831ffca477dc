"""CITATION.cff: what its format asks for, and what it says as everything else says it."""

from __future__ import annotations

import tomllib

import yaml

from tests.release.conftest import ROOT


def test_the_citation_is_complete_and_agrees_with_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["message"]
    assert citation["title"].lower() == project["name"]
    assert citation["keywords"] == project["keywords"]
    assert all(author.get("name") or author.get("family-names") for author in citation["authors"])
    allowed = {"cff-version", "message", "type", "title", "abstract", "authors", "keywords", "doi", "url"}
    assert set(citation) <= allowed, "a version or a date in it would have to be changed with each release"
