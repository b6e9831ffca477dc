"""Stages that torch.compile has taken, whole or block by block, kept, offloaded and recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from optpipe.errors import TrainingError
from optpipe.runtime import MemoryMeter, Stage
from tests.optpipe.runtime.stages import F_BW, Run, backward_of, bytes_of_way, run_step
from tests.sample import some

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it

M, ROWS, WIDTH = 3, 4, 8
MESSAGES = {i: torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(M)}
WAYS = {
    "ahead": ("F", "C", "BW"),
    "inside": ("F", "CBW"),
    "offloaded, ahead": ("F", "O", "R", "C", "BW"),
    "offloaded, inside": ("F", "O", "R", "CBW"),
}


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A residual block with running statistics and dropout, whose output autograd saves."""

    def __init__(self, *, plain: bool, breaks: bool) -> None:
        super().__init__()
        self.norm = nn.Identity() if plain else nn.BatchNorm1d(WIDTH, momentum=None)
        self.drop = nn.Identity() if plain else nn.Dropout(0.5)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.wide(self.norm(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.relu(x + self.narrow(self.drop(y)))


class Model(nn.Module):
    """Blocks between layers of other kinds."""

    def __init__(self, blocks: int = 2, *, plain: bool = False, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(plain=plain, breaks=breaks) for _ in range(blocks)])
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.leave(x))


def compiled(model: Model, how: str, backend: Any = "aot_eager", **options: Any) -> nn.Module:
    """The model as torch.compile takes it: `whole` or `blocks`, by a wrapper ("wrapped") or by `compile()`."""
    what, by = how.split(", ")
    if what == "whole" and by == "wrapped":
        whole: nn.Module = torch.compile(model, backend=backend, **options)
        return whole
    for n, part in enumerate(model.blocks) if what == "blocks" else [(0, model)]:
        if by == "wrapped":
            model.blocks[n] = torch.compile(part, backend=backend, **options)
        else:
            part.compile(backend=backend, **options)
    return model


HOW = ("whole, wrapped", "whole, itself", "blocks, wrapped", "blocks, itself")


def together(way: tuple[str, ...]) -> list[tuple[str, int]]:
    return [(kind, i) for kind in way for i in range(M)]


def values(run: Run) -> list[Tensor]:
    return [*run.outputs.values(), *run.input_gradients.values(), *run.weight_gradients]


