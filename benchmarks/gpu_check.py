"""Checks that need a GPU, as a table: `python -m benchmarks.gpu_check`, or `make gpu-check`.

Virtual devices share one GPU, each with three streams of its own. Without a GPU it exits with code 2; with
one it ends with 0 where every check passed, and with 1 otherwise: also where a check fails with an error, which is a
row of the table, or where eight minutes are over.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from tempfile import TemporaryDirectory
from threading import Timer
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from benchmarks.gpu_rig import Rig
from benchmarks.markdown import table
from instances.schedules import one_f_one_b, v_wave
from optpipe.compile.memory import planned_peaks_bytes
from optpipe.pipelining import PlannedSchedule, Recorder, recording_schedule
from optpipe.profile.from_run import join_records
from optpipe.runtime.recorder import CudaMemoryRecorder, CudaRecorder, MemoryUse, Timing
from optpipe.schedule import Schedule
from optpipe.train.check import gradient_error, reference_step
from optpipe.train.config import GPTShape
from optpipe.train.tasks.gpt import byte_loss

DEVICES, MICROBATCHES = 4, 8
SMALL = GPTShape(width=64, heads=2, sequence=32, layers=8)
LARGE = GPTShape(width=4096, heads=32, sequence=2048, layers=4)
"""Layers, one per stage, wide enough for copies to be faster than compute in float32; `slowdown` measures that."""

MAX_ERROR = {torch.float32: 1e-5, torch.float64: 1e-12}
MIN_HIDDEN, MAX_PEAK_DEVIATION, MAX_SLOWDOWN = 0.9, 0.05, 0.02
STEPS = 10
LIMIT_SECONDS = 470.0

Interval = tuple[float, float]


class Finding(NamedTuple):
    """Row of the table."""

    check: str
    measured: str
    wanted: str
    passed: bool


def main() -> int:
    """Print the table; returns the exit code."""
    if not torch.cuda.is_available():
        print("gpu-check needs a GPU that torch can use, and there is none: nothing was checked.", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}\n", flush=True)
    return run_checks(CHECKS, device)


def run_checks(
    checks: Sequence[Check],
    device: torch.device,
    limit_seconds: float = LIMIT_SECONDS,
    leave: Callable[[int], Any] = os._exit,
) -> int:
    """Run checks one after the other and print one table of what they found; returns the exit code.

    An error is a finding, and the other checks still run. After `limit_seconds` the table so far is printed and the
    process left by `leave`, whatever a check waits for.
    """
    findings: list[Finding] = []
    seconds: list[str] = []

    def print_table() -> int:
        rows = [[f.check, f.measured, f.wanted, "yes" if f.passed else "NO"] for f in findings]
        print(table(["check", "measured", "wanted", "passed"], rows, text_columns=1))
        print(f"\nseconds: {', '.join(seconds)}", flush=True)
        return 0 if all(f.passed for f in findings) else 1

    def end() -> None:
        findings.append(Finding(checks[len(seconds)].__name__, f"not done after {limit_seconds:.0f} s", "done", False))
        leave(print_table())

    timer = Timer(limit_seconds, end)
    timer.daemon = True
    timer.start()
    for check in checks:
        begin = perf_counter()
        try:
            findings += check(device)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            findings.append(Finding(check.__name__, f"{type(error).__name__}: {lines[0][:200]}", "no error", False))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        seconds.append(f"{check.__name__} {perf_counter() - begin:.0f}")
    timer.cancel()
    return print_table()


def parity(device: torch.device, shape: GPTShape = SMALL) -> list[Finding]:
    """Check that gradients equal those of the reference step on the same hardware, with and without offload."""
    findings = []
    for name, schedule in parity_schedules().items():
        for dtype, limit in MAX_ERROR.items():
            error = max_gradient_error(Rig(schedule, shape, device, dtype))
            check = f"gradient error, {name}, {str(dtype).removeprefix('torch.')}"
            findings.append(Finding(check, f"{error:.1e}", f"at most {limit:.0e}", error <= limit))
    return findings


def parity_schedules() -> dict[str, Schedule]:
    """Schedules on linear and V placement; with offload, all activations but those of the last stage are offloaded."""
    return {
        "1F1B": one_f_one_b(DEVICES, MICROBATCHES),
        "1F1B, offload": one_f_one_b(DEVICES, MICROBATCHES, moved=_leaving(DEVICES, every=1)),
        "V, offload": v_wave(DEVICES, MICROBATCHES, moved=_leaving(2 * DEVICES, every=1)),
    }


def max_gradient_error(rig: Rig) -> float:
    """Largest error over all parameters in the second step, after host slabs have their final size."""
    for _ in range(2):
        rig.pipeline.run(*rig.batch)
    plain = rig.plain_modules()
    reference_step(plain, byte_loss, *rig.batch)
    errors = []
    for module, reference in zip(rig.modules, plain, strict=True):
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None, "a step has been run"
            assert theirs.grad is not None, "the plain step uses every parameter"
            errors.append(gradient_error(ours.grad, theirs.grad))
    return max(errors)


def hidden_copies(device: torch.device, shape: GPTShape = LARGE) -> list[Finding]:
    """Check that devices compute while their activations are copied."""
    rig = Rig(one_f_one_b(DEVICES, MICROBATCHES, fused=True, moved=_leaving(DEVICES, every=2)), shape, device)
    _warm_up(rig)
    recorder = CudaRecorder()
    rig.pipeline.run(*rig.batch, recorder=recorder)
    share = hidden_share(recorder.timings())
    return [Finding("share of copy time hidden", f"{share:.1%}", f"at least {MIN_HIDDEN:.0%}", share >= MIN_HIDDEN)]


def hidden_share(timings: Sequence[Timing]) -> float:
    """Share of the copy time during which the same device computes; 1 if nothing is copied."""
    copied = hidden = 0.0
    for device in {timing.device for timing in timings}:
        mine = [timing for timing in timings if timing.device == device]
        compute = sorted(_interval(t) for t in mine if t.action.kind in ("F", "B", "W", "BW"))
        for copy in (_interval(t) for t in mine if t.action.kind in ("O", "R")):
            copied += copy[1] - copy[0]
            hidden += sum(max(0.0, min(copy[1], end) - max(copy[0], begin)) for begin, end in compute)
    return hidden / copied if copied else 1.0


def allocated_peaks(device: torch.device, shape: GPTShape = LARGE) -> list[Finding]:
    """Check that allocated memory stays at the planned peak on every virtual device."""
    schedule = one_f_one_b(DEVICES, MICROBATCHES, moved=_leaving(DEVICES, every=2))
    rig = Rig(schedule, shape, device)
    planned = rig.planned_peaks_bytes()
    _warm_up(rig)
    recorder = CudaMemoryRecorder()
    rig.pipeline.run(*rig.batch, recorder=recorder)
    return [peak_finding(d, peak, planned[d]) for d, peak in enumerate(peaks_bytes(recorder.uses()))]


def peaks_bytes(uses: Sequence[MemoryUse]) -> list[int]:
    """Peak of each device over its actions, in bytes."""
    devices = range(1 + max(use.device for use in uses))
    return [max(use.peak_bytes for use in uses if use.device == d) for d in devices]


def peak_finding(device: int, peak: int, planned: int) -> Finding:
    """Comparison of a device's peak with its plan."""
    deviation = abs(peak - planned) / planned
    measured = f"{peak / 2**20:.1f} MiB of {planned / 2**20:.1f}"
    wanted = f"within {MAX_PEAK_DEVIATION:.0%}"
    return Finding(f"peak against plan, device {device}", measured, wanted, deviation <= MAX_PEAK_DEVIATION)


