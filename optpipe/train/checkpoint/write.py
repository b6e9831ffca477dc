"""Writing a checkpoint: state of stages, optimizers and random generators.

Names are those of the module: `parameter.0.norm.weight`, `buffer.0.running_mean`, `optimizer.exp_avg.0.norm.weight`.

Files are written to a folder that no reader looks for, flushed to the disk, and published by one rename. Whenever a
process or the machine fails, readers find either what was there before or the whole new checkpoint.
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
    """Buffers of `stage_tensors`: the part that differs between replicas, as each sees its own microbatches."""
    return _copies(_buffers(module))


def load_stage(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, tensors: Mapping[str, Tensor], where: str
) -> None:
    """Copy saved tensors into a module and its optimizer, on their device.

    Nothing is cast. Raises CheckpointError naming the first tensor that is missing, unexpected, or of another dtype or
    shape.
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
    """Name of the parameter that a saved tensor belongs to; None for a buffer."""
    kind, _, rest = name.partition(".")
    return {"parameter": rest, "optimizer": rest.partition(".")[2]}.get(kind)


def renamed(name: str, parameter: str) -> str:
    """Name of a saved tensor, with its parameter's name replaced."""
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
    """Optimizer tensors by parameter, then by key."""
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
    """Set the state directly: `load_state_dict` would cast moments to the parameter's dtype."""
    optimizer.state.clear()
    # Torch's optimizers count steps in a scalar on the CPU, unless they are fused or capturable.
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    on_device = {parameter for group in groups for parameter in group["params"]}
    for name, state in states.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: tensor.to(parameter.device if tensor.dim() or parameter in on_device else "cpu", copy=True)
            for key, tensor in state.items()
        }


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
    """Write the checkpoint before `step`, in all processes together; returns its size in bytes.

    Updates are settled. A folder of that name, which only a damaged checkpoint can have, is replaced. Raises
    CheckpointError in every process if one fails; then nothing is left of it.
    """

    def begin() -> None:
        if model.launch.rank == 0:
            clear_leftovers(folder, disk)
            disk.make_folder(partial_path(folder, step))

    # Every phase ends with a gather: no process writes into a folder that is not there, and the folder is published
    # only when the files of all of them are on the disk.
    try:
        gather_or_raise(model.launch, begin)
        parts = gather_or_raise(model.launch, lambda: _write_stages(partial_path(folder, step), model, disk))
        return max(gather_or_raise(model.launch, lambda: _finish(folder, config, model, step, parts, disk)))
    except CheckpointError:
        if model.launch.rank == 0:
            with suppress(OSError):
                disk.remove(partial_path(folder, step))
        raise


def schedule_sha256(schedule: Schedule | None) -> str | None:
    """Identity of the schedule that a run is started with; None if it is to find one."""
    return None if schedule is None else hashlib.sha256(schedule_text(schedule).encode()).hexdigest()


def _write_stages(partial: Path, model: Model, disk: Disk) -> dict[str, Any]:
    """Write this process's stages: replica 0 whole, the others, whose weights are the same, their buffers alone.

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
    """Write the manifest last and publish; returns the checkpoint's size in bytes, 0 on ranks other than 0."""
    if model.launch.rank:
        return 0
    partial, final = partial_path(folder, step), final_path(folder, step)
    files = {name: SavedFile(**file) for part in parts for name, file in part["files"].items()}
    files[GENERATORS] = disk.write_tensors(partial / GENERATORS, as_tensors([part["generators"] for part in parts]))
    files[SCHEDULE] = disk.write_text(partial / SCHEDULE, schedule_text(model.schedule))
    launch = model.launch
    document = CheckpointDocument(
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
    manifest = disk.write_text(partial / MANIFEST, document.sealed())
    if final.exists():
        disk.remove(final)
    disk.publish(partial, final)
    return document.size_bytes + manifest.size_bytes


def generator_states(hardware: torch.device) -> dict[str, str]:
    """States of this process's random generators by kind of device, in hexadecimal digits."""
    states = {"cpu": torch.default_generator.get_state()}
    if hardware.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(hardware)
    return {kind: bytes(state.tolist()).hex() for kind, state in states.items()}


def as_tensors(states: Sequence[Mapping[str, str]]) -> dict[str, Tensor]:
    """Generator states of all processes as tensors of bytes, named such as `rank-3.cpu`."""
    return {
        f"rank-{rank}.{kind}": torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
        for rank, kinds in enumerate(states)
        for kind, digits in kinds.items()
    }


def restore_generators(tensors: Mapping[str, Tensor], rank: int, hardware: torch.device) -> None:
    """Set this process's generators to the saved states of its rank."""
    torch.default_generator.set_state(tensors[f"rank-{rank}.cpu"])
    if hardware.type == "cuda" and f"rank-{rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rank-{rank}.cuda"], hardware)
