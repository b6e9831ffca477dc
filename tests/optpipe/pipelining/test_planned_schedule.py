"""Refusals of PlannedSchedule, and its promises in one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from instances.schedules import OFFLOAD, one_f_one_b, v_wave
from optpipe.errors import InputError, TrainingError
from optpipe.ops import DeviceOrders, Op, Orders
from optpipe.pipelining import PlannedSchedule
from optpipe.pipelining.recorder import _HeldRecorder
from optpipe.problem import Problem
from optpipe.runtime import MemoryMeter
from optpipe.runtime.recorder import MemoryRecorder
from optpipe.runtime.weight_gradients.split import Deferred
from optpipe.schedule import Schedule
from solver.build import build_schedule
from tests.optpipe.compile.vocabulary import vocabulary_schedule
from tests.optpipe.runtime.chains import InParts
from tests.optpipe.runtime.schedules import random_schedule
from tests.recomputing import SELECTIVE, SELECTIVE_AND_OFFLOAD, random_executable
from tests.sliced_schedules import microbatch_by_microbatch, sliced_problem


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


def in_slices() -> Schedule:
    return microbatch_by_microbatch(sliced_problem([0, 0], 3, 2))


def planned(**options: object) -> PlannedSchedule:
    return PlannedSchedule(stages(2), on_one_device(), loss_fn=nn.functional.mse_loss, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "schedule", "said"),
    [
        ([], on_one_device(), "at least one"),
        (3, on_one_device(), "num_stages is 3 but the schedule has 2 stages"),
        (2, one_f_one_b(2, 3), "has 1 ranks but the schedule has 2 devices"),
        (4, v_wave(2, 3), "has 1 ranks but the schedule has 2 devices"),
        (
            2,
            in_slices(),
            "cuts sequences into 2 slices, which PlannedSchedule does not run.* Maybe train with",
        ),
        (1, vocabulary_schedule(1, 3, 1), "has the spread passes S, T, which PlannedSchedule does not run"),
    ],
)
def test_stages_that_do_not_fit(found: int | list[PipelineStage], schedule: Schedule, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        PlannedSchedule(stages(found) if isinstance(found, int) else found, schedule)


def test_a_running_schedule_is_not_replaced_by_one_with_slices() -> None:
    schedule = planned()
    with pytest.raises(TrainingError, match=r"the schedule does not fit: the schedule cuts sequences into 2 slices"):
        schedule.replan(in_slices())
    assert schedule.schedule.problem.slice_count == 1


def test_blocks_run_part_by_part() -> None:
    stage = {"device": 0, "forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    stage |= {"activation_bytes": 1, "backward_weight_bytes": 1}
    pairs = [{"forward_stage": f, "backward_stage": 1 - f, "us": 2} for f in range(2)]
    data = {"format": "optpipe.problem/1", "microbatches": 2, "stages": [stage] * 2, "overlaps": pairs}
    problem = Problem.from_data(data | {"devices": [{"memory_bytes": None}]})
    names = ("F0.0", "F1.0", "F0.1", "BW1.0", "F1.1", "BW0.0", "BW1.1", "BW0.1")
    ops = [Op(name.rstrip(".0123456789"), int(name[-3]), int(name[-1])) for name in names]
    orders = Orders([DeviceOrders(ops)], blocks={ops[2]: ops[3], ops[4]: ops[5]})
    begun: list[str] = []
    modules = [InParts(str(s), begun, nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.0)) for s in range(2)]
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    expected = nn.functional.mse_loss(nn.Sequential(*modules)(x), y)
    plain = torch.autograd.grad(expected, [p for module in modules for p in module.parameters()])
    begun.clear()
    found = [PipelineStage(module, s, 2, torch.device("cpu")) for s, module in enumerate(modules)]
    planned = build_schedule(problem, orders, 0.0, "by hand", 0.0)
    schedule, losses = PlannedSchedule(found, planned, loss_fn=nn.functional.mse_loss), list[Tensor]()
    output = schedule.step(x, target=y, losses=losses)
    gradients = [p.grad for module in modules for p in module.parameters()]
    torch.testing.assert_close(gradients, [*plain])
    torch.testing.assert_close(output, nn.Sequential(*modules)(x))
    torch.testing.assert_close(torch.stack(losses).mean(), expected.detach())
    together = ["B1.2", "B1.1", "F0.0", "F0.1", "B1.0", "F0.2"]
    assert any(begun[k : k + 6] == together for k in range(len(begun)))


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


def test_a_loss_that_is_kept_holds_one_number() -> None:
    """The scalar that mse_loss returns has a storage as large as the output, which would stay until the step ends."""
    losses: list[Tensor] = []
    planned().step(X, target=X, losses=losses)
    assert [loss.untyped_storage().nbytes() for loss in losses] == [4] * 3


def test_a_loss_of_several_terms_is_their_sum() -> None:
    def terms(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"error": nn.functional.mse_loss(output, target), "size": 0.1 * output.square().mean()}

    found = []
    for loss in (terms, lambda output, target: sum(terms(output, target).values())):
        torch.manual_seed(0)
        mine, losses = stages(2), list[Tensor]()
        PlannedSchedule(mine, on_one_device(), loss_fn=loss).step(X, target=X, losses=losses)
        found.append([*losses, *gradients(mine)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_parameter_that_stages_of_a_process_share_is_scaled_once() -> None:
    """Embedding and head of a V, tied: `.grad` is one tensor, and divided once by the number of microbatches."""
    torch.manual_seed(0)
    mine = stages(2)
    mine[1].submod.weight = mine[0].submod.weight
    PlannedSchedule(mine, on_one_device(), loss_fn=nn.functional.mse_loss).step(X, target=X)
    found = [grad.clone() for grad in gradients(mine)]
    for stage in mine:
        stage.submod.zero_grad()
    nn.functional.mse_loss(mine[1].submod(mine[0].submod(X)), X).backward()
    torch.testing.assert_close(found, gradients(mine))


def test_without_a_loss_a_step_runs_forwards_only() -> None:
    schedule = PlannedSchedule(mine := stages(2), on_one_device())
    # A CPU may round the rows of a larger batch otherwise: here they are those of the three microbatches.
    expected = torch.cat([mine[1].submod(mine[0].submod(x)) for x in X.chunk(3)])
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


def in_every_form(microbatches: int) -> Schedule:
    """Two stages on one device whose microbatches are kept, offloaded and recomputed, ahead and inside."""
    schedule = random_executable([0, 0], microbatches, seed={6: 2, 8: 0}[microbatches])
    assert {op.kind for op in schedule.orders.ops() if op.stage == 1} >= {"O", "R", "C", "CB", "CBW"}
    return schedule


class Drawing(nn.Module):
    """A stage that draws from several generators and keeps running statistics; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 4))
        self.calls, self.own = 0, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = nn.functional.dropout(self.layers(x), 0.5)
        return y * (1 + np.random.rand() + torch.rand((), generator=self.own))