def slowdown(device: torch.device, shape: GPTShape = LARGE) -> list[Finding]:
    """Check that offloading every second microbatch is almost free if copies are faster than compute (k <= 1)."""
    resident, offloaded = (
        Rig(one_f_one_b(DEVICES, MICROBATCHES, fused=True, moved=moved), shape, device)
        for moved in ((), _leaving(DEVICES, every=2))
    )
    k = copy_ratio(offloaded)
    ratio = _step_seconds(offloaded) / _step_seconds(resident) - 1
    return [
        Finding("k: copies there and back / compute of a microbatch", f"{k:.2f}", "at most 1", k <= 1),
        Finding("slowdown with half offloaded", f"{ratio:.1%}", f"at most {MAX_SLOWDOWN:.0%}", ratio <= MAX_SLOWDOWN),
    ]


def copy_ratio(rig: Rig) -> float:
    """k of PipeOffload (section 3): mean time of O and R over that of F and BW."""
    _warm_up(rig)
    recorder = CudaRecorder()
    rig.pipeline.run(*rig.batch, recorder=recorder)
    return ratio_of(recorder.timings())


def ratio_of(timings: Sequence[Timing]) -> float:
    """Mean time of O plus that of R, over that of F plus that of BW."""

    def mean_ns(kind: str) -> float:
        spans = [t.end_ns - t.start_ns for t in timings if t.action.kind == kind]
        return sum(spans) / len(spans)

    return (mean_ns("O") + mean_ns("R")) / (mean_ns("F") + mean_ns("BW"))


