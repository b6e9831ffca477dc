"""Every command of the documentation runs as it stands there, or says why it cannot."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from enum import EnumType
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from instances import INSTANCES
from optpipe.cli.app import command_line
from tests.docs import changes
from tests.docs.blocks import COMMANDS, OTHERS, ROOT, Block, blocks_of, pages, spans_of
from tests.docs.changes import LAST, chosen_pages, is_concerned, name_of
from tests.docs.session import PATIENCE_S, PROLOGUE, check_output, run_page
from tests.forked import forking

ELSEWHERE = {"docs/service.md": "tests/test_service_guide.py"}
"""Pages whose commands another test runs."""

INSTANCE_NAMES = {path.stem for path in INSTANCES.rglob("*.json")}
"""Those of suites too."""


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_block_has_a_known_language(page: Path) -> None:
    for block in blocks_of(page):
        known = block.language in COMMANDS + OTHERS or block.is_directive
        assert known, f"line {block.line}: {block.language!r} is none of {COMMANDS + OTHERS}"
        if block.mark == "not run":
            assert len(block.says.split()) > 2, f"line {block.line}: why is it not run?"


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_command_within_a_sentence_is_a_name(page: Path) -> None:
    """It names what there is; with a value or a file of its own it stands in a block, where it is run."""
    for line, text in spans_of(page):
        _, program, rest = text.partition("optpipe ")
        if program and text.startswith(("optpipe ", "python -m", "torchrun ")):
            check_names(f"line {line}: {text!r}", rest.split())


def check_names(place: str, words: list[str]) -> None:
    """Every word is a command, its option or a choice of that, a suite or an instance, or a placeholder in capitals."""
    command = program()
    known: set[str] = {"..."}
    for word in words:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
            known |= INSTANCE_NAMES if word == "bench" else set()
        elif word.startswith("-"):
            options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
            assert word in options or word == "--help", f"{place}: {command.name} has no {word}"
            known |= choices(options[word]) if word in options else set()
        else:
            assert word in known or Path(word).stem.isupper(), f"{place}: {word!r} is for a block, which is run"


@cache
def program() -> Any:
    """All commands."""
    return typer.main.get_command(command_line())


def choices(option: Any) -> set[str]:
    """The values that an option's type or its metavar lists."""
    annotation = option.type_descriptor.annotation
    listed = {
        str(choice.value)
        for one in get_args(annotation) or (annotation,)
        if isinstance(one, EnumType)
        for choice in one
    }
    return listed | set((option.metavar or "").split("|"))


