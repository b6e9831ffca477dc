"""The beginning of a step, which may have to be dropped: where it ends, and that dropping it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from math import prod
from random import Random

import pytest
import torch
from torch import Tensor, nn

from instances import uniform
from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import Action, Program, compile_schedule
from optpipe.compile.program import SENDS, matching_receive, matching_send
from optpipe.compile.validation_point import validation_points
from optpipe.errors import TrainingError
from optpipe.runtime import Mailbox, MemoryMeter, Pipeline, Stage
from optpipe.schedule import Schedule
from solver.build import build_schedule
from solver.methods import METHODS
from tests.optpipe.runtime.chains import M, batch, chain, gradients, specs, stages_of
from tests.optpipe.runtime.rendezvous import Rendezvous
from tests.optpipe.runtime.schedules import random_placement, random_schedule
from tests.sample import some

DTYPE = torch.float64
GROUPS, A_GROUP = 10, 8


@cache
def program_of(seed: int) -> Program:
    """A random placement, order, mix of BW and B + W, set of offloads and waits."""
    return compile_schedule(random_schedule(random_placement(Random(seed), microbatches=M), seed))


def programs(group: int) -> Iterator[Program]:
    return map(program_of, range(group * A_GROUP, (group + 1) * A_GROUP))


def published(method: str, *, v_shape: bool = False) -> Schedule:
    problem = uniform(4, 8, v_shape=v_shape)
    orders = METHODS[method].orders
    assert orders is not None
    return build_schedule(problem, orders(problem), 0.0, method, 0.0)


def is_right(program: Program, points: Sequence[int]) -> bool:
    """True if lists cut there hold no backward, and both halves of every message or none."""
    kept = [a for actions, point in zip(program.devices, points, strict=True) for a in actions[:point]]
    keys = {action.key for action in kept}
    return not any(a.kind in ("B", "BW", "W", "REDUCE") or (a.peer is not None and half(a) not in keys) for a in kept)


def half(action: Action) -> object:
    return matching_receive(action.key) if action.kind in SENDS else matching_send(action.key)


@pytest.mark.parametrize("group", some(range(GROUPS)))
def test_no_message_is_half_before_the_points(group: int) -> None:
    assert all(is_right(program, validation_points(program)) for program in programs(group))


def test_the_points_are_the_latest_of_all_that_are_right() -> None:
    tried = 0
    for program in map(program_of, range(60)):
        lengths = [range(len(actions) + 1) for actions in program.devices]
        if prod(map(len, lengths)) <= 2000:
            right = [points for points in product(*lengths) if is_right(program, points)]
            assert validation_points(program) == tuple(map(max, zip(*right, strict=True)))
            tried += 1
    assert tried > 10


@pytest.mark.parametrize(("method", "v_shape"), [("1f1b", False), ("zb-h1", False), ("zb-h2", False), ("zb-v", True)])
def test_published_schedules_wait_no_earlier_than_for_their_last_forward_of_the_warm_up(
    method: str, v_shape: bool
) -> None:
    """Nothing is lost by keeping messages whole: all forwards before the first backward are before the point."""
    program = compile_schedule(published(method, v_shape=v_shape))
    for actions, point in zip(program.devices, validation_points(program), strict=True):
        kinds = [action.kind for action in actions]
        warm_up = min(kinds.index(kind) for kind in ("B", "BW") if kind in kinds)
        assert kinds[:point].count("F") == kinds[:warm_up].count("F") > 0


class Watch:
    """Meter of the bytes that are alive on every device when an action begins."""

    def __init__(self, meter: MemoryMeter) -> None:
        self.meter, self.seen = meter, list[tuple[Action, int]]()

    def begin(self, _device: int, action: Action, _stream: object = None, /) -> None:
        self.seen.append((action, sum(self.meter.live_bytes.values())))

    def waited(self) -> None: ...

    def end(self) -> None: ...


@pytest.mark.parametrize("group", some(range(GROUPS)))
def test_a_dropped_beginning_leaves_nothing_and_changes_no_bit(group: int) -> None:
    """It was made with wrong weights; then every byte, slab and message of it is gone before it is made anew."""
    for program in programs(group):
        drop_and_compare(program)


def drop_and_compare(program: Program) -> None:
    count = len(program.placement)
    modules, (inputs, targets) = chain(count, DTYPE), batch(count, DTYPE)
    transport = Mailbox()
    pipeline = Pipeline(program, stages_of(modules), range(len(program.devices)), transport, specs(count, DTYPE))
    losses, expected = pipeline.run(inputs, targets, plain := MemoryMeter()), gradients(modules)
    watch = Watch(meter := MemoryMeter())
    back, dropped = spoil(modules), list[int]()

    def validate() -> bool:
        assert are_equal(gradients(modules), expected), "those of the step before, until now"
        dropped.append(len(watch.seen))
        back()
        return False

    assert torch.equal(pipeline.run(inputs, targets, meter, watch, validate=validate), losses)
    assert are_equal(gradients(modules), expected)
    assert dropped == [sum(validation_points(program))]
    first_again, alive_bytes = watch.seen[dropped[0]]
    assert first_again == watch.seen[0][0]
    assert alive_bytes == 0, "of what was dropped"
    assert meter.peak_bytes == plain.peak_bytes, "as planned, though a beginning was dropped"
    assert not any(meter.live_bytes.values())
    assert not any(slabs.in_use_bytes for slabs in pipeline.host_slabs.values())
    assert not any([*transport._sent.values(), *transport._posted.values()])


def test_an_error_before_the_point_leaves_nothing_either() -> None:
    """Nor does a verdict that ends the run."""
    program = compile_schedule(one_f_one_b(3, M, moved=[(0, 0), (1, 1)]))
    modules, (inputs, targets) = chain(3, DTYPE), batch(3, DTYPE)
    pipeline = Pipeline(program, stages_of(modules), range(3), Mailbox(), specs(3, DTYPE))
    pipeline.run(inputs, targets)
    expected = gradients(modules)
    modules[1][-1].calls_left = 2  # type: ignore[union-attr, operator]
    with pytest.raises(TrainingError, match=r"device 1 failed at F1\.1.*the layer broke"):
        pipeline.run(inputs, targets, first := MemoryMeter(), validate=lambda: True)
    with pytest.raises(ZeroDivisionError):
        pipeline.run(inputs, targets, second := MemoryMeter(), validate=lambda: 1 // 0 == 0)
    assert not any([*first.live_bytes.values(), *second.live_bytes.values()])
    assert not any(slabs.in_use_bytes for slabs in pipeline.host_slabs.values())
    pipeline.run(inputs, targets)
    assert are_equal(gradients(modules), expected)


def are_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("group", some(range(GROUPS)))
def test_no_device_waits_for_one_that_has_not_validated_yet(group: int, right: bool) -> None:
    """In threads, where a send waits for its receive: each validates when it gets there, without the others."""
    for program in programs(group):
        stages = stages_of(modules := chain(len(program.placement), DTYPE))
        together = Pipeline(program, stages, range(len(program.devices)), Mailbox(), specs(len(stages), DTYPE))
        together.run(*batch(len(stages), DTYPE))
        expected = gradients(modules)
        run_apart(program, stages, lambda: right)
        assert are_equal(gradients(modules), expected)


def run_apart(program: Program, stages: dict[int, Stage], validate: Callable[[], bool]) -> None:
    """Every device in a thread of its own. Raises what one of them raises."""
    count, devices = len(program.placement), range(len(program.devices))
    rendezvous, (inputs, targets) = Rendezvous(len(devices)), batch(count, DTYPE)

    def run(device: int) -> None:
        mine = {s: stages[s] for s, home in enumerate(program.placement) if home == device}
        try:
            pipeline = Pipeline(program, mine, [device], rendezvous, specs(count, DTYPE))
            pipeline.run(inputs, targets, validate=validate)
        finally:
            rendezvous.leave(device)

    with ThreadPoolExecutor(len(devices)) as threads:
        list(threads.map(run, devices))


def spoil(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Change all weights; the result brings them back."""
    kept: list[tuple[Tensor, Tensor]] = [(p, p.detach().clone()) for m in modules for p in m.parameters()]
    with torch.no_grad():
        for parameter, _ in kept:
            parameter.add_(1.0)

    @torch.no_grad()
    def back() -> None:
        for parameter, value in kept:
            parameter.copy_(value)

    return back


def test_schedules_of_the_tests_have_a_beginning() -> None:
    for schedule in (one_f_one_b(3, 4), v_wave(2, 3, moved=[(0, 0)])):
        assert all(validation_points(compile_schedule(schedule)))
