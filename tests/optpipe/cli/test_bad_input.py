"""Bad input ends with exit code 2 and one clear message, never with a traceback, and loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from typer.models import OptionInfo

from optpipe.cli.app import COMMANDS, GROUPS, _at
from tests.optpipe.cli.conftest import Cli

Edit = Callable[[dict[str, Any]], Any]


def refused(cli: Cli, *arguments: object) -> str:
    """The only message of a run that must be refused, the same in text and JSON."""
    run = cli(*arguments)
    assert run.code == 2
    assert run.out == ""
    assert "Traceback" not in run.err
    lines = run.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].count("Maybe ") <= 1
    as_json = cli(*arguments, "--json")
    assert as_json.code == 2
    assert lines[0] == "error: " + as_json.document["error"]["message"]
    return lines[0]


def numeric_options() -> list[tuple[str, str, OptionInfo]]:
    """Command, option and its declaration of each number that a command takes; those of `train` are its settings'."""
    commands = {name: _at(home) for name, home in COMMANDS.items() if name != "train"}
    for group, home in GROUPS.items():
        for one in _at(home).registered_commands:
            commands[f"{group} {one.name or one.callback.__name__}"] = one.callback
    found = []
    for command, function in commands.items():
        for name, hint in get_type_hints(function, include_extras=True).items():
            kind, *declared = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            option = next((one for one in declared if isinstance(one, OptionInfo)), None)
            if option and not option.parser and {int, float} & {kind, *get_args(kind)}:
                found.append((command, name, option))
    return found


def test_every_number_has_limits() -> None:
    """Without a largest value a search has no end at `inf`, and an integer of thirty digits ends up in C."""
    options = numeric_options()
    assert len(options) > 40
    assert [(command, name) for command, name, one in options if one.min is None or one.max is None] == []


@pytest.mark.parametrize(
    ("arguments", "value", "limit"),
    [
        ("keys create me --expires-days", "0", "greater than or equal to 0.001"),
        ("keys create me --expires-days", "-1", "greater than or equal to 0.001"),
        ("keys create me --expires-days", "1e-320", "greater than or equal to 0.001"),
        ("keys create me --expires-days", "inf", "less than or equal to 36500"),
        ("trace trace.json --better", "inf", "less than or equal to 1000000"),
        ("trace trace.json --better", "1e400", "less than or equal to 1000000"),
        ("trace trace.json --better", "nan", "less than or equal to 1000000"),
        ("trace trace.json --chunks", "1" + "0" * 30, "less than or equal to 4096"),
        ("plan x.json --devices 2 --global-batch 8 --workers", "1" + "0" * 30, "less than or equal to 1024"),
        ("bench small --seconds-ratio", "1e400", "less than or equal to 1000000"),
        ("solve problem.json --time-limit", "nan", "less than or equal to 1000000"),
    ],
)
def test_numbers_out_of_range(cli: Cli, arguments: str, value: str, limit: str) -> None:
    found = refused(cli, *arguments.split(), value)
    assert found.startswith(f"error: Invalid value {value!r} for '{arguments.split()[-1]}': ")
    assert limit in found


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda d: d["stages"][0].update(foward_us=1),
            ".foward_us is not a field. Maybe you meant forward_us.",
        ),
        (lambda d: d["stages"][1].update(forward_us=-10), "stages[1].forward_us is -10 but must be at least 0. Maybe"),
        (
            lambda d: d["stages"][1].update(offload={"bytes": 3, "offload_us": 1, "reload_us": 1}),
            "stages[1] has offload.bytes 3 but activation_bytes is 2. Maybe",
        ),
        (
            lambda d: d["stages"][1].update(device=2),
            ".device is 2 but there are 2 devices, counted from 0. Maybe",
        ),
        (
            lambda d: d.update(transfer_us=float("nan")),
            "contains NaN at line 1, column 107, but every number must be finite. Maybe",
        ),
    ],
)
def test_problems(cli: Cli, problem_file: Path, edit: Edit, message: str) -> None:
    data = json.loads(problem_file.read_text())
    edit(data)
    problem_file.write_text(json.dumps(data))
    found = refused(cli, "solve", problem_file)
    assert message in found
    assert found.startswith(f"error: {problem_file}: ")


@pytest.mark.parametrize("command", ["solve", "verify", "compare"])
def test_files(cli: Cli, tmp_path: Path, command: str) -> None:
    path = tmp_path / "bad.json"
    assert "cannot be read: No such file" in refused(cli, command, path)
    path.write_text("")
    assert "is empty. Maybe" in refused(cli, command, path)
    path.write_text('{"format": ')
    assert "is not JSON: EOF while parsing a value at line 1" in refused(cli, command, path)
    path.write_text("[" * 100_000)
    assert "nests too deeply at line 1, column 202" in refused(cli, command, path)
    path.write_bytes(b"\xff" * 100)
    assert "is not UTF-8" in refused(cli, command, path)
    assert "Is a directory" in refused(cli, command, tmp_path)


