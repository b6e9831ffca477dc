"""Going on from a checkpoint: losses bit for bit those of a run that nothing interrupted, or one clear refusal."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from instances.schedules import one_f_one_b, v_wave
from optpipe.errors import CheckpointError, InputError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.train import CheckpointConfig, OnlineConfig, OptimizerConfig
from optpipe.train.checkpoint.files import Disk, final_path, read_tensors, steps_in
from optpipe.train.checkpoint.resume import resume
from optpipe.train.checkpoint.write import CheckpointWriter
from optpipe.train.model import Model
from tests.optpipe.compile.vocabulary import vocabulary_schedule
from tests.optpipe.runtime.schedules import random_schedule
from tests.optpipe.train import shared_stages
from tests.optpipe.train.checkpoint import normed_stages
from tests.optpipe.train.checkpoint.runs import NORMED, STEPS, check_resumed_losses, config_of, run
from tests.sample import examples, some
from tests.sliced_schedules import seq1f1b_schedule


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    run(config_of(tmp_path / "kept"), until=4)
    return tmp_path / "kept"


CASES: dict[str, dict[str, Any]] = {
    "float64": {},
    "float32": {"dtype": "float32"},
    "autocast": {"dtype": "float32", "autocast": "bfloat16"},
    "dropout and running statistics in bfloat16": {
        "name": "tests.optpipe.train.checkpoint.drawing_stages:build",
        "dtype": "float32",
    },
    "tied": {"tied": True},
    "sgd": {"optimizer": OptimizerConfig("sgd", learning_rate=0.1)},
    "a learning rate that moves": {"optimizer": OptimizerConfig(warm_up_steps=3, decay="cosine")},
    "clipped": {"optimizer": OptimizerConfig(clip_norm=0.5)},
    "V": {"schedule": v_wave(2, 2), "layers": 4},
    "offload": {"schedule": one_f_one_b(2, 2, moved=[(0, 0), (0, 1)])},
    "slices of sequences": {"schedule": seq1f1b_schedule(2, 2, 3)},
    "lengths that vary": {"lengths": "varying"},
    "rows on all devices": {"schedule": vocabulary_schedule(3, 2, 1), "optimizer": OptimizerConfig(clip_norm=0.5)},
    "rows, two barriers": {"schedule": vocabulary_schedule(2, 2, 2)},
    "rows, tied": {"schedule": vocabulary_schedule(3, 2, 1), "tied": True},
    "rows, sgd": {
        "schedule": vocabulary_schedule(2, 2, 1),
        "optimizer": OptimizerConfig("sgd", learning_rate=0.1),
    },
}


@pytest.mark.parametrize("name", some(list(CASES), share=4))
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    """Ended before step 5 as by a kill: the last checkpoint is that of step 4, which is done again."""
    check_resumed_losses(tmp_path, **CASES[name])


def test_other_schedules_of_the_same_stages_go_on_from_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files are by stage: two devices, one device, or another order; sums may then be added in another order."""
    whole = run(config_of(None)).losses
    for schedule in (one_f_one_b(2, 2, moved=[(0, 0), (0, 1)]), _on_one_device(one_f_one_b(2, 2))):
        caplog.clear()
        again = run(config_of(folder, schedule=schedule, keep=9)).losses
        assert again == pytest.approx({step: whole[step] for step in again}, rel=1e-12)
        assert "resumed with another schedule than before: sums may be added in another order" in caplog.messages
        shutil.rmtree(final_path(folder, STEPS))


RECUT: dict[str, dict[str, Any]] = {
    "GPT": {"dtype": "float64", "layers": 4},
    "tied GPT": {"dtype": "float64", "layers": 4, "tied": True},
    "shared by all stages": {"name": f"{shared_stages.__name__}:everywhere_in_4", "dtype": "float32"},
    "a module in two stages": {"name": f"{shared_stages.__name__}:modules_in_4", "dtype": "float32"},
}
"""Cuts of four blocks."""


