"""Every command of the documentation runs as it stands there, or says why it cannot."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import COMMANDS, OTHERS, ROOT, Block, blocks_of, pages
from tests.docs.session import PATIENCE_S, PROLOGUE, check_output, forking, run_page

ELSEWHERE = {"docs/service.md": "tests/test_service_guide.py"}
"""Pages whose commands another test runs."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_every_block_has_a_known_language(page: Path) -> None:
    for block in blocks_of(page):
        known = block.language in COMMANDS + OTHERS or block.is_directive
        assert known, f"line {block.line}: {block.language!r} is none of {COMMANDS + OTHERS}"
        if block.mark == "not run":
            assert len(block.says.split()) > 2, f"line {block.line}: why is it not run?"


@pytest.fixture(scope="module")
def server() -> Iterator[Path]:
    """Runs the pages' `optpipe` commands."""
    with forking() as path:
        yield path


@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize("page", pages(), ids=_name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, free_tcp_port: int, server: Path) -> None:
    if _name(page) in ELSEWHERE:
        assert page.name in (ROOT / ELSEWHERE[_name(page)]).read_text()
    else:
        run_page(blocks_of(page), tmp_path, free_tcp_port, server)


def test_a_command_that_fails_is_found(tmp_path: Path, free_tcp_port: int) -> None:
    with pytest.raises(AssertionError, match=r"line 7 ended with 2:\n.*no-such-file"):
        run_page([Block(3, "sh", "true\n"), Block(7, "sh", "ls no-such-file\ntrue\n")], tmp_path, free_tcp_port)


def test_a_forked_command_is_one_of_the_shell(tmp_path: Path, free_tcp_port: int, server: Path) -> None:
    """Its streams, folder and environment are those of the shell, and so is its exit code."""
    script = "optpipe --version | cat > piped\noptpipe methods --json 2>/dev/null > first\n"
    failing = "cd examples\n: > ../code\noptpipe verify no-such-file.json 2> ../error || echo $? > ../code\n"
    run_page([Block(1, "sh", script), Block(5, "sh", failing)], tmp_path, free_tcp_port, server)
    assert (tmp_path / "piped").read_text().startswith("optpipe ")
    assert (tmp_path / "first").read_text()[0] in "{["
    assert (tmp_path / "code").read_text() == "2\n"
    assert "no-such-file.json" in (tmp_path / "error").read_text()


def test_searches_are_shortened_and_nothing_else() -> None:
    for asked, run in (
        ("plan 'two words' --time-limit 10 --seed 10", "plan|two words|--time-limit|4|--seed|10|"),
        ("solve a.json --time-limit 3", "solve|a.json|--time-limit|3|"),
        ("solve a.json", "solve|a.json|--time-limit|4|"),
        ("solve a.json --deterministic-limit 20", "solve|a.json|--deterministic-limit|20|"),
        ("compare a.json --time-limit 5", "compare|a.json|--time-limit|1|"),
        ("train --steps 5", "train|--steps|5|"),
    ):
        script = f"{PROLOGUE}command() {{ shift; printf '%s|' \"$@\"; }}\noptpipe {asked}"
        assert subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout == run


def test_output_that_is_no_longer_printed_is_found() -> None:
    shown = Block(1, "text", "value 29,000 us\nwrote schedule.json\n", "output")
    check_output(shown, "solving\nvalue  31,500.5 us\nwrote schedule.json")
    with pytest.raises(AssertionError, match=r"'wrote schedule\.json' is shown"):
        check_output(shown, "wrote schedule.json\nvalue 29,000 us")
    with pytest.raises(AssertionError, match="'value 29,000 us' is shown"):
        check_output(Block(1, "text", shown.text, "output", "exact"), "value 31,500 us\nwrote schedule.json")
