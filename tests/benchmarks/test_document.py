"""The benchmarks' pages keep what is not measured anew, and show each section with its picture."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import document
from benchmarks.section import Section, Size


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of two sections; one draws a picture, and both number their measurements."""
    counts = {"one": 0, "two": 0}

    def section(name: str) -> Section:
        def measure(size: Size, pictures: Path) -> str:
            counts[name] += 1
            if name == "one":
                (pictures / "one.png").write_bytes(b"")
            return f"{name} measured {counts[name]} times, {size}"

        return Section(name, name.title(), "What it shows.", "command", measure)

    sections = {name: section(name) for name in counts}
    module = ModuleType("measured")
    module.__dict__["SECTIONS"] = tuple(sections.values())
    monkeypatch.setattr(document, "SECTIONS", sections)
    monkeypatch.setattr(document, "PAGES", (document.Page("page", "The page", (module,)),))
    monkeypatch.setattr(document, "FOLDERS", {"quick": tmp_path})
    return tmp_path / "benchmarks" / "page.md"


def test_sections_have_their_order_and_none_is_there_that_was_not_measured(path: Path) -> None:
    document.main(["two"])
    assert "## One" not in path.read_text()
    document.main(["one"])
    text = path.read_text()
    assert text.index("## One") < text.index("## Two")
    assert "| [The page](benchmarks/page.md) | One; Two |" in (path.parents[1] / "benchmarks.md").read_text()


def test_only_what_is_named_is_measured(path: Path) -> None:
    document.main(["all"])
    document.main(["two"])
    text = path.read_text()
    assert "one measured 1 times, quick" in text
    assert "two measured 2 times, quick" in text
    assert "two measured 1" not in text
    assert "![One](../pictures/benchmarks/one.png)" in text
    assert "![Two]" not in text
    before = text
    document.main([])
    assert path.read_text() == before


def test_other_names_are_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        document.main(["three"])
    assert "no sections: three. Maybe one of one, two." in capsys.readouterr().err
    assert not path.exists()