@pytest.mark.parametrize(
    ("how", "mode"),
    some(
        [
            *((how, "full") for how in HOW),
            *((how, mode) for how in HOW if how.startswith("blocks") for mode in ("selective", "selective-groups-2")),
        ],
        share=4,
    ),
)
def test_recomputed_gradients_and_statistics_are_those_of_the_uncompiled_stage_that_keeps(how: str, mode: str) -> None:
    """With dropout; and with one graph each for all microbatches and ways: none is compiled anew."""
    plain, counter = Model(), CompileCounterWithBackend("aot_eager")
    module = compiled(Model(), how, counter)
    kept, stage = Stage(plain, seed=7), Stage(module, seed=7)
    graphs = 0
    for way in WAYS.values():
        expected, found = run_step(kept, together(F_BW), MESSAGES), run_step(stage, together(way), MESSAGES, mode=mode)
        for one, other in zip(values(expected), values(found), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(plain.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert counter.frame_count == (graphs or counter.frame_count) > 0
        graphs = counter.frame_count


@pytest.mark.parametrize("how", ["whole, itself", "blocks, itself"])
def test_graph_breaks_make_several_graphs_of_a_block_that_run_again_together(how: str) -> None:
    stage, kept = Stage(compiled(Model(breaks=True), how), seed=7), Stage(Model(), seed=7)
    for mode in ("full", "selective") if how.startswith("blocks") else ("full",):
        for way in ("ahead", "inside"):
            expected = run_step(kept, together(F_BW), MESSAGES)
            found = run_step(stage, together(WAYS[way]), MESSAGES, mode=mode)
            for one, other in zip(values(expected), values(found), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_microbatches_run_again_in_any_order_with_their_own_random_numbers() -> None:
    ops = [("F", 0), ("F", 1), ("C", 0), ("F", 2), ("BW", 0), ("CBW", 1), ("C", 2), ("BW", 2)]
    for how, mode in (("whole, itself", "full"), ("blocks, itself", "selective")):
        kept = run_step(Stage(compiled(Model(), how), seed=7), together(F_BW), MESSAGES)
        found = run_step(Stage(compiled(Model(), how), seed=7), ops, MESSAGES, mode=mode)
        assert all(torch.equal(one, other) for one, other in zip(values(kept), values(found), strict=True))


class SeeingMeter(MemoryMeter):
    """Sees the operators of compiled graphs, which a backend leaves to torch one by one: aot_eager does."""

    def __enter__(self) -> SeeingMeter:
        super().__enter__()
        self._uncompiled.close()
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def test_counting_memory_neither_compiles_nor_keeps_from_being_compiled() -> None:
    counter, meter = CompileCounterWithBackend("aot_eager"), MemoryMeter()
    stage = Stage(compiled(Model(), "blocks, itself", counter))
    graphs = []
    for counts in (True, False, True, False):
        with meter if counts else nullcontext():
            run_step(stage, together(F_BW), MESSAGES)
        graphs.append(counter.frame_count)
        output = stage.module.blocks[0](MESSAGES[0])
        assert type(output.grad_fn).__name__ == "CompiledFunctionBackward"
    assert graphs[0] == 0 < graphs[1] == graphs[2] == graphs[3]
    assert meter.live_bytes == {}


def test_compiled_blocks_hold_their_inputs_alone_and_run_again_one_at_a_time() -> None:
    """As blocks do that are not compiled: a message each after F; within the backward one block at a time."""
    stages = {n: Stage(compiled(Model(n, plain=True), "blocks, itself")) for n in (2, 4)}
    message, wide = ROWS * WIDTH * 4, 4 * ROWS * WIDTH * 4
    for stage in stages.values():  # compiled before anything is counted
        run_step(stage, [("F", 0), ("BW", 0)], MESSAGES)
    found = {
        (n, kind, mode): bytes_of_way(stage, SeeingMeter(), MESSAGES[0], kind, mode)
        for n, stage in stages.items()
        for kind, mode in (("BW", None), ("C", "selective"), ("CBW", "selective"), ("CBW", "full"))
    }
    assert (found[4, "BW", None][0] - found[2, "BW", None][0]) / 2 >= message + wide
    assert (found[4, "CBW", "selective"][0] - found[2, "CBW", "selective"][0]) / 2 == message
    assert (found[4, "C", "selective"][1] - found[2, "C", "selective"][1]) / 2 >= wide
    assert found[4, "CBW", "selective"][2] == found[2, "CBW", "selective"][2] < found[4, "CBW", "full"][2]
    assert found[4, "CBW", "full"][0] == 2 * message, "the input, and the gradient of the output"


def test_blocks_within_a_compiled_whole_are_refused_by_name() -> None:
    for how in ("whole, wrapped", "whole, itself"):
        stage = Stage(compiled(Model(), how))
        assert stage.has_mode("full")
        assert not stage.has_mode("selective")
        with pytest.raises(TrainingError, match=r"blocks\.0 within .* torch\.compile .* Maybe .* the mode 'full'"):
            stage.forward_of("selective")
    stage = Stage(compiled(Model(), "blocks, itself"))
    with pytest.raises(TrainingError, match=r"has blocks\.0\.wide within blocks\.0, which torch\.compile"):
        stage.forward_of("selective:wide")


def test_a_part_of_a_block_may_be_compiled_alone() -> None:
    module = Model()
    for block in module.blocks:
        block.wide.compile(backend="aot_eager")
    kept = run_step(Stage(Model(), seed=7), together(F_BW), MESSAGES)
    for mode in ("selective", "selective:wide"):
        found = run_step(Stage(module, seed=7), together(WAYS["inside"]), MESSAGES, mode=mode)
        for one, other in zip(values(kept), values(found), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_block_that_is_compiled_anew_between_its_runs_is_refused() -> None:
    """A second length makes torch compile for any length: then the first microbatch has the graph of another run."""
    longer = MESSAGES | {1: torch.randn(ROWS + 2, WIDTH)}
    stage = Stage(compiled(Model(plain=True), "blocks, itself"))
    with pytest.raises(TrainingError, match=r"another graph of torch\.compile .* Maybe compile it with dynamic=True"):
        run_step(stage, together(WAYS["ahead"]), longer, mode="selective")
    kept = run_step(Stage(Model(plain=True)), together(F_BW), longer)
    stage = Stage(compiled(Model(plain=True), "blocks, itself", dynamic=True))
    found = run_step(stage, together(WAYS["ahead"]), longer, mode="selective")
    for one, other in zip(values(kept), values(found), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


OF_INDUCTOR = "ignore:.torch.jit.script_method. is deprecated"  # in its own passes


@pytest.mark.filterwarnings(OF_INDUCTOR)
@pytest.mark.slow
@pytest.mark.parametrize(("how", "mode"), [("whole, itself", "full"), ("blocks, itself", "selective")])
def test_inductor(how: str, mode: str) -> None:
    """Its kernels draw dropout masks of their own, which are those of F again; without dropout all is as uncompiled."""
    for plain in (True, False):
        kept = Stage(Model(plain=True) if plain else compiled(Model(), how, "inductor"), seed=7)
        stage = Stage(compiled(Model(plain=plain), how, "inductor"), seed=7)
        for way in WAYS.values():
            expected, found = (
                run_step(kept, together(F_BW), MESSAGES),
                run_step(stage, together(way), MESSAGES, mode=mode),
            )
            for one, other in zip(values(expected), values(found), strict=True):
                if plain:
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(one, other)


def allocated_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Net bytes that torch's allocator on the CPU has given within a call, and their peak: kernels of any compiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    levels = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return levels[-1], max(levels)


@pytest.mark.filterwarnings(OF_INDUCTOR)
@pytest.mark.slow
def test_inductor_holds_what_uncompiled_blocks_hold() -> None:
    """So what a meter counts of uncompiled code plans for compiled blocks, but for what the compiler saves instead.

    Of ReLU that is a mask of booleans beside its output. A peak may be higher by a tensor.
    """
    found = []
    for module in (Model(4, plain=True), compiled(Model(4, plain=True), "blocks, itself", "inductor")):
        stage, ways = Stage(module), {}
        run_step(stage, [("F", 0), ("BW", 0)], MESSAGES)  # compiles
        for mode, kinds in ((None, ("BW",)), ("full", ("CBW",)), ("selective", ("C", "BW")), ("selective", ("CBW",))):
            forward = partial(stage.forward_of(mode), 0, MESSAGES[0].clone(), None, False, True)
            ways[mode, "F"] = allocated_bytes(lambda run=forward: run() is None)
            for kind in kinds:
                gradient = (torch.ones(ROWS, WIDTH),) if kind != "C" else ()
                run = partial(stage.recompute if kind == "C" else backward_of(stage, kind), 0, *gradient)
                ways[mode, kind] = allocated_bytes(lambda run=run: run() is None)
        found.append(ways)
    plain, other = found
    masks = 4 * ROWS * WIDTH
    for way, (net, peak) in plain.items():
        made = {(None, "F"): masks, (None, "BW"): -masks, ("selective", "C"): masks, ("selective", "BW"): -masks}
        assert other[way][0] == net + made.get(way, 0), way
        assert other[way][1] <= peak + ROWS * 4 * WIDTH * 4, way