def test_a_recomputation_draws_the_numbers_of_its_f_and_counts_nothing_twice() -> None:
    """Random numbers come from torch's generators, as layers run: the same in both schedules, where F are in order."""
    x, m = torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), 8
    schedule = in_every_form(m)
    kept = Orders([DeviceOrders([op for op in schedule.orders.ops() if op.kind == "F"])])
    kept.devices[0].compute.extend(Op("BW", s, i) for i in range(m) for s in (1, 0))
    plain = Problem.from_data(on_one_device(2, m).problem.to_data())
    found: list[tuple[Any, ...]] = []
    for one in (build_schedule(plain, kept, 0.0, "kept", 0.0), schedule):
        torch.manual_seed(0)
        np.random.seed(0)
        mine = [PipelineStage(Drawing(), s, 2, torch.device("cpu")) for s in range(2)]
        planned = PlannedSchedule(mine, one, loss_fn=lambda y, t: nn.functional.mse_loss(nn.functional.dropout(y), t))
        losses: list[Tensor] = []
        for _ in range(2):
            outputs = planned.step(x, target=x, losses=losses)
        tensors = [tensor for stage in mine for tensor in stage.submod.state_dict().values()]
        found.append((gradients(mine), losses, outputs, tensors, torch.rand(3)))
        assert sum(stage.submod.calls for stage in mine) == 2 * 2 * m, "nor is the forward counted that learns shapes"
    (one_gradients, *one_rest), (other_gradients, *other_rest) = found
    torch.testing.assert_close(one_gradients, other_gradients)  # one schedule adds them up after others
    torch.testing.assert_close(one_rest, other_rest, rtol=0, atol=0)