@pytest.mark.parametrize("name", some(list(RECUT)))
def test_a_model_that_is_cut_otherwise_goes_on_from_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In one, two (of unequal sizes) and four stages, each from the one before."""
    own = "name" in RECUT[name]
    ways: list[dict[str, Any]] = [
        {"schedule": one_f_one_b(4, 2)} | ({"cut": "1,1,1,1"} if own else {}),
        {"schedule": one_f_one_b(2, 2)} | ({"cut": "3,1"} if own else {}),
        {"schedule": one_f_one_b(1, 2)} | ({"cut": "4"} if own else {}),
        {"schedule": v_wave(2, 2)},
    ]
    whole = run(config_of(None, **RECUT[name], **ways[0], steps=8)).losses
    losses: dict[int, float] = {}
    for n, way in enumerate(ways, start=1):
        caplog.clear()
        losses |= run(config_of(tmp_path, **RECUT[name], **way, steps=8), until=2 * n + (n < 4)).losses
        assert any("resumed with stages of other layers" in text for text in caplog.messages) == (n > 1)
    assert losses == pytest.approx(whole, rel=1e-12 if RECUT[name]["dtype"] == "float64" else 1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_files_are_a_checkpoint_of_torch(folder: Path) -> None:
    """By the names of the whole model."""
    reader = dcp.HuggingFaceStorageReader(str(final_path(folder, 4)))
    names = {name: entry for name, entry in reader.read_metadata().state_dict_metadata.items() if "rank-" not in name}
    model = run(config_of(folder), until=0).model
    weights = {
        model.task.model_name(s, local): p
        for s, stage in model.stages.items()
        for local, p in stage.module.named_parameters()
    }
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert names.keys() == {*weights, *(f"optimizer.state.{name}.{key}" for name in weights for key in keys)}
    assert {"embedding.byte.weight", "layers.1.narrow.bias", "head.head.weight"} <= weights.keys()
    loaded = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in names.items()}
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight)
        [optimizer] = [o for o in model.optimizers.values() if weight in o.state]
        assert torch.equal(loaded[f"optimizer.state.{name}.exp_avg"], optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize("name", ["float64", "tied", "running statistics"])
def test_a_checkpoint_of_the_first_format_is_resumed(name: str, tmp_path: Path) -> None:
    """As release 0.1.0 wrote them: names of the stages' modules, and no list of tensors in the manifest."""
    case = CASES[name] if name in CASES else {**NORMED, "schedule": one_f_one_b(1, normed_stages.BATCH_MICROBATCHES)}
    config = config_of(tmp_path, **case)
    whole = run(config_of(None, **case)).losses
    run(config, until=4)
    as_first_format(final_path(tmp_path, 4))
    assert run(replace(config, checkpoints=replace(config.checkpoints, resume="must"))).losses == {
        step: whole[step] for step in (4, 5)
    }


def as_first_format(path: Path) -> None:
    manifest = json.loads((path / "checkpoint.json").read_text())
    del manifest["sha256"], manifest["tensors"], manifest["task"]["cut"]
    manifest["format"] = "optpipe.checkpoint/1"
    for s in range(manifest["stages"]):
        file = path / f"stage-{s:04d}.safetensors"
        tensors = {_first_name(name, s, manifest["stages"]): tensor for name, tensor in read_tensors(file).items()}
        file.unlink()
        manifest["files"][file.name] = Disk().write_tensors(file, tensors).to_data()
    data = {key: value for key, value in manifest.items() if key != "tensors"}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    (path / "checkpoint.json").write_text(json.dumps(data | {"sha256": hashlib.sha256(text.encode()).hexdigest()}))


def _first_name(name: str, s: int, stages: int) -> str:
    """Name of a tensor in stage `s` of a GPT with a layer a stage, or in the only one of one's own stages."""
    kept = name.removeprefix("optimizer.state.")
    full, key = (kept.rpartition(".")[0], kept.rpartition(".")[2]) if kept != name else (name, "")
    part, _, own = full.partition(".")
    if part in ("embedding", "head"):
        local = f"{0 if part == 'embedding' else 1 + (stages == 1)}.{own}"
    elif part == "layers":
        local = f"{int(s == 0)}.{own.partition('.')[2]}"
    else:
        local = own
    if key:
        return f"optimizer.{key}.{local}"
    return f"{'buffer' if 'running' in name or 'num_batches' in name else 'parameter'}.{local}"