def test_what_is_no_name_is_found() -> None:
    check_names("", ["plan", "FILE.json", "--modes", "...", "-o", "FILE"])
    check_names("", ["bench", "small", "--only", "r-p4-m8-o1-b20"])
    for words, message in (
        (["plan", "--modes", "full"], "'full' is for a block"),
        (["bench", "smallest"], "'smallest' is for a block"),
        (["plan", "--mode"], "plan has no --mode"),
        (["planet"], "'planet' is for a block"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_names("", words)


def test_a_page_runs_sooner_where_a_command_or_an_example_of_it_has_changed() -> None:
    page = ROOT / "docs" / "trace.md"
    for path in ("optpipe/cli/trace.py", "optpipe/cli/console.py"):
        assert is_concerned(page, [path]), path
    for path in ("docs/train.md", "optpipe/cli/bench.py", "examples/demo.py", "solver/solve.py"):
        assert not is_concerned(page, [path]), path


def test_pages_whose_commands_changed_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of what is not committed, of commits that no remote has, and of so many commits that LAST are there."""
    monkeypatch.setattr(changes, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    pages = [tmp_path / f"{name}.md" for name in "abcdefghi"]

    def run(*arguments: str) -> None:
        subprocess.run([*git, *arguments], check=True, capture_output=True)

    def changed(*names: str, text: str) -> None:
        for name in names:
            (tmp_path / f"{name}.md").write_text(f"```sh\n{text}\n```\n")
        run("add", "--all")
        run("commit", "--message", text)

    def last() -> str:
        return "".join(sorted(page.stem for page in changes._last_changes(pages)[0]))

    run("init")
    changed("first", text="0")
    changed(*"abcdefghi", text="1")
    for number, name in enumerate("abcdef"):
        changed(name, text=f"by {number}")
    assert last() == "ef"
    assert len(last()) == LAST
    pages[0].write_text("no commands\n")
    pages[6].write_text("Other prose.\n" + pages[6].read_text())
    assert last() == "af"
    run("checkout", "--", ".")
    changed(*"ghi", text="all of one commit")
    assert last() == "ghi"
    changed(*"abcdef", text="of a branch")
    run("update-ref", "refs/remotes/origin/main", "HEAD~1")
    changed(*"ghi", text="of it, too")
    assert last() == "abcdefghi"
    run("update-ref", "refs/remotes/origin/main", "HEAD")
    assert last() == "ghi"


@pytest.fixture(scope="module")
def commands() -> Iterator[Path]:
    """A folder with what the pages run."""
    with forking() as folder:
        yield folder


@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize("page", chosen_pages(), ids=name_of)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, free_tcp_port: int, commands: Path) -> None:
    if name_of(page) in ELSEWHERE:
        assert page.name in (ROOT / ELSEWHERE[name_of(page)]).read_text()
    else:
        run_page(blocks_of(page), tmp_path, free_tcp_port, commands)


def test_a_command_that_fails_is_found(tmp_path: Path, free_tcp_port: int, commands: Path) -> None:
    blocks = [Block(3, "sh", "true\n"), Block(7, "sh", "ls no-such-file\ntrue\n")]
    with pytest.raises(AssertionError, match=r"line 7 ended with 2:\n.*no-such-file"):
        run_page(blocks, tmp_path, free_tcp_port, commands)


def test_a_forked_command_is_one_of_the_shell(tmp_path: Path, free_tcp_port: int, commands: Path) -> None:
    """Its streams, folder and environment are those of the shell, and so is its exit code."""
    script = "optpipe --version | cat > piped\noptpipe methods --json 2>/dev/null > first\n"
    failing = "cd examples\n: > ../code\noptpipe verify no-such-file.json 2> ../error || echo $? > ../code\n"
    run_page([Block(1, "sh", script), Block(5, "sh", failing)], tmp_path, free_tcp_port, commands)
    assert (tmp_path / "piped").read_text().startswith("optpipe ")
    assert (tmp_path / "first").read_text()[0] in "{["
    assert (tmp_path / "code").read_text() == "2\n"
    assert "no-such-file.json" in (tmp_path / "error").read_text()


def test_searches_and_measurements_are_shortened_and_nothing_else() -> None:
    for asked, run in (
        ("plan 'two words' --time-limit 10 --seed 10", "plan|two words|--time-limit|1|--seed|10|"),
        ("solve a.json --time-limit 0.5", "solve|a.json|--time-limit|0.5|"),
        ("solve a.json --time-limit 3", "solve|a.json|--time-limit|1|"),
        ("solve a.json", "solve|a.json|--time-limit|1|"),
        ("solve a.json --deterministic-limit 20", "solve|a.json|--deterministic-limit|20|"),
        ("compare a.json --time-limit 5", "compare|a.json|--time-limit|1|"),
        ("train --rounds 2 --steps 5", "train|--rounds|1|--steps|5|"),
        ("profile --model tiny -o a.json", "profile|--model|tiny|-o|a.json|--rounds|1|"),
        ("profile --rounds 3 --model tiny", "profile|--rounds|1|--model|tiny|"),
        ("profile --model tiny --machine h100", "profile|--model|tiny|--machine|h100|"),
        ("profile --from-table a.toml", "profile|--from-table|a.toml|"),
    ):
        script = f"{PROLOGUE}command() {{ shift; printf '%s|' \"$@\"; }}\noptpipe {asked}"
        assert subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout == run


def test_output_that_is_no_longer_printed_is_found() -> None:
    shown = Block(1, "text", "value 29.00 ms\nwrote schedule.json\n", "output")
    check_output(shown, "solving\nvalue  31.5 s\nwrote schedule.json")
    with pytest.raises(AssertionError, match=r"'wrote schedule\.json' is shown"):
        check_output(shown, "wrote schedule.json\nvalue 29.00 ms")
    with pytest.raises(AssertionError, match=r"'value 29\.00 ms' is shown"):
        check_output(Block(1, "text", shown.text, "output", "exact"), "value 31.50 ms\nwrote schedule.json")
