"""Writing a checkpoint: state of stages, optimizers and random generators.

Names are those of the module: `parameter.0.norm.weight`, `buffer.0.running_mean`, `optimizer.exp_avg.0.norm.weight`.

Until all files are on the disk they lie in a folder that no reader looks for; one rename makes it a checkpoint. So
whenever a process or the machine ends, readers find what was there before, or all of the new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.errors import CheckpointError
from optpipe.schedule import Schedule, schedule_text
from optpipe.train.checkpoint.files import (
    GENERATORS,
    MANIFEST,
    SCHEDULE,
    CheckpointDocument,
    Disk,
    Launched,
    SavedFile,
    buffers_file,
    clear_leftovers,
    final_path,
    partial_path,
    stage_file,
    versions_now,
)
from optpipe.train.config import TrainingConfig
from optpipe.train.launch import gather_or_raise
from optpipe.train.model import Model


def stage_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, elsewhere: Collection[str] = ()
) -> dict[str, Tensor]:
    """Copies on the CPU, none of which shares memory with another.

    Buffers that are not persistent are left out, as the module builds them anew, and so is all of the parameters
    `elsewhere`, which are written with another stage. Raises CheckpointError where module or optimizer keep state that
    is not in tensors.
    """
    _refuse_extra_state(module)
    named = chain(_weights(module), _optimizer_state(module, optimizer))
    return _copies((name, tensor) for name, tensor in named if parameter_of(name) not in elsewhere)


def stage_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Of `stage_tensors` the buffers alone: what differs between replicas, as each has seen its own microbatches."""
    return _copies(_buffers(module))


def load_stage(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, tensors: Mapping[str, Tensor], where: str
) -> None:
    """Put saved tensors into a module and its optimizer, on whatever device these are.

    Nothing is cast. Raises CheckpointError naming the first tensor that is missing, too many or of another kind.
    """
    weights = dict(_weights(module))
    saved = {name for name in tensors if not name.startswith("optimizer.")}
    for name in sorted(weights.keys() | saved):
        _compare(where, name, tensors.get(name), weights.get(name))
    parameters = dict(module.named_parameters())
    states = _states_of(tensors)
    for name in states:
        if name not in parameters:
            raise CheckpointError(f"{where}: the checkpoint has optimizer state of {name}, which is no parameter now.")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    if optimizer is not None:
        _load_optimizer(optimizer, parameters, states)


def parameter_of(name: str) -> str | None:
    """The parameter that a saved tensor is, or that an optimizer keeps it of; None for a buffer."""
    kind, _, rest = name.partition(".")
    return {"parameter": rest, "optimizer": rest.partition(".")[2]}.get(kind)


def renamed(name: str, parameter: str) -> str:
    """The name of a saved tensor of a parameter, as that of another parameter."""
    old = parameter_of(name)
    assert old is not None, "buffers are no parameter's"
    return name.removesuffix(old) + parameter


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named}


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield f"parameter.{name}", parameter
    yield from _buffers(module)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield f"buffer.{name}", buffer


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    if optimizer is None:
        return
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer.{key}.{name}", value
            elif value is not None:
                raise CheckpointError(
                    f"the optimizer keeps {key} of {name} as {type(value).__name__}, but only tensors are written."
                )


def _states_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by parameter, then by key."""
    states: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            states.setdefault(name, {})[key] = tensor
    return states


def _load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], states: Mapping[str, dict[str, Tensor]]
) -> None:
    """Not by `load_state_dict`, which casts moments to the parameter's dtype."""
    optimizer.state.clear()
    on_device = {p for group in optimizer.param_groups if _keeps_steps_on_device(group) for p in group["params"]}
    for name, state in states.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: tensor.to(parameter.device if tensor.dim() or parameter in on_device else "cpu", copy=True)
            for key, tensor in state.items()
        }


def _keeps_steps_on_device(group: Mapping[str, object]) -> bool:
    """Torch's optimizers count steps in a scalar on the CPU, but for these."""
    return bool(group.get("fused") or group.get("capturable"))


def _compare(where: str, name: str, saved: Tensor | None, now: Tensor | None) -> None:
    if saved is None or now is None:
        there, not_there = ("the model", "the checkpoint") if saved is None else ("the checkpoint", "the model")
        raise CheckpointError(f"{where}.{name} is in {there} but not in {not_there}. {_OTHER_MODEL}")
    if (saved.dtype, saved.shape) != (now.dtype, now.shape):
        raise CheckpointError(
            f"{where}.{name} is {saved.dtype} of shape {tuple(saved.shape)} in the checkpoint but {now.dtype} of shape "
            f"{tuple(now.shape)} now. {_OTHER_MODEL}"
        )


