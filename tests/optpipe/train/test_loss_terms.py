"""Losses of several terms: their sum is trained, and each is reported by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instances.schedules import one_f_one_b, v_wave
from optpipe.cli.train_report import figures_text
from optpipe.errors import RunFailedError
from optpipe.schedule import Schedule, schedule_text
from optpipe.train import CheckpointConfig, ModelConfig, OptimizerConfig, OutputConfig, TrainingConfig, train
from optpipe.train.output import figures
from tests.optpipe.train.cases import schedules
from tests.optpipe.train.reports import step
from tests.ranks import RunRanks

WORKER = Path(__file__).parents[1] / "cli" / "main_worker.py"
HERE = "tests.optpipe.train.test_loss_terms"
ROWS, WIDTH, M = 6, 8, 4


class Balanced(nn.Module):
    """A layer that adds how unevenly it uses its outputs to a term that goes from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, message: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
        known = isinstance(message, dict)
        y = self.layer(message["hidden"] if known else message).tanh()
        balance = y.square().mean(0).var()
        return {"hidden": y, "balance": message["balance"] + balance if known else balance}


def terms(output: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    error = nn.functional.mse_loss(output["hidden"], target)
    return {"prediction": error, "balance": 0.5 * output["balance"]}


def summed(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return sum(terms(output, target).values(), torch.zeros((), dtype=torch.float64))


def named(count: int = 2, loss: Any = terms) -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    [inputs, *_], [target, *_] = batch(0)
    return [Balanced() for _ in range(count)], inputs, target, loss


def named_in_4() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    return named(4)


def of_one_number() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    return named(2, summed)


def batch(number: int, count: int = M) -> tuple[list[Tensor], list[Tensor]]:
    draws = torch.Generator().manual_seed(number)
    drawn = [torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=draws) for _ in range(count)]
    return [x for x, _ in drawn], [y for _, y in drawn]


def config_of(schedule: Schedule, model: str = "named", **options: Any) -> TrainingConfig:
    config = TrainingConfig(
        schedule,
        ModelConfig(f"{HERE}:{model}", data=f"{HERE}:batch"),
        OptimizerConfig(learning_rate=1e-2),
        steps=3,
    )
    return replace(config, **options)


def plain_terms() -> dict[str, float]:
    """Means over the batch of step 0, with the weights that `named` is built with."""
    torch.manual_seed(0)
    stages, *_ = named()
    found = [terms(stages[1](stages[0](x)), y) for x, y in zip(*batch(0), strict=True)]
    return {name: torch.stack([term[name] for term in found]).mean().item() for name in found[0]}


@pytest.mark.parametrize("name", ["linear", "linear, offload", "recomputed"])
def test_the_sum_of_the_terms_is_trained_and_each_is_reported(name: str) -> None:
    schedule = schedules(2)[name]
    result = train(config_of(schedule, check=True))
    assert result.check is not None
    assert result.check.failures == ()
    assert result.losses == train(config_of(schedule, "of_one_number")).losses
    assert [*result.loss_terms] == ["prediction", "balance"]
    assert {name: values[0] for name, values in result.loss_terms.items()} == pytest.approx(plain_terms(), rel=1e-12)
    assert [sum(of_step) for of_step in zip(*result.loss_terms.values(), strict=True)] == pytest.approx(
        result.losses, rel=1e-12
    )


def test_terms_do_not_depend_on_placement_runs_in_a_step_or_a_resumed_run(tmp_path: Path) -> None:
    expected = train(config_of(one_f_one_b(4, M), "named_in_4")).loss_terms
    in_two_runs = train(config_of(one_f_one_b(4, M // 2), "named_in_4", accumulate=2)).loss_terms
    resumed = config_of(v_wave(2, M), "named_in_4", checkpoints=CheckpointConfig(tmp_path))
    first, second = (train(replace(resumed, steps=steps)).loss_terms for steps in (1, 3))
    for name, values in expected.items():
        assert in_two_runs[name] == pytest.approx(values, rel=1e-12)
        assert first[name] + second[name] == pytest.approx(values, rel=1e-12)


@pytest.mark.torchrun
def test_every_process_learns_the_terms(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Two replicas in four processes, of which two have a loss, and updates that wait for nothing."""
    (tmp_path / "s.json").write_text(schedule_text(one_f_one_b(2, M // 2)))
    options = ["--schedule", f"{tmp_path}/s.json", "--model", f"{HERE}:named", "--data", f"{HERE}:batch"]
    more = ["--steps", "3", "--learning-rate", "1e-2", "--data-parallel", "2", "--metrics", f"{tmp_path}/m.jsonl"]
    found = json.loads(run_ranks(WORKER, 4, "train", *options, *more, "--json"))
    expected = train(config_of(one_f_one_b(2, M)))
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    for name, values in expected.loss_terms.items():
        assert found["loss_terms"][name] == pytest.approx(values, rel=1e-12)
        assert [line["loss_terms"][name] for line in lines] == found["loss_terms"][name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_term_is_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of(one_f_one_b(2, M), output=OutputConfig(tensorboard=tmp_path))
    result = train(config)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name, values in result.loss_terms.items():
        assert [entry.value for entry in events.Scalars(f"loss/{name}")] == pytest.approx(values, rel=1e-6)
    report = step(1, loss=3.0, loss_terms={"prediction": 2.5, "balance": 0.5})
    assert figures(report)["loss/balance"] == 0.5
    assert figures_text(report).startswith("loss 3.0000 (prediction 2.5000, balance 0.5000)  ")
    assert ("loss, balance", f"{result.loss_terms['balance'][0]:.4f} -> {result.loss_terms['balance'][-1]:.4f}") in (
        result.summary().facts
    )


def by_rows(output: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    return {"rows": (output["hidden"] - target).square().mean(1)}


def changing(output: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    found = terms(output, target)
    return found if torch.equal(target, batch(0)[1][0]) else {"other": found["prediction"]}


def of_nothing(_output: dict[str, Tensor], _target: Tensor) -> dict[str, Tensor]:
    return {}


def build_by_rows() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    return named(2, by_rows)


def build_changing() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    return named(2, changing)


def build_of_nothing() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    return named(2, of_nothing)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("build_by_rows", r"a tensor of shape \[6\] as its term 'rows', but must return one number.* Maybe take"),
        ("build_changing", "microbatch 1 has the terms other, but that of the first had prediction, balance"),
        ("build_of_nothing", "the loss returns 0 terms, but must return 1 to 16"),
    ],
)
def test_terms_that_cannot_be_added_up(model: str, said: str) -> None:
    with pytest.raises(RunFailedError, match=said):
        train(config_of(one_f_one_b(2, M), model))
