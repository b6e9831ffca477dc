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
    """As torchrun says; without it, one process alone."""
    return Rank(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def choose_device(choice: DeviceChoice, gpus: int, place: Rank) -> torch.device:
    """The device for a process on a host with so many GPUs: that of its local rank. "auto" is CUDA if there is any.

    Raises TrainingError where "cuda" finds no GPU, and where processes would have to share one.
    """
    if choice == "cpu" or (choice == "auto" and not gpus):
        return CPU
    if not gpus:
        raise TrainingError(
            "device is 'cuda' but torch finds no CUDA device here. "
            "Maybe --device cpu, or a build of torch with CUDA and a driver for it."
        )
    if place.processes > gpus:
        raise TrainingError(
            f"torchrun started {place.processes} processes on this host but it has {gpus} CUDA device(s), and each "
            "needs its own. Maybe --device cpu, or more hosts, or leave torchrun out to run all devices on one GPU."
        )
    return torch.device("cuda", place.local_rank)


def own_device(choice: DeviceChoice) -> torch.device:
    """The device of this process."""
    return choose_device(choice, torch.cuda.device_count() if torch.cuda.is_available() else 0, own_rank())


def hardware_name(device: torch.device, machine: str) -> str:
    """The GPU's name, or the CPU's kind, which is `machine`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine


@dataclass(frozen=True)
class Launch:
    """This process among those of the run: `replicas` pipelines of `devices` processes each, or all in one process.

    Rank `replica * devices + device` runs one device of one replica. `pipeline` is the group of the processes of this
    replica, `same_device` that of the processes that run this device in every replica; None where it is not needed.
    `hardware` is what this process computes on.
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
        """Processes of the run."""
        return self.devices * self.replicas if self.distributed else 1

    @property
    def replica(self) -> int:
        """Which of the replicas this process is part of, from 0."""
        return self.rank // self.devices

    @property
    def own_devices(self) -> list[int]:
        """The devices that this process runs."""
        return [self.rank % self.devices] if self.distributed else list(range(self.devices))

    @property
    def pipeline_processes(self) -> int:
        """Processes of one replica."""
        return self.devices if self.distributed else 1

    @property
    def pipelines(self) -> list[list[int]]:
        """The ranks of each replica, by device."""
        return _pipelines(self.devices, self.replicas)

    def ranks_of(self, device: int) -> list[int]:
        """The ranks that run a device, one in each replica."""
        return [replica * self.devices + device for replica in range(self.replicas)] if self.distributed else [0]

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, by rank, in every process.

        As all that goes between processes, it raises RunFailedError where one has ended or does not answer in time.
        """
        if not self.distributed:
            return [value]
        with peer_errors("what all processes tell one another"):
            return gather_json(value)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value in every process; what the others give is not looked at."""
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
        """As `gather`, which all processes call, but only the values of the first replica."""
        return self.gather(value)[: self.pipeline_processes]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes of equally shaped tensors, on the CPU."""
        return self.start_sum(values.cpu()).wait()

    def start_sum(self, values: torch.Tensor) -> PendingSum:
        """Begin to sum equally shaped tensors over all processes, in `values`; none of them waits for another.

        Every process begins its sums, and its other exchanges, in the same order. Between GPUs the values stay there
        and NCCL sums them, behind what the current stream was given before: the host does not wait. (Not yet run.)
        """
        with peer_errors(_SUMS):
            work = dist.all_reduce(values, async_op=True) if self.distributed else None
        return PendingSum(values, work)


class PendingSum:
    """A sum over all processes that is under way; in one process it is there at once."""

    def __init__(self, values: torch.Tensor, work: dist.Work | None) -> None:
        self._values, self._work = values, work

    def wait(self) -> torch.Tensor:
        """The sum, on the CPU. Raises RunFailedError where a process has ended or does not answer in time."""
        if self._work is not None:
            with peer_errors(_SUMS):
                self._work.wait()
        return self._values.cpu()


_SUMS = "the sums of a step"


def leads() -> bool:
    """Whether this process is the one that prints: rank 0 under torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def one_core_left() -> Iterator[None]:
    """Within: torch leaves one core to others where it would take all, unless OMP_NUM_THREADS says how many to take.

    Its threads spin until the last of them is done, so if any other process is busy on one of their cores, every
    operator waits for that core's next time slice: on two cores beside one busy process a step of the small model
    took 15 s with two threads and 1.2 s with one (alone: 0.7 s with two).
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
    """The launch for a schedule of so many devices, in so many replicas, of which this process runs on `hardware`.

    Starts a process group under torchrun, and ends it at exit; one that the caller has started is used and left, and
    for GPUs must have both gloo and NCCL. Raises TrainingError where the number of processes is not the number of
    devices times the replicas, and RunFailedError where another process ends before this one does.
    """
    if not under_torchrun():
        _refuse_replicas(replicas)
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
        with peer_errors("the groups of all processes"):
            groups = _groups(devices, replicas)
        yield Launch(devices, replicas, rank, True, *groups, hardware)
        if own:
            with peer_errors("the end of all processes"):
                dist.barrier()  # nobody takes the group down while another still talks
    finally:
        if own:
            dist.destroy_process_group()
            gc.collect()  # works in cycles of references keep gloo's threads alive into the interpreter's end


def backends(hardware: torch.device) -> str:
    """What carries tensors between processes: GPUs need gloo beside NCCL, for what is gathered on the host."""
    return "cpu:gloo,cuda:nccl" if hardware.type == "cuda" else "gloo"


def _pipelines(devices: int, replicas: int) -> list[list[int]]:
    return [list(range(replica * devices, (replica + 1) * devices)) for replica in range(replicas)]


def _groups(devices: int, replicas: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This process's groups along the pipeline and across replicas; all processes make all groups, in one order."""
    if replicas == 1:
        return None, None
    ranks = _pipelines(devices, replicas)
    return _own_group(ranks), _own_group([list(column) for column in zip(*ranks, strict=True)])


def _own_group(parts: Sequence[list[int]]) -> dist.ProcessGroup:
    """Groups of all parts; returns the one that this process is in."""
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(parts)  # type: ignore[no-untyped-call]
    return group


def _refuse_replicas(replicas: int) -> None:
    if replicas > 1:
        raise TrainingError(
            f"data_parallel is {replicas}, but one process runs one replica. Maybe start it with torchrun."
        )


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
    """The JSON values of all processes, by rank.

    Raises CheckpointError with the first process's reason, and RunFailedError where another process has ended.
    """
    found: dict[str, Any]
    try:
        found = {"value": do()}
    except (CheckpointError, InputError, OSError) as error:
        found = {"error": _reason(error)}
    try:
        answers = launch.gather(found)
    except RunFailedError as lost:
        if "error" in found:
            raise RunFailedError(f"{found['error']} Then {lost}") from lost
        raise
    failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        rank, reason = failed[0]
        raise CheckpointError(f"rank {rank}: {reason}" if launch.world > 1 else reason)
    return [answer["value"] for answer in answers]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    return str(error)
