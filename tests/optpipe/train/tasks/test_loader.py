"""Loaders of the user's: the same data whatever reads them, resumed where they were, and nothing read in vain."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from instances.schedules import one_f_one_b
from optpipe.errors import CheckpointError, InputError, RunFailedError
from optpipe.models.packing import PackedTokens
from optpipe.train import CheckpointConfig, ModelConfig, StepReport, TrainingConfig, train
from optpipe.train.launch import Launch
from optpipe.train.tasks.loader import LoadedBatches, decode, encode
from tests.optpipe.train.tasks import loaders

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def config_of(loader: str, **model: str) -> TrainingConfig:
    own = ModelConfig(f"{loaders.__name__}:build", loader=f"{loaders.__name__}:{loader}", **model)
    return TrainingConfig(one_f_one_b(2, 4), own, steps=7, seed=3)


@pytest.mark.parametrize(("loader", "asynchronous"), [("shuffled", False), ("stateful", True), ("endless", False)])
def test_a_resumed_run_reads_on(loader: str, asynchronous: bool, tmp_path: Path) -> None:
    """In the middle of an epoch, whose order the loader has drawn: one with a state, and one that is read again."""
    if loader == "stateful":
        pytest.importorskip("torchdata")
    config = config_of(loader)
    whole = train(config).losses
    kept = replace(config, checkpoints=CheckpointConfig(tmp_path, every_steps=2, asynchronous=asynchronous))
    assert train(replace(kept, steps=3)).losses + train(kept).losses == whole
    assert (tmp_path / "step-0000000007" / "loader.replica-0.json").exists()
    assert len(set(whole)) == 7
    assert train(replace(config, seed=4)).losses != whole


def test_batches_for_evaluation_are_a_loader_of_their_own(tmp_path: Path) -> None:
    config = config_of("shuffled", evaluation_loader=f"{loaders.__name__}:evaluated")
    evaluated = train(replace(config, evaluate=2, evaluate_every=3))
    assert evaluated.losses == train(config).losses
    assert evaluated.evaluation_loss is not None
    assert [event.step for event in evaluated.events] == [3, 6]
    with pytest.raises(InputError, match=r"evaluate is 2, but a loader has no batches beyond the run\. Maybe add"):
        replace(config_of("shuffled"), evaluate=2)
    with pytest.raises(InputError, match=r"evaluation_loader is .*:evaluated', but it is read beside a loader alone"):
        replace(config, model=replace(config.model, loader=None), evaluate=2)


def test_a_process_reads_what_its_stages_need() -> None:
    config = replace(config_of("endless"), data_parallel=2)
    for device, reads in ((0, True), (1, False), (2, True)):
        loaders.READ.clear()
        batches = LoadedBatches(config, 8, Launch(3, replicas=2, rank=3 + device, distributed=True))
        inputs, _ = batches(0)
        assert [x is not None for x in inputs] == [True] * 8, "in the place of replica 0's, for their shape"
        loaders.READ.clear()
        batches.read_for([device], 3)
        for step in (0, 1, 1):
            inputs, targets = batches(step)
            assert [x is not None for x in inputs] == [False] * 4 + [reads] * 4
            assert [x is not None for x in targets] == [False] * 4 + [device == 2] * 4
        assert ([(1, n) for n in range(16)] if reads else []) == loaders.READ
        assert (batches.state() is not None) == reads


def test_a_checked_step_has_the_data_of_all_replicas() -> None:
    config = replace(config_of("endless"), data_parallel=2, check=True)
    inputs, _ = LoadedBatches(config, 8, Launch(2, replicas=2, rank=3, distributed=True))(0)
    assert [round(float(x[0, 0]), 2) for x in inputs] == [0.0, 0.02, 0.04, 0.06, 1.0, 1.02, 1.04, 1.06]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("empty", "returns a loader that yields nothing in epoch 1."),
        (
            "numbers",
            "returns a loader of int, but must yield (inputs, target) or a dict with labels, of one microbatch",
        ),
        ("texts", "returns str in a microbatch, but a tensor, or a tuple, list or dict of them is needed"),
        ("once", "yields nothing in epoch 1. Maybe return a DataLoader or a list: an iterator is read once."),
        ("broken", "raises OSError: the disk is gone at loaders.py:96, for microbatch 2 of epoch 0."),
        ("broken_elsewhere", "raises OSError: the disk is gone at loaders.py:96, for microbatch 2 of epoch 0."),
        ("no_loader", "returns int, but must return a loader of (inputs, target) or a dict with labels"),
    ],
)
def test_what_is_no_loader_is_refused(loader: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        train(config_of(loader))
    assert message in str(refused.value)


ROWS_2, ROWS_1 = r"\(float32\[2, 3\], float32\[2, 1\]\)", r"\(float32\[1, 3\], float32\[1, 1\]\)"
OWN = re.escape(loaders.__name__)
SMALLER = rf"{OWN}:\w+ returned {ROWS_2} first\. Maybe drop_last=True in its DataLoader"
WIDER = rf"returns \(float32\[4, 3\].* to evaluate, but {OWN}:shuffled returned {ROWS_2} first\. "


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("uneven"), rf"will return {ROWS_1} in step 1, at the end of its .*{SMALLER}"),
        (config_of("of_a_list"), rf"will return {ROWS_1} in step 1, at the end of its .*{SMALLER}"),
        (config_of("listed"), rf"will return {ROWS_1} in step 1, at the end of its .*{SMALLER}"),
        (replace(config_of("shuffled", evaluation_loader=f"{loaders.__name__}:wider"), evaluate=1), WIDER + "Maybe b"),
        (
            replace(config_of("shuffled", evaluation_loader=f"{loaders.__name__}:streaming"), evaluate=2),
            rf"returns {ROWS_1} to evaluate, but {SMALLER}",
        ),
        (
            TrainingConfig(
                one_f_one_b(2, 4),
                ModelConfig(f"{loaders.__name__}:build", data=f"{loaders.__name__}:wider_from_seven"),
                steps=7,
                evaluate=1,
            ),
            r"returns float32\[4, 3\] as inputs\[0\] of step 7, but .* returns float32\[2, 3\]\. Maybe pad",
        ),
    ],
    ids=[
        "last of an epoch",
        "last of a list of rows",
        "last of a list",
        "wider evaluation",
        "last of an evaluation",
        "evaluation of a callable",
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_the_training(config: TrainingConfig, message: str) -> None:
    reports: list[StepReport] = []
    with pytest.raises(InputError, match=message):
        train(config, reports.append)
    assert not reports


@pytest.mark.parametrize(
    ("loader", "steps"), [("uneven", 1), ("dropping", 7), ("repeating", 7)], ids=["not reached", "dropped", "filled"]
)
def test_a_last_batch_that_fits_or_is_not_read_is_no_error(loader: str, steps: int) -> None:
    assert len(train(replace(config_of(loader), steps=steps)).losses) == steps


def test_a_smaller_batch_of_a_loader_without_a_length_leaves_the_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    config = replace(config_of("streaming"), checkpoints=CheckpointConfig(tmp_path, every_steps=1))
    with pytest.raises(InputError, match=rf"returns {ROWS_1} in step 1, but {SMALLER}"):
        train(config)
    assert len(train(replace(config, steps=1)).losses) == 0, "step 0 is in the checkpoint"


def test_a_state_that_cannot_be_written_or_is_of_other_replicas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"the state of the loader holds object, but only tensors, numbers,"):
        train(replace(config_of("odd"), checkpoints=CheckpointConfig(tmp_path)))
    batches = LoadedBatches(config_of("shuffled"), 4, Launch(2))
    batches.read_for([0], 2)
    with pytest.raises(CheckpointError, match=r"has the loaders of 2 replica\(s\), but there are 1, each"):
        batches.load({"replicas": 2, "read": {}}, 3)


def test_states_are_written_as_they_are() -> None:
    state = {
        "tensor": torch.randn(2, 3),
        1: [None, True, 2, 0.1, "text", b"\x00\xff", (1, (2,))],
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, dtype=torch.int64),
    }
    again = decode(encode(state))
    assert again.keys() == state.keys()
    assert again[1] == state[1]
    for name in ("tensor", "bfloat16", "empty"):
        assert torch.equal(again[name], state[name])
        assert again[name].dtype == state[name].dtype  # type: ignore[attr-defined]


DOCUMENTS = [list(range(n % 5, n % 5 + length)) for n, length in enumerate((3, 9, 1, 4, 6, 2, 7, 5))]


def test_packed_documents_do_not_attend_to_one_another() -> None:
    """The loss of a packed batch is that of the documents one by one, as far as they are in one sequence."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.3))
    [batch] = DataLoader(PackedTokens(DOCUMENTS, 12), batch_size=3)
    assert batch["input_ids"].shape == (3, 12)
    assert batch["input_ids"].flatten().tolist() == [token for document in DOCUMENTS for token in document][:36]
    with torch.no_grad():
        packed = float(model(**batch, num_items_in_batch=1, use_cache=False).loss)
        alone = 0.0
        for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
            begins = [*torch.nonzero(positions == 0).flatten().tolist(), 12]
            for begin, end in pairwise(begins):
                part = ids[None, begin:end]
                alone += float(model(part, labels=part, num_items_in_batch=1).loss) if end - begin > 1 else 0.0
    assert packed == pytest.approx(alone, rel=1e-5)


def test_packing_goes_on_where_it_was() -> None:
    whole = [item["input_ids"].tolist() for item in PackedTokens(DOCUMENTS, 5, 1, 2)]
    tokens = [token for document in DOCUMENTS[1::2] for token in document]
    assert [token for sequence in whole for token in sequence] == tokens[: 5 * len(whole)]
    packed = PackedTokens(DOCUMENTS, 5, 1, 2)
    iterator = iter(packed)
    first = [next(iterator)["input_ids"].tolist()]
    again = PackedTokens(DOCUMENTS, 5, 1, 2)
    again.load_state_dict(packed.state_dict())
    assert first + [item["input_ids"].tolist() for item in again] == whole