def test_a_file_of_100_mb(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    path.write_bytes(b'{"name": "' + b"x" * 100_000_000 + b'"}')
    assert "has 100,000,012 bytes but at most 16,777,216 are read. Maybe" in refused(cli, "solve", path)


def test_everything_wrong_is_said_at_once(cli: Cli, problem_file: Path) -> None:
    data = json.loads(problem_file.read_text())
    data["stages"][0]["forward_us"] = -1
    data["microbatches"] = 0
    problem_file.write_text(json.dumps(data))
    run = cli("solve", problem_file, "--json")
    assert {issue["pointer"] for issue in run.document["error"]["issues"]} == {"stages[0].forward_us", "microbatches"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "zb-9"), "method is 'zb-9'; the methods are auto"),
        (("--method", "own.py"), "Maybe own.py:FUNCTION, for a function of that file."),
        (("--method", "CPSAT"), "ada-offload. Maybe cp-sat."),
        (("--gap", "2"), "Invalid value '2' for '--gap': Input should be less than or equal to 1."),
        (("--gap", "nan"), "Invalid value 'nan' for '--gap'"),
        (("--time-limit", "0"), "Invalid value '0' for '--time-limit'"),
        (("--time-limit", "soon"), "Invalid value 'soon' for '--time-limit'"),
        (("--workers", "0"), "Invalid value '0' for '--workers'"),
        (("--seed", "-1"), "Invalid value '-1' for '--seed'"),
        (("--memory-limit", "much"), "'much' is not a size. Maybe write it as 8GiB"),
        (("--bogus",), "No such option: --bogus"),
        (("-o", "/no/such/folder/s.json"), "/no/such/folder is not a folder"),
        (("-o", ""), "-o is ''. Maybe a variable of the shell is not set."),
        (("--method=",), "--method is ''. Maybe"),
        (("", "--gap", "0"), "an argument is ''. Maybe"),
    ],
)
def test_options(cli: Cli, problem_file: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refused(cli, "solve", problem_file, *options)


def test_an_edited_schedule_is_for_verify(cli: Cli, schedule_file: Path, tmp_path: Path) -> None:
    data = json.loads(schedule_file.read_text())
    data["devices"][0]["compute"] = []
    schedule_file.write_text(json.dumps(data))
    run = cli("export", schedule_file, "--to", "torch-csv", "-o", tmp_path / "x.csv")
    assert run.code == 1
    assert "error: F0.0 is missing. Maybe the schedule was edited: 'optpipe verify' names every fault." in run.err


def test_other_commands(cli: Cli, problem_file: Path, schedule_file: Path, tmp_path: Path) -> None:
    assert "No such command 'frobnicate'. Maybe see 'optpipe --help'." in refused(cli, "frobnicate")
    assert "No such command 'verfy'. Maybe you meant 'verify'." in refused(cli, "verfy")
    assert "is a problem but a schedule is needed" in refused(cli, "verify", problem_file)
    assert "is a schedule but a problem is needed" in refused(cli, "solve", schedule_file)
    assert ".bmp" in refused(cli, "plot", schedule_file, "-o", tmp_path / "x.bmp")
    assert ".bmp" in refused(cli, "compare", problem_file, "--plot", tmp_path / "x.bmp")
    assert "--methods is 'nope'; the methods are" in refused(cli, "compare", problem_file, "--methods", "cp-sat,nope")
    assert "--to" in refused(cli, "export", schedule_file, "--to", "pdf", "-o", tmp_path / "x")
    assert "Choose from: torch-csv, chrome-trace, megatron, torchtitan, lp, mps" in refused(
        cli, "export", schedule_file, "-o", tmp_path / "x"
    )
    assert "--model is 'huge'" in refused(cli, "train", "--schedule", schedule_file, "--model", "huge")
    assert "--learning-rate is -1.0" in refused(cli, "train", "--schedule", schedule_file, "--learning-rate", "-1")


def test_a_refused_output_leaves_the_old_file(cli: Cli, problem_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    out.write_text("precious")
    assert cli("solve", tmp_path / "none.json", "-o", out).code == 2
    assert out.read_text() == "precious"


def test_under_torchrun_rank_0_alone_speaks(cli: Cli, schedule_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, says in (("0", "WORLD_SIZE is 3 but the schedule has 2 devices. Maybe"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        run = cli("train", "--schedule", schedule_file, "--model", "tiny")
        assert run.code == 2
        assert says in run.err
        assert bool(run.err) == bool(says)
