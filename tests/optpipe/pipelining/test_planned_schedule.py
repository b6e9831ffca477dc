"""What PlannedSchedule refuses, and what holds in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from instances.schedules import one_f_one_b, v_wave
from optpipe.errors import InputError, TrainingError
from optpipe.pipelining import PlannedSchedule
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from tests.optpipe.runtime.schedules import random_schedule


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stages(count: int, **options: object) -> list[PipelineStage]:
    cpu = torch.device("cpu")
    return [PipelineStage(nn.Linear(4, 4), s, count, cpu, **options) for s in range(count)]  # type: ignore[arg-type]


def on_one_device(count: int = 2, microbatches: int = 3) -> Schedule:
    stage = {"device": 0, "forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    stage |= {"activation_bytes": 1, "backward_weight_bytes": 1}
    data = {"format": "optpipe.problem/1", "microbatches": microbatches, "stages": [stage] * count}
    return random_schedule(Problem.from_data(data | {"devices": [{"memory_bytes": None}]}), seed=0)


def planned(**options: object) -> PlannedSchedule:
    return PlannedSchedule(stages(2), on_one_device(), loss_fn=nn.functional.mse_loss, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "schedule", "said"),
    [
        ([], on_one_device(), "at least one"),
        (3, on_one_device(), "num_stages is 3 but the schedule has 2 stages"),
        (2, one_f_one_b(2, 3), "has 1 ranks but the schedule has 2 devices"),
        (4, v_wave(2, 3), "has 1 ranks but the schedule has 2 devices"),
    ],
)
def test_stages_that_do_not_fit(found: int | list[PipelineStage], schedule: Schedule, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        PlannedSchedule(stages(found) if isinstance(found, int) else found, schedule)


def test_stages_that_are_not_those_of_this_rank() -> None:
    with pytest.raises(TrainingError, match=r"the stages of rank 0 are \[1\] but the schedule places \[0, 1\] there"):
        PlannedSchedule(stages(2)[1:], on_one_device())


def test_a_builder_of_weight_gradients() -> None:
    with pytest.raises(TrainingError, match="dw_builder is set"):
        PlannedSchedule(stages(2, dw_builder=lambda: lambda: None), on_one_device())


def test_a_file_that_is_no_schedule(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(on_one_device().problem.to_json())
    with pytest.raises(InputError, match="is a problem but a schedule is needed"):
        PlannedSchedule(stages(2), path)


X = torch.arange(24.0).reshape(6, 4)


@pytest.mark.parametrize(
    ("args", "options", "said"),
    [
        ((X[:2],), {"target": X[:2]}, "splits into 2 microbatches but the schedule has 3"),
        ((), {"arg_mbs": [(X,)], "target_mbs": [X]}, "arg_mbs has 1 entries but the schedule has 3 microbatches"),
        ((X,), {"target_mbs": [X] * 3}, "at once"),
        ((X,), {}, "target is missing"),
        ((X,), {"target": X, "losses": ()}, "losses is a tuple but must be a list"),
    ],
)
def test_arguments_that_do_not_fit(args: tuple[Tensor, ...], options: dict[str, object], said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        planned().step(*args, **options)  # type: ignore[arg-type]


def test_a_step_without_gradients() -> None:
    with torch.no_grad(), pytest.raises(TrainingError, match=r"Maybe call eval\(\)"):
        planned().step(X, target=X)


def test_without_a_loss_a_step_runs_forwards_only() -> None:
    schedule = PlannedSchedule(mine := stages(2), on_one_device())
    expected = mine[1].submod(mine[0].submod(X))
    assert torch.equal(schedule.step(X), expected)
    assert schedule.step(X, return_outputs=False) is None
    assert all(p.grad is None for stage in mine for p in stage.submod.parameters())


def test_a_layer_that_nothing_depends_on_has_no_gradient() -> None:
    mine = stages(2)
    mine[0].submod.unused = nn.Linear(4, 4)
    PlannedSchedule(mine, on_one_device(), loss_fn=nn.functional.mse_loss).step(X, target=X)
    assert mine[0].submod.weight.grad is not None
    assert mine[0].submod.unused.weight.grad is None


def test_after_a_failure_the_next_step_is_right() -> None:
    schedule = planned()
    with pytest.raises(TrainingError, match="failed at the first microbatch"):
        schedule.step(X[:, :3], target=X)
    schedule.step(X, target=X)
    with pytest.raises(TrainingError, match=r"failed at F0\.0"):
        schedule.step(X[:, :3], target=X)
    losses: list[Tensor] = []
    schedule.step(X, target=X, losses=losses)
    modules = [stage.submod for stage in schedule._stages]
    expected = [nn.functional.mse_loss(modules[1](modules[0](x)), x) for x in X.chunk(3)]
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))


class Forgetful(torch.autograd.Function):
    """x * weight, without the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class Scaled(nn.Linear):
    """Loses the share of its second microbatch."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y = x @ self.weight.T
        return Forgetful.apply(y, self.bias) if self.calls == 2 else y * self.bias


def test_a_lost_share_of_a_gradient_is_an_error() -> None:
    mine = stages(2)
    mine[1].submod = Scaled(4, 4)
    schedule = PlannedSchedule(mine, on_one_device(), loss_fn=nn.functional.mse_loss)
    with pytest.raises(
        TrainingError, match=r"stages\[1\]: the gradient of bias lacks the shares of microbatches \[1\]"
    ):
        schedule.step(X, target=X)
    mine[1].submod.calls = 0
    schedule.check_gradients = False
    schedule.step(X, target=X)


def test_a_loss_that_runs_layers_of_the_last_stage_backward_at_once() -> None:
    """As losses in chunks do, which never hold all logits: the head's gradients are there before any backward."""
    mine = stages(2)
    mine[1].submod = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    head = nn.Linear(4, 6)
    mine[1].submod.head = head
    mine[1].submod.forward = lambda x: mine[1].submod[1](mine[1].submod[0](x))

    class InChunks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, target: Tensor) -> Tensor:
            total, gradients = torch.zeros(()), []
            for part, wanted in zip(hidden.split(1), target.split(1), strict=True):
                with torch.enable_grad():
                    leaf = part.detach().requires_grad_()
                    loss = nn.functional.cross_entropy(head(leaf), wanted, reduction="sum")
                    loss.backward()
                total += loss.detach()
                gradients.append(leaf.grad)
            ctx.save_for_backward(torch.cat(gradients))
            return total

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient * ctx.saved_tensors[0], None

    target = torch.arange(6)
    schedule = PlannedSchedule(mine, on_one_device(), loss_fn=InChunks.apply, scale_grads=False)
    schedule.step(X, target=target)
    parameters = [p for stage in mine for p in stage.submod.parameters()]
    found = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    nn.functional.cross_entropy(head(mine[1].submod(mine[0].submod(X))), target, reduction="sum").backward()
    torch.testing.assert_close(found, [p.grad for p in parameters])
