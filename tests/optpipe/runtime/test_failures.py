"""Whatever action fails, the program is shown around it, nothing stays, and the next step is right."""

from __future__ import annotations

import pytest
import torch

from instances.schedules import one_f_one_b
from optpipe.compile import Action, compile_schedule
from optpipe.errors import RunFailedError, TrainingError
from optpipe.runtime import Mailbox, MemoryMeter, Pipeline
from optpipe.runtime.streams import CudaStreams
from optpipe.runtime.transport import LocalStreams
from tests.optpipe.runtime.chains import M, batch, chain, gradients, plain_gradients, specs, stages_of
from tests.optpipe.runtime.fake_cuda import FakeCuda, RaceDetector

EVERY = 7
"""Every so many actions one is made to fail."""

SCHEDULE = one_f_one_b(3, M, moved=[(s, i) for s in range(2) for i in range(M)])
PROGRAM = compile_schedule(SCHEDULE)


class Saboteur:
    """Told about every action, it makes the one of a given number fail."""

    def __init__(self, number: int, error: type[BaseException] = OSError) -> None:
        self.left, self.error = number, error
        self.action: Action | None = None

    def begin(self, device: int, action: Action, stream: torch.Stream | None = None, /) -> None:
        self.left -= 1
        if self.left < 0:
            self.action = action
            raise self.error("the device is gone")

    def waited(self) -> None: ...

    def end(self) -> None: ...


@pytest.mark.parametrize("number", range(0, sum(1 for _ in PROGRAM.actions()), EVERY))
def test_nothing_stays_of_a_step_that_fails(number: int) -> None:
    modules, (inputs, targets) = chain(3), batch(3)
    plain = plain_gradients(modules, inputs, targets)
    pipeline = Pipeline(PROGRAM, stages_of(modules), range(3), Mailbox(), specs(3))
    meter, saboteur = MemoryMeter(), Saboteur(number)
    with pytest.raises(TrainingError, match="OSError: the device is gone") as error:
        pipeline.run(inputs, targets, meter, saboteur)
    assert f"failed at {saboteur.action}, action " in str(error.value)
    assert f"] {saboteur.action}" in str(error.value)
    assert not any(meter.live_bytes.values())
    assert not any(slabs.in_use_bytes for slabs in pipeline.host_slabs.values())
    pipeline.run(inputs, targets)
    torch.testing.assert_close(gradients(modules), plain, rtol=1e-5, atol=1e-7)


class Orphan(Mailbox):
    """A transport that fails as that of gloo does when the other process has ended."""

    def send(self, source: int, target: int, message: torch.Tensor) -> None:
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_what_another_process_leaves_undone_is_no_failure_of_this_one() -> None:
    inputs, targets = batch(3)
    pipeline = Pipeline(PROGRAM, stages_of(chain(3)), range(3), Orphan(), specs(3))
    reason = r"device 0 could not exchange messages with another process at SEND_F0\.0->1, .*Maybe that has failed"
    with pytest.raises(RunFailedError, match=reason):
        pipeline.run(inputs, targets)


def test_an_interrupt_comes_through_and_nothing_stays() -> None:
    inputs, targets = batch(3)
    pipeline, meter = Pipeline(PROGRAM, stages_of(chain(3)), range(3), Mailbox(), specs(3)), MemoryMeter()
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(inputs, targets, meter, Saboteur(40, KeyboardInterrupt))
    assert not any(meter.live_bytes.values())
    assert not any(slabs.in_use_bytes for slabs in pipeline.host_slabs.values())


@pytest.mark.parametrize("number", range(0, sum(1 for _ in PROGRAM.actions()), 4 * EVERY))
def test_streams_are_waited_for_before_memory_is_given_back(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    inputs, targets = batch(3)
    pipeline = Pipeline(PROGRAM, stages_of(chain(3)), range(3), LocalStreams(), specs(3), streams=CudaStreams)
    pipeline.run(inputs, targets)
    outer = cuda.current
    with RaceDetector(cuda):
        with pytest.raises(TrainingError, match="the device is gone"):
            pipeline.run(inputs, targets, recorder=Saboteur(number))
        assert cuda.current is outer
        pipeline.run(inputs, targets)
    assert cuda.races == []