def block_by_block() -> Schedule:
    """As `in_every_form`, where it recomputes block by block."""
    schedule = random_executable([0, 0], 6, 2, [SELECTIVE, SELECTIVE_AND_OFFLOAD])
    assert {op.kind for op in schedule.orders.ops() if op.stage == 1} >= {"O", "R", "C", "CB", "CBW"}
    return schedule


def test_blocks_that_run_again_draw_the_numbers_of_their_f_and_count_nothing_twice() -> None:
    x, m = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), 6
    schedule = block_by_block()
    kept = Orders([DeviceOrders([op for op in schedule.orders.ops() if op.kind == "F"])])
    kept.devices[0].compute.extend(Op("BW", s, i) for i in range(m) for s in (1, 0))
    plain = Problem.from_data(on_one_device(2, m).problem.to_data())
    found: list[Any] = []
    for one in (build_schedule(plain, kept, 0.0, "kept", 0.0), schedule):
        torch.manual_seed(0)
        np.random.seed(0)
        mine = [PipelineStage(nn.Sequential(Drawing(), Drawing()), s, 2, torch.device("cpu")) for s in range(2)]
        planned = PlannedSchedule(mine, one, loss_fn=nn.functional.mse_loss)
        losses: list[Tensor] = []
        for _ in range(2):
            outputs = planned.step(x, target=x, losses=losses)
        buffers = [buffer for stage in mine for buffer in stage.submod.buffers()]
        found.append((gradients(mine), losses, outputs, buffers, torch.rand(3)))
    (one_gradients, *one_rest), (other_gradients, *other_rest) = found
    torch.testing.assert_close(one_gradients, other_gradients)  # one schedule adds them up after others
    torch.testing.assert_close(one_rest, other_rest, rtol=0, atol=0)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_loss_that_runs_layers_of_the_last_stage_backward_at_once(recomputed: bool) -> None:
    """As losses in chunks do, which never hold all logits: the head's gradients are there before any backward.

    Such a loss runs once for each microbatch, also where the stage is recomputed.
    """
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
    planned = in_every_form(6) if recomputed else on_one_device()
    schedule = PlannedSchedule(mine, planned, loss_fn=InChunks.apply, scale_grads=False)
    schedule.step(X, target=target)
    parameters = [p for stage in mine for p in stage.submod.parameters()]
    found = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    nn.functional.cross_entropy(head(mine[1].submod(mine[0].submod(X))), target, reduction="sum").backward()
    torch.testing.assert_close(found, [p.grad for p in parameters])


def blocks(count: int = 2) -> list[PipelineStage]:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(count)]
    return [PipelineStage(part, s, count, torch.device("cpu")) for s, part in enumerate(parts)]


def sharded(**options: object) -> list[PipelineStage]:
    """As `blocks`, each layer with weights wrapped by itself, and then the rest."""
    mine, mesh = blocks(), init_device_mesh("cpu", (1,))
    for stage in mine:
        for layer in (stage.submod[1], stage.submod[3], stage.submod):
            fully_shard(layer, mesh=mesh, **options)  # type: ignore[arg-type]
    return mine


def gradients(mine: list[PipelineStage]) -> list[Tensor]:
    found = [p.grad for stage in mine for p in stage.submod.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found if grad is not None]