_OTHER_MODEL = "Maybe the code of the model has changed since."


def _refuse_extra_state(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{name or 'the stage'} ({type(part).__name__}) has extra state beside its tensors, which is not "
                "written. Maybe keep it in buffers."
            )


def write_checkpoint(folder: Path, config: TrainingConfig, model: Model, step: int, disk: Disk) -> int:
    """Write the checkpoint before `step`, in all processes together; returns its bytes.

    Weights are settled. Whatever had the name before, a damaged checkpoint at best, is replaced. Raises
    CheckpointError in every process if it fails in one; then nothing is left of it.
    """
    try:
        gather_or_raise(model.launch, lambda: _begin(folder, model, step, disk))
        parts = gather_or_raise(model.launch, lambda: _write_stages(partial_path(folder, step), model, disk))
        return max(gather_or_raise(model.launch, lambda: _finish(folder, config, model, step, parts, disk)))
    except CheckpointError:
        if model.launch.rank == 0:
            with suppress(OSError):
                disk.remove(partial_path(folder, step))
        raise


def schedule_sha256(schedule: Schedule | None) -> str | None:
    """By this the schedule that a run is started with is known again; None: it is to find one."""
    return None if schedule is None else hashlib.sha256(schedule_text(schedule).encode()).hexdigest()


def _begin(folder: Path, model: Model, step: int, disk: Disk) -> None:
    if model.launch.rank == 0:
        clear_leftovers(folder, disk)
        disk.make_folder(partial_path(folder, step))


def _write_stages(partial: Path, model: Model, disk: Disk) -> dict[str, Any]:
    """The first replica writes its stages; the others have the same weights, and write their buffers.

    A parameter that stages share is written with the first of them.
    """
    replica, files = model.launch.replica, {}
    for s, stage in model.stages.items():
        if replica == 0:
            elsewhere = {name for shared in model.shared for stage_, name in shared.places[1:] if stage_ == s}
            name, tensors = stage_file(s), stage_tensors(stage.module, model.optimizers.get(s), elsewhere)
        else:
            name, tensors = buffers_file(s, replica), stage_buffers(stage.module)
        if replica == 0 or tensors:
            files[name] = disk.write_tensors(partial / name, tensors).to_data()
    return {"files": files, "generators": generator_states(model.hardware)}


def _finish(
    folder: Path, config: TrainingConfig, model: Model, step: int, parts: Sequence[Mapping[str, Any]], disk: Disk
) -> int:
    """The bytes of the checkpoint; 0 in processes that do not lead."""
    if model.launch.rank:
        return 0
    partial, final = partial_path(folder, step), final_path(folder, step)
    files = {name: SavedFile(**file) for part in parts for name, file in part["files"].items()}
    files[GENERATORS] = disk.write_tensors(partial / GENERATORS, as_tensors([part["generators"] for part in parts]))
    files[SCHEDULE] = disk.write_text(partial / SCHEDULE, schedule_text(model.schedule))
    document = _document(config, model, step, files)
    manifest = disk.write_text(partial / MANIFEST, document.sealed())
    if final.exists():
        disk.remove(final)
    disk.publish(partial, final)
    return document.size_bytes + manifest.size_bytes


def _document(config: TrainingConfig, model: Model, step: int, files: dict[str, SavedFile]) -> CheckpointDocument:
    launch = model.launch
    return CheckpointDocument(
        format="optpipe.checkpoint/1",
        step=step,
        seed=config.seed,
        stages=len(model.program.placement),
        batch_microbatches=model.program.microbatches * launch.replicas,
        task=model.task.identity(),
        options=config.to_data(),
        given_schedule=schedule_sha256(config.schedule),
        launched=Launched(processes=launch.world, replicas=launch.replicas),
        versions=versions_now(),
        files=files,
    )


def generator_states(hardware: torch.device) -> dict[str, str]:
    """Of this process, by kind of device, in hexadecimal digits."""
    states = {"cpu": torch.default_generator.get_state()}
    if hardware.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(hardware)
    return {kind: bytes(state.tolist()).hex() for kind, state in states.items()}


def as_tensors(states: Sequence[Mapping[str, str]]) -> dict[str, Tensor]:
    """The states of all processes by rank, as tensors of bytes named such as `rank-3.cpu`."""
    return {
        f"rank-{rank}.{kind}": torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
        for rank, kinds in enumerate(states)
        for kind, digits in kinds.items()
    }


def restore_generators(tensors: Mapping[str, Tensor], rank: int, hardware: torch.device) -> None:
    """Let this process's generators go on where that of its rank had come to."""
    torch.default_generator.set_state(tensors[f"rank-{rank}.cpu"])
    if hardware.type == "cuda" and f"rank-{rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rank-{rank}.cuda"], hardware)
