"""The checks of a GPU, as far as they run without one."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import DEVICES, hidden_share, in_a_trainer, parity, peak_finding, peaks_bytes, ratio_of
from benchmarks.gpu_rig import Rig
from optpipe.compile import Action
from optpipe.runtime import MemoryMeter
from optpipe.runtime.recorder import MemoryUse, Timing
from optpipe.train.config import GPTShape

CPU = torch.device("cpu")
TINY = GPTShape(width=8, heads=2, sequence=4, layers=8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads spin while they wait for one another: on a busy machine, for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def timing(kind: str, start_ns: int, end_ns: int, device: int = 0) -> Timing:
    return Timing(device, Action(kind, 0, start_ns), start_ns, start_ns, end_ns)


def test_parity_holds_on_the_cpu() -> None:
    findings = parity(CPU, TINY)
    assert len(findings) == 6
    assert all(finding.passed for finding in findings), findings


def test_a_planned_schedule_under_fsdp_holds_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers once a step or for each op, with every kind of op; torch's own class runs the same program."""
    monkeypatch.setattr(gpu_check, "STEPS", 1)
    findings = in_a_trainer(CPU, TINY)
    assert len(findings) == 6
    assert all(finding.passed for finding in findings), findings
    assert "torch's ScheduleInterleaved1F1B" in findings[4].check


def test_one_table_whatever_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def passes(_device: torch.device) -> list[gpu_check.Finding]:
        return [gpu_check.Finding("first", "1", "at most 2", True)]

    def fails(_device: torch.device) -> list[gpu_check.Finding]:
        raise RuntimeError("out of memory\nand more")

    assert gpu_check.run_checks([passes], CPU) == 0
    assert gpu_check.run_checks([fails, passes], CPU) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: out of memory" in printed
    assert "and more" not in printed
    assert printed.count("| first ") == 2
    assert "seconds: fails 0, passes 0" in printed


def test_a_check_that_hangs_ends_with_the_table_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []
    ended = Event()

    def leave(code: int) -> None:
        left.append(code)
        ended.set()

    def hangs(_device: torch.device) -> list[gpu_check.Finding]:
        assert ended.wait(60)
        return []

    gpu_check.run_checks([hangs], CPU, limit_seconds=0.01, leave=leave)
    assert left == [1]
    assert "| hangs | not done after 0 s " in " ".join(capsys.readouterr().out.split())


def test_the_rig_plans_the_peaks_that_are_measured() -> None:
    rig = Rig(gpu_check.parity_schedules()["1F1B, offload"], TINY, CPU)
    planned, meter = rig.planned_peaks_bytes(), MemoryMeter()
    rig.pipeline.run(*rig.batch, meter)
    assert [meter.peak_bytes[d] for d in range(DEVICES)] == pytest.approx(planned, rel=0.02)


def test_copies_are_hidden_by_compute_of_their_own_device_alone() -> None:
    timings = [
        timing("F", 0, 10),
        timing("BW", 10, 20),
        timing("O", 5, 15),  # hidden
        timing("R", 18, 22),  # half of it
        timing("F", 0, 100, device=1),
        timing("O", 0, 14, device=2),  # nothing computes there
    ]
    assert hidden_share(timings) == pytest.approx((10 + 2) / (10 + 4 + 14))
    assert hidden_share([timing("F", 0, 10)]) == 1.0


def test_k_is_copies_over_compute() -> None:
    timings = [timing("F", 0, 10), timing("BW", 10, 40), timing("O", 0, 4), timing("O", 4, 12), timing("R", 20, 24)]
    assert ratio_of(timings) == (6 + 4) / (10 + 30)


def test_a_peak_off_by_more_than_five_per_cent_fails() -> None:
    action = Action("F", 0, 0)
    peaks = [(0, 100), (1, 90), (0, 120)]
    assert peaks_bytes([MemoryUse(device, action, peak, 0) for device, peak in peaks]) == [120, 90]
    assert [peak_finding(0, peak, 100).passed for peak in (95, 105, 94, 106)] == [True, True, False, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is no GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main() == 2
    assert "gpu-check needs a GPU" in capsys.readouterr().err