def test_with_the_same_schedule_nothing_is_said_to_differ(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(config_of(folder))
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_schedule_that_was_swapped_in_is_gone_on_with(tmp_path: Path) -> None:
    """The run is started with the schedule that it was started with before, and runs the one that it had come to."""
    config = config_of(tmp_path)
    better = one_f_one_b(2, 2, moved=[(0, 0), (0, 1)])

    first = run(config, until=0)
    first.model.step(first.model.task.batch(0))
    first.model.swap(better)
    first.model.step(first.model.task.batch(1))
    first.checkpoints.on_step_boundary(2)
    assert Schedule.load(final_path(tmp_path, 2) / "schedule.json") == better
    assert run(config, until=0).model.schedule == better
    other = one_f_one_b(2, 2, fused=True)
    assert run(replace(config, schedule=other), until=0).model.schedule == other


def test_a_run_that_finds_its_schedule_goes_on_with_the_one_it_had_found(tmp_path: Path) -> None:
    better = one_f_one_b(2, 2, moved=[(0, 0), (0, 1)])
    found = run(config_of(None, schedule=better), until=2).model
    unscheduled = replace(config_of(tmp_path), schedule=None, online=OnlineConfig(mode="first", devices=2))
    CheckpointWriter(tmp_path, unscheduled, found, 2, Disk()).finish()
    again = run(config_of(None), until=0).model
    assert resume(tmp_path, unscheduled, again) == (2, [])
    assert again.schedule == better


def test_a_run_that_is_over_is_not_trained_again_but_can_go_on(folder: Path) -> None:
    run(config_of(folder))
    assert run(config_of(folder)).losses == {}
    longer = run(config_of(folder, steps=STEPS + 2)).losses
    assert longer == {step: run(config_of(None, steps=STEPS + 2)).losses[step] for step in (STEPS, STEPS + 1)}
    with pytest.raises(
        CheckpointError, match=r"steps is 3 but .*step-0000000008 comes after 8 steps\. Maybe raise --steps"
    ):
        run(config_of(folder, steps=3))


def test_only_the_newest_stay(tmp_path: Path) -> None:
    run(config_of(tmp_path, keep=2, every_steps=1))
    assert steps_in(tmp_path) == [6, 5]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    """A checkpoint with a model to load it into."""
    folder = tmp_path_factory.mktemp("kept")
    return folder, run(config_of(folder), until=4).model


@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_flipped_bit_is_seen(kept: tuple[Path, Model], data: st.DataObject) -> None:
    """In any file of the newest checkpoint, at any place: it is refused by name, and the one before is taken."""
    folder, model = kept
    path = data.draw(st.sampled_from(sorted(final_path(folder, 4).iterdir())))
    content = path.read_bytes()
    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(content)
    damaged[place] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        with pytest.raises(CheckpointError, match=path.name):
            resume(folder, config_of(folder, resume="must"), model)
        assert resume(folder, config_of(folder), model) == (2, [4])
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["checkpoint.json", "stage-0001.safetensors", "schedule.json"])
def test_a_missing_file_is_seen(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (final_path(folder, 4) / name).unlink()
    assert run(config_of(folder), until=0).model.step_number == 2
    [told] = caplog.messages
    assert name in told
    assert "refused" in told


def test_a_damaged_checkpoint_is_written_anew_when_training_comes_to_it(folder: Path) -> None:
    """And until then it is not what is kept in place of a whole one."""
    path = final_path(folder, 4) / "stage-0000.safetensors"
    path.write_bytes(b"nothing")
    run(config_of(folder, keep=1, every_steps=3), until=3)
    assert steps_in(folder) == [4, 3]
    assert list(run(config_of(folder, keep=1), until=5).losses) == [3, 4]
    assert steps_in(folder) == [4]
    assert list(run(config_of(folder, keep=1, resume="must")).losses) == [4, 5]
    assert steps_in(folder) == [6]


def test_where_none_is_whole_nothing_begins_anew_unasked(folder: Path) -> None:
    for step in (2, 4):
        (final_path(folder, step) / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has 2 checkpoint\\(s\\) but none that is whole"):
        run(config_of(folder))


def test_modes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"resume is 'never' but .*step-0000000004 is there already\. Maybe"):
        run(config_of(folder, resume="never"))
    with pytest.raises(CheckpointError, match=r"resume is 'must' but .*empty has no checkpoint\. Maybe"):
        run(config_of(tmp_path / "empty", resume="must"))
    with pytest.raises(InputError, match=r"resume is 'must', but folder does not say"):
        CheckpointConfig(None, resume="must")
    assert list(run(config_of(tmp_path / "new" / "deep", resume="never"), until=1).losses) == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, r"task\.dtype is 'float64' in .*step-0000000004 but 'float32' now\. Maybe"),
        ({"layers": 4}, r"task\.layers is 2 in .* but 4 now"),
        ({"seed": 5}, r"task\.seed is 0 in .* but 5 now"),
        ({"schedule": one_f_one_b(2, 4)}, r"microbatches of a step, of all replicas, is 2 in .* but 4 now"),
        (
            {"name": f"{normed_stages.__name__}:build", "schedule": one_f_one_b(1, 2), "dtype": "float32"},
            r"task\.dtype is 'float64' in .* but ",
        ),
        ({"optimizer": OptimizerConfig("sgd")}, r"optimizer\.name is 'adamw' in .* but 'sgd' now"),
    ],
)
def test_another_run_is_refused_by_field_and_values(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        run(config_of(folder, **changes))


def test_options_that_may_change_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(config_of(folder, optimizer=OptimizerConfig(learning_rate=0.01), keep=7, steps=8), until=0)
    assert caplog.messages == ["resumed with optimizer.learning_rate 0.01; it was 0.001 before"]
    caplog.clear()
    run(config_of(folder, optimizer=OptimizerConfig(decay="cosine"), steps=8), until=0)
    assert "resumed with steps 8; it was 6 before" in caplog.messages


def test_a_folder_that_is_a_file_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: File exists"):
        run(config_of(tmp_path / "file"))


def test_leftovers_of_a_killed_process_are_cleared(folder: Path) -> None:
    (folder / ".partial-step-0000000099").mkdir()
    run(config_of(folder), until=0)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def _on_one_device(schedule: Schedule) -> Schedule:
    """The schedule with all stages on one device."""
    data = schedule.problem.to_data()
    stages = [stage | {"device": 0} for stage in data["stages"]]
    return random_schedule(Problem.from_data(data | {"stages": stages, "devices": data["devices"][:1]}), 1)
