"""Models of transformers on slices of sequences: masks and positions go on from slice to slice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from optpipe.errors import InputError, TrainingError
from optpipe.schedule import Schedule
from optpipe.train import ModelConfig, TrainingConfig, train
from tests.optpipe.models import tiny_models
from tests.optpipe.models.tiny_models import MICROBATCHES, saved
from tests.optpipe.train.cases import assert_plain_step
from tests.sample import some
from tests.sliced_schedules import microbatch_by_microbatch, seq1f1b_schedule, sliced_problem

BLOCKS = {"name": "selective", "kept_bytes": 20, "recompute_us": 5, "segment_bytes": 80}

SCHEDULES = {
    "seq1f1b": seq1f1b_schedule(2, MICROBATCHES, 3),
    "V, split": microbatch_by_microbatch(sliced_problem((0, 1, 1, 0), MICROBATCHES, 3), ("B", "W")),
    "recomputed": microbatch_by_microbatch(
        sliced_problem((0, 1), MICROBATCHES, 2, modes=[BLOCKS]), ("CBW",), mode="selective"
    ),
}


def config(schedule: Schedule, name: str, data: str = "unmasked_batch") -> TrainingConfig:
    model = ModelConfig(saved(name), data=f"{tiny_models.__name__}:{data}", dtype="float64")
    return TrainingConfig(schedule, model, steps=1, check=True)


@pytest.mark.parametrize(
    ("name", "way"),
    some(
        [
            ("llama", "seq1f1b"),
            ("qwen3", "V, split"),
            ("gpt2", "seq1f1b"),
            ("llama", "recomputed"),
            ("gpt2", "V, split"),
        ]
    ),
)
def test_slices_equal_the_uncut_model_on_whole_sequences(name: str, way: str) -> None:
    assert_plain_step(train(config(SCHEDULES[way], name)).check)


@pytest.mark.parametrize("way", ["seq1f1b", "recomputed"])
def test_dropout_is_that_of_whole_sequences(way: str, tmp_path: Path) -> None:
    """Dropout of embeddings, of attention and of what is added to the hidden states."""
    given = config(SCHEDULES[way], "gpt2")
    folder = copytree(given.model.name.removeprefix("hf:"), tmp_path / "dropping")
    path = folder / "config.json"
    dropping = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.25)
    path.write_text(json.dumps(json.loads(path.read_text()) | dropping))
    model = replace(given.model, name=f"hf:{folder}")
    assert_plain_step(train(replace(given, model=model)).check)


def test_models_that_do_not_take_slices_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="is a configuration of mistral, but the schedule has slices"):
        train(config(SCHEDULES["seq1f1b"], "mistral"))


def test_masks_of_padding_are_refused_by_name() -> None:
    with pytest.raises(TrainingError, match="the batch has attention_mask beside input_ids, which slices"):
        train(config(SCHEDULES["seq1f1b"], "llama", "batch"))