def offloading() -> Schedule:
    """Two stages on one device that split their backwards, each of whose activations leaves."""
    stage = {"device": 0, "forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    stage |= {"activation_bytes": 2, "backward_weight_bytes": 1, "offload": OFFLOAD}
    data = {"format": "optpipe.problem/1", "microbatches": 3, "stages": [stage] * 2}
    problem = Problem.from_data(data | {"devices": [{"memory_bytes": None}]})

    def ops(*kinds: tuple[str, int]) -> list[Op]:
        return [Op(kind, s, i) for kind, s in kinds for i in range(3)]

    compute = ops(("F", 0), ("F", 1), ("B", 1), ("B", 0), ("W", 1), ("W", 0))
    device = DeviceOrders(compute, ops(("O", 0), ("O", 1)), ops(("R", 1), ("R", 0)))
    return build_schedule(problem, Orders([device], {}), 0.0, "by hand", 0.0)


@pytest.mark.parametrize("reshard", [False, True])
def test_gathered_parameters_never_leave_to_the_host(reshard: bool) -> None:
    moved = []
    for mine in (blocks(), sharded(reshard_after_forward=reshard)):
        schedule = PlannedSchedule(mine, offloading(), loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            schedule.step(X, target=X)
        assert schedule._pipeline is not None
        moved.append((schedule._pipeline.host_slabs[0].peak_bytes, gradients(mine)))
    (plain_bytes, plain), (sharded_bytes, found) = moved
    assert sharded_bytes == plain_bytes > 0
    torch.testing.assert_close(found, plain)


class Held:
    """Observer of a step: the bytes that each F and each C adds to what is held."""

    def __init__(self) -> None:
        self.meter = MemoryMeter()
        self.recorder = MemoryRecorder(self.meter)

    def begin_step(self) -> tuple[MemoryMeter, MemoryRecorder]:
        return self.meter, self.recorder

    def end_step(self) -> None:
        pass

    def added(self) -> dict[str, int]:
        pairs = pairwise(self.recorder.uses())
        return {str(u.action.key): u.after_bytes - b.after_bytes for b, u in pairs if u.action.kind in ("F", "C")}


@pytest.mark.parametrize("reshard", [False, True])
def test_blocks_that_run_again_under_fsdp_hold_what_they_hold_without(reshard: bool) -> None:
    """A block that runs again keeps its input alone; C makes what is between the layers of both, 4 x 16 floats each."""
    x, mesh = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), init_device_mesh("cpu", (1,))
    added, found = [], []
    for wrapped in (False, True):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(4)]
        parts = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
        for part in [*layers, *parts] if wrapped else ():
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        mine = [PipelineStage(part, s, 2, torch.device("cpu")) for s, part in enumerate(parts)]
        schedule = PlannedSchedule(mine, block_by_block(), loss_fn=nn.functional.mse_loss)
        schedule.step(x, target=x)
        schedule.observer = held = Held()
        schedule.step(x, target=x, return_outputs=False)
        assert held.meter.live_bytes[0] == 0
        added.append(held.added())
        found.append(gradients(mine))
    assert added[0] == added[1]
    recomputed = {f"F{s}.{i}" for s, i in schedule.program.recomputed}
    for stage in "01":
        forwards = {op: size for op, size in added[1].items() if op.startswith(f"F{stage}")}
        [kept] = {size for op, size in forwards.items() if op not in recomputed}
        assert {kept - size for op, size in forwards.items() if op in recomputed} == {2 * 4 * 16 * 4}
    assert {size for op, size in added[1].items() if op.startswith("C")} == {2 * 4 * 16 * 4}
    torch.testing.assert_close(*found)


def test_replicate() -> None:
    mine, expected, mesh = blocks(), blocks(), init_device_mesh("cpu", (1,))
    for stage in mine:
        for layer in (stage.submod[1], stage.submod):
            replicate(layer, mesh=mesh)
    for found in (mine, expected):
        PlannedSchedule(found, offloading(), loss_fn=nn.functional.mse_loss).step(X, target=X)
    assert isinstance(mine[0].submod[1], Deferred)
    torch.testing.assert_close(gradients(mine), gradients(expected))


def test_after_a_failure_under_fsdp_nothing_of_the_failed_step_is_left() -> None:
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("no loss")
        return nn.functional.mse_loss(output, target)

    mine = sharded(reshard_after_forward=True)
    schedule = PlannedSchedule(mine, offloading(), loss_fn=loss)
    with pytest.raises(TrainingError, match="no loss"):
        schedule.step(X, target=X)
    assert not gradients(mine)
    schedule.step(X, target=X)
    expected = blocks()
    PlannedSchedule(expected, offloading(), loss_fn=nn.functional.mse_loss).step(X, target=X)
    torch.testing.assert_close(gradients(mine), gradients(expected))