def in_a_trainer(device: torch.device, shape: GPTShape = SMALL) -> list[Finding]:
    """Check PlannedSchedule on stages that FSDP2 has wrapped, compared with torch's own class on the same program.

    Gradients against the plain step, and peaks against what a Recorder predicts. One process, whose GPU has all stages:
    NCCL takes no two ranks on one GPU. Every kind of op runs, copies and recomputation included.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in its module's __all__
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        findings, seconds = [], {}
        for reshards in (False, True):
            how = "gathered for each op" if reshards else "gathered once"
            trainer = _Trainer(device, shape, reshards=reshards)
            schedule = PlannedSchedule(trainer.stages, trainer.plan, loss_fn=byte_loss)
            with TemporaryDirectory() as folder:
                recorder = Recorder(schedule, folder, steps=2, skip=2)
                while not recorder.done:
                    trainer.step(schedule)
            findings.append(trainer.gradients(f"gradient error, PlannedSchedule under FSDP2, {how}"))
            assert recorder.record is not None, "it is done"
            run = join_records([recorder.record])
            [expected] = planned_peaks_bytes(schedule.program, run.problem(), run.message_bytes, run.replicas)
            peak = max(row.peak_bytes for row in recorder.record.memory.rows())
            finding = peak_finding(0, peak, expected)
            findings.append(finding._replace(check=f"peak against plan, PlannedSchedule under FSDP2, {how}"))
        for name in ("PlannedSchedule", "ScheduleInterleaved1F1B"):
            trainer = _Trainer(device, shape, reshards=False)
            if name == "PlannedSchedule":
                fused = recording_schedule([0] * DEVICES, MICROBATCHES, offload=False)
                seconds[name] = trainer.step_seconds(PlannedSchedule(trainer.stages, fused, loss_fn=byte_loss))
            else:
                theirs = ScheduleInterleaved1F1B([*trainer.stages], MICROBATCHES, loss_fn=byte_loss)
                seconds[name] = trainer.step_seconds(theirs)
                findings.append(trainer.gradients("gradient error, torch's ScheduleInterleaved1F1B under FSDP2"))
        ours, theirs_seconds = seconds.values()
        ratio = f"{ours / theirs_seconds:.2f} ({1e3 * ours:.1f} ms of {1e3 * theirs_seconds:.1f})"
        return [*findings, Finding("step of PlannedSchedule / of torch's class", ratio, "reported", True)]
    finally:
        dist.destroy_process_group()


class _Trainer:
    """A small GPT of stages that FSDP2 has wrapped, all in this process, and the batch that they train on."""

    def __init__(self, device: torch.device, shape: GPTShape, *, reshards: bool) -> None:
        self.plan = recording_schedule([0] * DEVICES, MICROBATCHES, modes=["full"])
        self._rig = Rig(self.plan, shape, device)
        mesh = init_device_mesh(device.type, (1,))
        for module in self._rig.modules:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
        self.stages = [PipelineStage(module, s, DEVICES, device) for s, module in enumerate(self._rig.modules)]

    def step(self, schedule: Any) -> None:
        """One step from gradients of zero."""
        for module in self._rig.modules:
            module.zero_grad(set_to_none=False)
        inputs, targets = self._rig.batch
        schedule.step(torch.cat(inputs), target=torch.cat(targets), return_outputs=False)

    def step_seconds(self, schedule: Any) -> float:
        """Median time of a few steps after some to warm up."""
        return _median_seconds(lambda: self.step(schedule), self._rig.device)

    def gradients(self, check: str) -> Finding:
        """The gradients of the last step against those of the plain one."""
        plain = self._rig.plain_modules()
        reference_step(plain, byte_loss, *self._rig.batch)
        errors = []
        for module, reference in zip(self._rig.modules, plain, strict=True):
            for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
                assert isinstance(ours.grad, DTensor), "FSDP2 has reduced it"
                assert theirs.grad is not None, "the plain step uses every parameter"
                errors.append(gradient_error(ours.grad.full_tensor(), theirs.grad))
        error, limit = max(errors), MAX_ERROR[torch.float32]
        return Finding(check, f"{error:.1e}", f"at most {limit:.0e}", error <= limit)


def _step_seconds(rig: Rig) -> float:
    return _median_seconds(lambda: rig.pipeline.run(*rig.batch), rig.device)


def _median_seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Median time of a few steps after three to warm up, each synchronised at both ends."""
    for _ in range(3):
        step()
    times = []
    for _ in range(STEPS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter())
        step()
    return median(end - begin for begin, end in pairwise(times))


def _warm_up(rig: Rig) -> None:
    """Run warm-up steps: host slabs get their size in the first, the allocator its blocks in the first few."""
    for _ in range(3):
        rig.pipeline.run(*rig.batch)


def _leaving(stages: int, *, every: int) -> list[tuple[int, int]]:
    """Offload every second, third, ... microbatch of all stages but the last."""
    return [(s, i) for s in range(stages - 1) for i in range(0, MICROBATCHES, every)]


def _interval(timing: Timing) -> Interval:
    return timing.start_ns, timing.end_ns


Check = Callable[[torch.device], list[Finding]]
CHECKS: tuple[Check, ...] = (parity, in_a_trainer, hidden_copies, allocated_peaks, slowdown)

if __name__ == "__main__":
    sys.exit(main())
