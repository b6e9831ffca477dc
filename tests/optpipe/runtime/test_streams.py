"""Compute and copies on CUDA's streams: right whatever the timings, shown by a detector of races on a fake GPU."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from instances.schedules import one_f_one_b, v_wave
from optpipe.compile import Program, compile_schedule
from optpipe.runtime import Pipeline
from optpipe.runtime.streams import CudaStreams
from optpipe.runtime.transport import LocalStreams
from optpipe.schedule import Schedule
from tests.optpipe.runtime.chains import M, batch, chain, gradients, plain_gradients, specs, stages_of
from tests.optpipe.runtime.fake_cuda import FakeCuda, RaceDetector
from tests.optpipe.runtime.schedules import random_placement, random_schedule
from tests.recomputing import random_executable
from tests.sample import some

EVERYTHING = [(s, i) for s in range(3) for i in range(M)]
SCHEDULES = {
    "linear": one_f_one_b(4, M),
    "linear, offload": one_f_one_b(4, M, moved=EVERYTHING),
    "V, offload": v_wave(2, M, moved=EVERYTHING),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def raced(cuda: FakeCuda, program: Program) -> list[str]:
    """The races of two steps after a first one, in which slabs find their size, and equal gradients."""
    count = len(program.placement)
    modules, (inputs, targets) = chain(count), batch(count)
    plain = plain_gradients(modules, inputs, targets)
    devices = range(len(program.devices))
    pipeline = Pipeline(program, stages_of(modules), devices, LocalStreams(), specs(count), streams=CudaStreams)
    pipeline.run(inputs, targets)
    with RaceDetector(cuda):
        for _ in range(2):
            pipeline.run(inputs, targets)
    torch.testing.assert_close(gradients(modules), plain, rtol=1e-5, atol=1e-7)
    return cuda.races


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_two_streams_race(cuda: FakeCuda, name: str) -> None:
    assert raced(cuda, compile_schedule(SCHEDULES[name])) == []


@pytest.mark.parametrize("seed", some(range(10)))
def test_no_two_streams_race_in_random_schedules(cuda: FakeCuda, seed: int) -> None:
    assert raced(cuda, compile_schedule(random_chain_schedule(seed))) == []


@pytest.mark.parametrize("seed", range(5))
def test_no_two_streams_race_where_activations_are_recomputed_and_offloaded(cuda: FakeCuda, seed: int) -> None:
    assert raced(cuda, compile_schedule(random_executable(range(3), M, seed))) == []


def random_chain_schedule(seed: int) -> Schedule:
    return random_schedule(random_placement(Random(seed), microbatches=M), seed)


@pytest.mark.parametrize("kind", ["O", "RELEASE", "R"])
def test_the_detector_sees_a_wait_that_is_missing(cuda: FakeCuda, kind: str) -> None:
    """Every kind of event matters, and the tests above can fail."""
    program = compile_schedule(SCHEDULES["linear, offload"])
    careless = [
        tuple(action._replace(waits=()) if action.kind == kind else action for action in actions)
        for actions in program.devices
    ]
    assert raced(cuda, replace(program, devices=tuple(careless))) != []


def test_the_detector_sees_a_backward_that_does_not_wait_for_its_reload(cuda: FakeCuda) -> None:
    program = compile_schedule(SCHEDULES["linear, offload"])
    careless = [
        tuple(action._replace(waits=()) if action.kind in ("B", "W", "F") else action for action in actions)
        for actions in program.devices
    ]
    assert raced(cuda, replace(program, devices=tuple(careless))) != []


def test_the_caller_may_use_gradients_at_once(cuda: FakeCuda) -> None:
    """The caller's stream waits for the step, and the step for what the caller did before."""
    modules, (inputs, targets) = chain(2), batch(2)
    program = compile_schedule(one_f_one_b(2, M))
    pipeline = Pipeline(program, stages_of(modules), range(2), LocalStreams(), specs(2), streams=CudaStreams)
    outer = cuda.current
    with RaceDetector(cuda), torch.no_grad():
        for _ in range(2):
            pipeline.run(inputs, targets)
            for module in modules:
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad)
    assert cuda.current is outer
    assert cuda.races == []
