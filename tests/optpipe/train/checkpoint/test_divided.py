"""Checkpoints of a vocabulary layer on all devices: one weight, with which any number of devices goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from instances.schedules import one_f_one_b
from optpipe.errors import CheckpointError
from optpipe.train import OptimizerConfig
from optpipe.train.checkpoint.convert import to_torch
from optpipe.train.checkpoint.files import final_path, read_manifest, read_tensor
from optpipe.train.vocabulary import ROWS
from tests.optpipe.compile.vocabulary import vocabulary_schedule
from tests.optpipe.train.checkpoint.runs import STEPS, config_of, run
from tests.sample import some

NAME = "head.head.weight"


@pytest.mark.parametrize("tied", some([False, True]))
def test_any_number_of_devices_goes_on_from_any_other(tied: bool, tmp_path: Path) -> None:
    """Rows of three devices, the whole layer, rows of two, and of four: losses and moments of one run."""
    ways = [vocabulary_schedule(3, 2, 1), one_f_one_b(2, 2), vocabulary_schedule(2, 2, 2), vocabulary_schedule(4, 2, 1)]
    whole = run(config_of(None, layers=4, tied=tied, schedule=one_f_one_b(1, 2), steps=8)).losses
    losses: dict[int, float] = {}
    for n, schedule in enumerate(ways, start=1):
        losses |= run(
            config_of(tmp_path, layers=4, tied=tied, schedule=schedule, steps=8), until=2 * n + (n < 4)
        ).losses
    assert losses == pytest.approx(whole, rel=1e-12)


def test_tied_rows_have_the_one_state_of_the_optimizer(tmp_path: Path) -> None:
    """The embedding is the rows of all devices, updated and written by them."""
    model = run(config_of(tmp_path, schedule=vocabulary_schedule(3, 2, 1), tied=True)).model
    [(stage, local)] = model.followers
    held = torch.cat([model.stages[s].module.get_parameter(ROWS) for s in range(3)])
    assert torch.equal(held, model.stages[stage].module.get_parameter(local))
    moments = [state["exp_avg"] for optimizer in model.optimizers.values() for state in optimizer.state.values()]
    assert sum(moment.numel() for moment in moments) == model.parameters
    path = final_path(tmp_path, STEPS)
    pieces = read_manifest(path).pieces
    assert NAME not in pieces
    assert torch.equal(read_tensor(path, pieces["embedding.byte.weight"]), held)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_one_weight(tmp_path: Path) -> None:
    """As it is, and in torch's own files."""
    model = run(config_of(tmp_path / "run", schedule=vocabulary_schedule(3, 2, 1), asynchronous=True)).model
    path, copy = final_path(tmp_path / "run", STEPS), tmp_path / "copy"
    assert to_torch(path, copy) == STEPS
    held = [model.stages[s].module.get_parameter(ROWS) for s in range(3)]
    assert [len(rows) for rows in held] == [86, 85, 85]
    moments = [model.optimizers[s].state[rows]["exp_avg"] for s, rows in enumerate(held)]
    readers = dcp.HuggingFaceStorageReader(str(path)), dcp.FileSystemReader(copy)
    for reader in readers:
        sizes = reader.read_metadata().state_dict_metadata
        names = [NAME, f"optimizer.state.{NAME}.exp_avg", f"optimizer.state.{NAME}.step"]
        loaded = {name: torch.empty(sizes[name].size, dtype=sizes[name].properties.dtype) for name in names}
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        for one, other in zip(loaded.values(), (torch.cat(held), torch.cat(moments), STEPS), strict=True):
            assert (one == other).all()


def test_a_device_reads_its_rows_alone(tmp_path: Path) -> None:
    """A file without any of its rows may be damaged, as that of another stage may."""
    model = run(config_of(tmp_path, schedule=vocabulary_schedule(3, 2, 1))).model
    path = final_path(tmp_path, STEPS)
    pieces = read_manifest(path).pieces[NAME]
    assert [(piece.file, piece.first) for piece in pieces] == [
        ("stage-0000.safetensors", 0),
        ("stage-0001.safetensors", 86),
        ("stage-0002.safetensors", 171),
    ]
    (path / "stage-0002.safetensors").unlink()
    held = torch.cat([model.stages[s].module.get_parameter(ROWS) for s in range(2)])
    assert torch.equal(read_tensor(path, pieces, range(80, 120)), held[80:120])
    with pytest.raises(FileNotFoundError):
        read_tensor(path, pieces, range(80, 172))


def by_columns(named: Any, config: Any) -> torch.optim.Optimizer:
    """SGD that also keeps a number for each column."""

    class ByColumns(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for parameter in (p for group in self.param_groups for p in group["params"]):
                self.state[parameter]["columns"] = torch.zeros(parameter.shape[-1])

    return ByColumns([parameter for _, parameter in named], lr=config.learning_rate)


def test_state_that_is_not_divided_by_rows_is_refused(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(f"{__name__}:by_columns")
    detail = f"the optimizer keeps {NAME}.columns of shape (32,) for rows of shape (128, 32), from which no state"
    with pytest.raises(CheckpointError, match=re.escape(detail)):
        run(config_of(tmp_path, schedule=vocabulary_schedule(2, 2, 1), optimizer=optimizer, steps=2))