@pytest.mark.parametrize("whole", [False, True])
def test_mixed_precision_of_fsdp(whole: bool) -> None:
    """Weights and activations in bfloat16, gradients added up and reduced in float32.

    In a group of a whole stage the norm has its gradient after B, the linear layers have theirs after W.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mine, expected = blocks() if whole else sharded(mp_policy=policy), blocks()
    for stage in mine if whole else ():
        fully_shard(stage.submod, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.float(), target)

    PlannedSchedule(mine, offloading(), loss_fn=loss).step(X / 24, target=X)
    PlannedSchedule(expected, offloading(), loss_fn=loss).step(X / 24, target=X)
    found, wanted = gradients(mine), gradients(expected)
    assert {gradient.dtype for gradient in found} == {torch.float32}
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max() / other.abs().max()) < 0.03


def side_by_side(*, apart: bool) -> Schedule:
    """Two stages on one device with each W right after its B, or after the next stage's B."""
    stage = {"device": 0, "forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    stage |= {"activation_bytes": 2, "backward_weight_bytes": 1}
    data = {"format": "optpipe.problem/1", "microbatches": 3, "stages": [stage] * 2}
    problem = Problem.from_data(data | {"devices": [{"memory_bytes": None}]})
    backwards = ("B1", "B0", "W1", "W0") if apart else ("B1", "W1", "B0", "W0")
    compute = [Op(kind, int(s), i) for i in range(3) for kind, s in ("F0", "F1", *backwards)]
    return build_schedule(problem, Orders([DeviceOrders(compute)], {}), 0.0, "by hand", 0.0)


def test_compiled_stages_fuse_what_stands_side_by_side_and_refuse_the_rest() -> None:
    found, expected = blocks(), blocks()
    found[1].submod.compile(backend="eager")
    PlannedSchedule(expected, side_by_side(apart=False), loss_fn=nn.functional.mse_loss).step(X, target=X)
    schedule = PlannedSchedule(found, side_by_side(apart=False), loss_fn=nn.functional.mse_loss)
    schedule.step(X, target=X)
    assert {a.kind for a in schedule.program.actions() if a.stage == 1} == {"GATHER", "F", "BW", "REDUCE"}
    assert {a.kind for a in schedule.program.actions() if a.stage == 0} == {"GATHER", "F", "B", "W", "REDUCE"}
    torch.testing.assert_close(gradients(found), gradients(expected))
    with pytest.raises(TrainingError, match=r"is compiled by torch\.compile"):
        PlannedSchedule(found, side_by_side(apart=True), loss_fn=nn.functional.mse_loss).step(X, target=X)


def test_activation_checkpoints() -> None:
    """Torch's own split backward runs a selective checkpoint twice, which it does not allow.

    What a selective checkpoint keeps leaves with the rest, and memory with it.
    """
    selective = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    class Checkpointed(nn.Sequential):
        contexts: dict[str, Any] = {}

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, use_reentrant=False, **self.contexts)
            return y

    plain, full, kept = blocks(), blocks(), blocks()
    for stage in (*full, *kept):
        stage.submod = Checkpointed(*stage.submod)
    for stage in kept:
        stage.submod.contexts = {"context_fn": selective}
    moved, held = [], []
    for mine in (plain, full, kept):
        for stage in mine:
            stage.submod.zero_grad()
        schedule = PlannedSchedule(mine, in_every_form(6), loss_fn=nn.functional.mse_loss)
        schedule.step(X, target=X, return_outputs=False)
        assert schedule._pipeline is not None
        torch.testing.assert_close(gradients(mine), gradients(plain))
        for stage in mine:
            stage.submod.zero_grad()
        schedule = PlannedSchedule(mine, offloading(), loss_fn=nn.functional.mse_loss)
        meter = MemoryMeter()
        rows = _HeldRecorder(meter)
        schedule.observer = SimpleNamespace(begin_step=lambda m=meter, r=rows: (m, r), end_step=lambda: None)
        schedule.step(X, target=X, return_outputs=False)
        torch.testing.assert_close(gradients(mine), gradients(plain))
        assert schedule._pipeline is not None
        moved.append(schedule._pipeline.host_slabs[0].peak_bytes)
        held.append({str(row.key): row.before_bytes - row.after_bytes for row in rows.rows}["RELEASE0.0"])
    assert held[2] - held[1] == 2 * 16 * 4, "the first layer's output; the second's is on its way to the next stage"
    assert moved[2] > moved[1]
    assert moved[0] > moved[1]
