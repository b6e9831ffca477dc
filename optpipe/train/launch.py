"""Processes of a run: rank, device, groups, and collectives that fail on all ranks together.

Processes talk over gloo, and between GPUs over NCCL. Between them go tensors and JSON, nothing pickled.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from optpipe.errors import CheckpointError, InputError, RunFailedError, TrainingError
from optpipe.runtime.distributed import gather_json
from optpipe.runtime.transport import peer_errors
from optpipe.train.config import DeviceChoice

CPU = torch.device("cpu")


class Rank(NamedTuple):
    """This process among those of its host, counted from 0."""

    local_rank: int = 0
    processes: int = 1


def own_rank() -> Rank:
    """Rank of this process on its host, as torchrun sets it; (0, 1) without torchrun."""
    return Rank(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def choose_device(choice: DeviceChoice, gpus: int, own: Rank) -> torch.device:
    """Device of a process on a host with `gpus` GPUs: that of its local rank. "auto" is CUDA if there is any.

    Raises TrainingError if "cuda" finds no GPU, or if processes would have to share one.
    """
    if choice == "cpu" or (choice == "auto" and not gpus):
        return CPU
    if not gpus:
        raise TrainingError(
            "device is 'cuda' but torch finds no CUDA device here. "
            "Maybe --device cpu, or a build of torch with CUDA and a driver for it."
        )
    if own.processes > gpus:
        raise TrainingError(
            f"torchrun started {own.processes} processes on this host but it has {gpus} CUDA device(s), and each "
            "needs its own. Maybe --device cpu, or more hosts, or leave torchrun out to run all devices on one GPU."
        )
    return torch.device("cuda", own.local_rank)


def own_device(choice: DeviceChoice) -> torch.device:
    """Device of this process."""
    return choose_device(choice, torch.cuda.device_count() if torch.cuda.is_available() else 0, own_rank())


def hardware_name(device: torch.device, machine: str) -> str:
    """Name of the GPU, or `machine`, the architecture, for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine


@dataclass(frozen=True)
class Launch:
    """This process among those of the run: `replicas` pipelines of `devices` processes each, or all in one process.

    Rank `replica * devices + device` runs one device of one replica. `pipeline` is the group of the processes of this
    replica, `same_device` that of the processes that run this device in every replica; None without replicas.
    `hardware`: torch device of this process.
    """

    devices: int
    replicas: int = 1
    rank: int = 0
    distributed: bool = False
    pipeline: dist.ProcessGroup | None = None
    same_device: dist.ProcessGroup | None = None
    hardware: torch.device = CPU

    @property
    def world(self) -> int:
        """Number of processes of the run."""
        return self.devices * self.replicas if self.distributed else 1

    @property
    def replica(self) -> int:
        """Replica of this process, counted from 0."""
        return self.rank // self.devices

    @property
    def own_devices(self) -> list[int]:
        """Devices of the schedule that this process runs."""
        return [self.rank % self.devices] if self.distributed else list(range(self.devices))

    @property
    def pipeline_processes(self) -> int:
        """Number of processes of one replica."""
        return self.devices if self.distributed else 1

    @property
    def pipelines(self) -> list[list[int]]:
        """Ranks of each replica, by device."""
        return _pipelines(self.devices, self.replicas)

    def ranks_of(self, device: int) -> list[int]:
        """Ranks that run a device, one in each replica."""
        return [replica * self.devices + device for replica in range(self.replicas)] if self.distributed else [0]

    def gather(self, value: Any) -> list[Any]:
        """JSON values of all processes, by rank, in every process.

        Like every collective here it raises RunFailedError if a process has ended or does not answer in time.
        """
        if not self.distributed:
            return [value]
        return gather_json(value)

    def broadcast(self, value: Any) -> Any:
        """JSON value of rank 0, in every process; the values that other ranks pass are ignored."""
        if not self.distributed:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([len(text)])
        with peer_errors("what rank 0 tells all processes"):
            dist.broadcast(length, 0)
            if self.rank:
                text = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(text, 0)
        return json.loads(bytes(text.tolist()))

    def gather_pipeline(self, value: Any) -> list[Any]:
        """JSON values of the first replica's processes, in every process; called by all of them."""
        return self.gather(value)[: self.pipeline_processes]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of equally shaped tensors over all processes, on the CPU."""
        return self.start_sum(values.cpu()).wait()

    def sum_over_replicas(self, value: int) -> int:
        """Sum over the processes that run this device in each replica, which call this together."""
        if self.same_device is None:
            return value
        total = torch.tensor([value])
        with peer_errors("the tokens of all replicas"):
            dist.all_reduce(total, group=self.same_device)
        return int(total)

    def start_sum(self, values: torch.Tensor) -> PendingSum:
        """Start an asynchronous sum of equally shaped tensors over all processes, in place in `values`.

        All processes must start their sums and other collectives in the same order. On GPUs NCCL sums behind what was
        issued on the current stream; the host does not wait. (Not yet run.)
        """
        with peer_errors(_SUMS):
            work = dist.all_reduce(values, async_op=True) if self.distributed else None
        return PendingSum(values, work)


class PendingSum:
    """Sum over all processes that is in progress; complete at once in a single process."""

    def __init__(self, values: torch.Tensor, work: dist.Work | None) -> None:
        self._values, self._work = values, work

    def wait(self) -> torch.Tensor:
        """Wait for the sum, on the CPU. Raises RunFailedError if a process has ended or does not answer in time."""
        if self._work is not None:
            with peer_errors(_SUMS):
                self._work.wait()
        return self._values.cpu()


_SUMS = "the sums of a step"


def leads() -> bool:
    """Return True in the process that prints: rank 0 under torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def under_torchrun() -> bool:
    """Return True if torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def one_core_left() -> Iterator[None]:
    """Leave one core free for other processes, unless OMP_NUM_THREADS is set.

    Threads of an operator spin until the last of them is done. If another process is busy on one of their cores, every
    operator waits for that core's next time slice: on two cores with one busy process a step of the small model took
    15 s with two threads and 1.2 s with one (alone: 0.7 s with two).
    """
    before = torch.get_num_threads()
    if before == os.cpu_count() and before > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(before - 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def launched(devices: int, timeout_seconds: float, replicas: int = 1, hardware: torch.device = CPU) -> Iterator[Launch]:
    """Launch for a schedule of `devices` devices in `replicas` replicas; this process computes on `hardware`.

    Starts a process group under torchrun and ends it at exit. A group that the caller has started is used and left;
    for GPUs it must have both gloo and NCCL. Raises TrainingError if the number of processes is not devices times
    replicas, and RunFailedError if another process ends before this one.
    """
    if not under_torchrun():
        if replicas > 1:
            raise TrainingError(
                f"data_parallel is {replicas}, but one process runs one replica. Maybe start it with torchrun."
            )
        yield Launch(devices, hardware=hardware)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != devices * replicas:
        raise TrainingError(_wrong_world(world, devices, replicas))
    own = not dist.is_initialized()
    if own:
        if hardware.type == "cuda":
            torch.cuda.set_device(hardware)  # where NCCL looks for it
        with peer_errors("the connections between all processes"):
            dist.init_process_group(backends(hardware), timeout=timedelta(seconds=timeout_seconds))
    try:
        pipeline: dist.ProcessGroup | None = None
        same_device: dist.ProcessGroup | None = None
        if replicas > 1:
            ranks = _pipelines(devices, replicas)
            with peer_errors("the groups of all processes"):  # all processes create all groups, in one order
                pipeline = _own_group(ranks)
                same_device = _own_group([list(column) for column in zip(*ranks, strict=True)])
        yield Launch(devices, replicas, rank, True, pipeline, same_device, hardware)
        if own:
            with peer_errors("the end of all processes"):
                dist.barrier()  # no process destroys the group while another still sends
    finally:
        if own:
            dist.destroy_process_group()
            gc.collect()  # works in reference cycles keep gloo's threads alive into the interpreter's exit


def backends(hardware: torch.device) -> str:
    """Backends of the process group: GPUs need gloo and NCCL, for values gathered on the host."""
    return "cpu:gloo,cuda:nccl" if hardware.type == "cuda" else "gloo"


def _pipelines(devices: int, replicas: int) -> list[list[int]]:
    return [list(range(replica * devices, (replica + 1) * devices)) for replica in range(replicas)]


def _own_group(parts: Sequence[list[int]]) -> dist.ProcessGroup:
    """Create the groups of all parts; return the one that this process is in."""
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(parts)  # type: ignore[no-untyped-call]
    return group


def _wrong_world(world: int, devices: int, replicas: int) -> str:
    if replicas == 1 and world % devices == 0:
        return (
            f"WORLD_SIZE is {world} but the schedule has {devices} devices. Maybe --data-parallel {world // devices} "
            "is meant: as many replicas of the pipeline."
        )
    wanted = f"{devices} devices" + (f" in {replicas} replicas" if replicas > 1 else "")
    return (
        f"WORLD_SIZE is {world} but the schedule has {wanted}. "
        f"Maybe start it with torchrun --nproc-per-node {devices * replicas}, or without torchrun to run all in one "
        "process."
    )


Value = TypeVar("Value")


def gather_or_raise(launch: Launch, do: Callable[[], Value]) -> list[Value]:
    """Call `do` in every process and gather its JSON values, by rank; if it fails in one, fail in all.

    An error that only one process saw would leave the others waiting in the next collective. Raises CheckpointError
    with the first failing process's reason, and RunFailedError if another process has ended.
    """
    own: dict[str, Any]
    try:
        own = {"value": do()}
    except OSError as error:
        reason = f"{error.strerror}." if error.strerror else str(error)
        own = {"error": f"{error.filename}: {reason}" if error.strerror and error.filename else reason}
    except (CheckpointError, InputError) as error:
        own = {"error": str(error)}
    try:
        answers = launch.gather(own)
    except RunFailedError as lost:
        if "error" in own:
            both = RunFailedError(f"{own['error']} Then {lost}")
            both.only_here = True
            raise both from lost
        raise
    failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        rank, reason = failed[0]
        raise CheckpointError(f"rank {rank}: {reason}" if launch.world > 1 else reason)
    return [answer["value"] for answer in answers]
