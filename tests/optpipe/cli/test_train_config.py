"""A configuration that cannot be trained ends with exit code 2 and one message that names what is wrong as given."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe.errors import InputError, Issue
from optpipe.train.settings import SETTINGS, settings_named_as_given
from tests.optpipe.cli.conftest import Cli

NAME = "hf:FOLDER, or package.module:callable"


def refusal(cli: Cli, *arguments: object) -> str:
    """The only message, the same in text and JSON."""
    run = cli("train", *arguments)
    assert (run.code, run.out) == (2, ""), run.err
    [line] = run.err.strip().splitlines()
    assert cli("train", *arguments, "--json").document["error"]["message"] == line.removeprefix("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step = 3", "step is not a setting. Maybe you meant steps."),
        ("learning_rate = 0.1", "learning_rate is not a setting. Maybe it belongs in [optimizer]."),
        ("[optimiser]\nname = 'sgd'", "optimiser is not a setting. Maybe you meant optimizer."),
        ("[optimizer]\nlearning_rat = 0.1", "optimizer.learning_rat is not a setting. Maybe you meant learning_rate."),
        ("[optimizer]\nsteps = 3", "optimizer.steps is not a setting. Maybe"),
        ("[model]\nzzz = 1", "model.zzz is not a setting."),
        ("model = 'tiny'", "model is 'tiny' but must be a table. Maybe model.name is meant."),
        ("online = true", "online is true but must be a table."),
        ("steps = 0", "steps is 0 but must be from 1 to 1000000000."),
        ("steps = '3'", "steps is '3' but must be an integer."),
        ("steps = true", "steps is true but must be an integer."),
        ("steps = 1.5", "steps is 1.5 but must be an integer."),
        ("seed = -1", "seed is -1 but must be from 0 to 9223372036854775807."),
        ("device = 'gpu'", "device is 'gpu' but must be one of auto, cpu, cuda."),
        ("check = 1", "check is 1 but must be true or false."),
        ("timeout_seconds = 0", "timeout_seconds is 0 but must be above 0."),
        ("[model]\nname = 'huge'", "model.name is 'huge' but must be one of tiny, small, medium, " + NAME),
        ("[model]\nname = 'tiny'\nsequence = 33", "model.sequence is 33 but must be from 1 to 32."),
        ("[model]\nlayers = 1", "model.layers is 1 but the schedule has 2 stages, and each needs a layer. Maybe"),
        ("[model]\ndtype = 'float16'", "model.dtype is 'float16' but must be one of float32, float64, bfloat16."),
        (
            "[model]\ndtype = 'float64'\nautocast = 'bfloat16'",
            "model.dtype is 'float64' with autocast to bfloat16, but",
        ),
        ("[model]\nname = 'mine:build'\ntied = true", "model.tied is True, but mine:build decides that: a para"),
        ("[model]\ndata = 'mine:data'", "model.data is 'mine:data', but the GPT is trained on text. Maybe"),
        ("[optimizer]\nlearning_rate = inf", "optimizer.learning_rate is inf but must be finite."),
        ("[optimizer]\nclip_norm = 0", "optimizer.clip_norm is 0 but must be above 0."),
        ("[optimizer]\nname = 'adam'", "optimizer.name is 'adam' but must be one of adamw, sgd, or package"),
        ("[optimizer]\nname = 'sgd'\nbeta2 = 0.9", "optimizer.beta2 is 0.9, but sgd has no second moment. Maybe"),
        ("[checkpoints]\nresume = 'must'", "checkpoints.resume is 'must', but folder does not say from where. Maybe"),
        ("[checkpoints]\nkeep = 0", "checkpoints.keep is 0 but must be from 1 to 1000000."),
        ("[output]\nplot = 'run.jpg'", "run.jpg' but must end in .png, .svg, .pdf, .html."),
        (
            "[output]\ntrace_step = 20\ntrace = 't.json'",
            "output.trace_step is 20 but must be from 0 to 19: the run has",
        ),
        ("schedule = 3", "schedule is 3 but must be a path."),
        ("schedule = 'nowhere.json'", "nowhere.json: cannot be read: No such file or directory. Maybe the path is"),
        ("schedule = ", "is not TOML: Invalid value (at end of document)."),
        ("steps = 3\nsteps = 4", "is not TOML: Cannot overwrite a value (at"),
        ("", "is empty. Maybe the program that wrote it was stopped."),
    ],
)
def test_files(cli: Cli, quick_schedule_file: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.toml"
    has_schedule = "schedule" in text or not text
    path.write_text(text if has_schedule else f"schedule = '{quick_schedule_file.name}'\n{text}")
    found = refusal(cli, "--config", path)
    assert message in found
    assert found.startswith(f"{path}: ") or "nowhere.json" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--steps", "0"), "--steps is 0 but must be from 1 to 1000000000."),
        (("--steps", "x"), "Invalid value 'x' for '--steps': Input should be a valid integer"),
        (("--model", "huge"), "--model is 'huge' but must be one of tiny, small, medium, " + NAME),
        (("--learning-rate", "-1"), "--learning-rate is -1.0 but must be above 0."),
        (("--sequence", "129"), "--sequence is 129 but must be from 1 to 128."),
        (("--layers", "1"), "--layers is 1 but the schedule has 2 stages, and each needs a layer. Maybe"),
        (("--optimizer", "adam"), "--optimizer is 'adam' but must be one of adamw, sgd, or package"),
        (("--memory", "much"), "'much' is not a size. Maybe write it as 8GiB or 512M"),
        (("--checkpoint-every", "0"), "--checkpoint-every is 0 but must be at least 1."),
        (("--plot", "run.jpg"), "--plot is 'run.jpg' but must end in .png, .svg, .pdf, .html."),
        (("--plot", "README.md/run.png"), "README.md is a file, not a folder."),
        (("--checkpoint", "README.md"), "--checkpoint is 'README.md', but README.md is a file. Maybe name another"),
        (("--checkpoint", "README.md/x/y"), "--checkpoint is 'README.md/x/y', but README.md is a file. Maybe name"),
        (("--tensorboard", "README.md"), "--tensorboard is 'README.md', but README.md is a file. Maybe name another"),
        (("--profile-steps", "3", "--profile-folder", "README.md"), "--profile-folder is 'README.md', but README.md"),
        (("--config", "missing.toml"), "missing.toml: cannot be read: No such file or directory. Maybe the path is"),
        (("--solve",), "--schedule is given, but --solve has one found before training. Maybe --online, which begins"),
        (
            ("--solve", "--online"),
            "--online solves during the training, but --solve before it. Maybe leave one of them out.",
        ),
        (("--model", "no_such_package:build"), "model no_such_package:build: cannot be imported: ModuleNotFoundError"),
        (("--stepz", "3"), "No such option: --stepz"),
    ],
)
def test_flags(cli: Cli, quick_schedule_file: Path, flags: tuple[str, ...], message: str) -> None:
    assert message in refusal(cli, "--schedule", quick_schedule_file, *flags)


def test_no_schedule(cli: Cli, tmp_path: Path) -> None:
    assert refusal(cli) == '--schedule is missing. Maybe schedule = "schedule.json", or --solve to have one found.'
    assert refusal(cli, "--solve") == "--devices is missing, and no schedule says how many. Maybe 4."
    placed = ("--solve", "--devices", "2", "--placement", "zigzag")
    assert "--placement 'zigzag' is not a placement. Maybe one of linear, interleaved-2" in refusal(cli, *placed)
    few = ("--solve", "--devices", "2", "--placement", "v", "--layers", "3")
    assert refusal(cli, *few).startswith("--layers is 3 but the schedule has 4 stages, and each needs a layer. Maybe")
    (tmp_path / "schedule.json").write_text("{}")
    assert "is not TOML" in refusal(cli, "--config", tmp_path / "schedule.json")


def test_everything_wrong_in_a_file_is_said_at_once(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("steps = 0\nstep = 3\nschedule = 3\n[model]\nlayers = 0\nlayer = 3\n[output]\nplot = 3")
    run = cli("train", "--config", path, "--keep", "0")
    assert run.code == 2
    for name in (
        "steps is 0",
        "step is not",
        "schedule is 3",
        "model.layers is 0",
        "model.layer is not",
        "output.plot",
    ):
        assert f" {name} " in run.err
    assert "--keep is 0 but must be from 1 to 1000000." in run.err


def test_a_flag_is_named_where_a_file_is_given_too(cli: Cli, quick_schedule_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(f"schedule = '{quick_schedule_file.name}'\nsteps = 0")
    assert refusal(cli, "--config", path, "--steps", "-1").startswith("--steps is -1")


def test_a_setting_that_is_wrong_only_in_use_is_named_as_given(
    cli: Cli, quick_schedule_file: Path, tmp_path: Path
) -> None:
    """The lengths in a file are read when training begins."""
    lengths, path = tmp_path / "lengths.json", tmp_path / "train.toml"
    lengths.write_text("[7, 1001]")
    schedule = ("--schedule", quick_schedule_file)
    flags = (*schedule, "--model", "tiny", "--lengths", "varying", "--length-file", lengths)
    said = "holds a length of 1,001, but sequences have at most 32 tokens."
    assert refusal(cli, *flags).startswith(f"--length-file {said}")
    path.write_text("[model]\nname = 'tiny'\nlengths = 'varying'\nlength_file = 'lengths.json'")
    assert refusal(cli, *schedule, "--config", path).startswith(f"{path}: model.length_file {said}")


def test_a_setting_of_a_file_is_named_as_there_where_commands_share_a_flag(tmp_path: Path) -> None:
    def refused(path: Path | None, flags: dict[str, object]) -> InputError:
        with pytest.raises(InputError) as raised, settings_named_as_given(path, flags):
            raise InputError([Issue("--memory", "too_small", "is 5 bytes.")])
        return raised.value

    assert str(refused(None, {"online.memory_bytes": 5})) == "--memory is 5 bytes."
    assert str(refused(Path("train.toml"), {"online.memory_bytes": 5})) == "--memory is 5 bytes."
    in_file = refused(Path("train.toml"), {})
    assert (str(in_file), in_file.source) == ("online.memory_bytes is 5 bytes.", "train.toml")


def test_flags_win_over_the_file(
    cli: Cli, quick_schedule_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And paths in the file are seen from its folder, those of flags from here."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "train.toml").write_text(
        "schedule = '../schedule.json'\nsteps = 7\n[model]\nname = 'tiny'\n[output]\nmetrics = 'metrics.jsonl'\n"
    )
    monkeypatch.chdir(tmp_path)
    document = cli("train", "--config", folder / "train.toml", "--steps", "2", "--plot", "run.svg", "--json").document
    assert len(document["losses"]) == 2
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run.svg").exists()


def test_every_setting_has_one_flag_and_a_text() -> None:
    assert len({setting.flag for setting in SETTINGS.values()}) == len(SETTINGS) > 40
    assert all(setting.text for setting in SETTINGS.values())


def test_help_has_a_panel_for_each_table(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    shown = cli("train", "--help").out
    for setting in SETTINGS.values():
        assert setting.name == "online.mode" or setting.flag in shown
    for panel in ("Run", "[model]", "[optimizer]", "[checkpoints]", "[online]", "[output]"):
        assert panel in shown
