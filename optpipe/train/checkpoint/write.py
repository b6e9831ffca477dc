"""Writing a checkpoint: state of stages, optimizers and random generators.

Names are those of the whole model (`Task.model_name`), however it is cut: `layers.3.norm.weight` for parameters and
buffers, `optimizer.state.layers.3.norm.weight.exp_avg` for what the optimizer keeps. So the files are a checkpoint of
`torch.distributed.checkpoint`, for its `HuggingFaceStorageReader`.

Files are written to a folder that no reader looks for, flushed to the disk, and published by one rename. Whenever a
process or the machine fails, readers find either what was there before or the whole new checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from optpipe.errors import CheckpointError
from optpipe.schedule import Schedule, schedule_text
from optpipe.train.checkpoint.files import (
    FORMAT,
    GENERATORS,
    MANIFEST,
    SCHEDULE,
    CheckpointDocument,
    Disk,
    SavedFile,
    buffers_file,
    clear_leftovers,
    final_path,
    loader_file,
    partial_path,
    stage_file,
    versions_now,
)
from optpipe.train.config import TrainingConfig
from optpipe.train.launch import gather_or_raise
from optpipe.train.model import Model
from optpipe.train.vocabulary import ROWS

OPTIMIZER = "optimizer.state."
"""Prefix of what the optimizer keeps, before the name of the parameter."""

REPLICA = "replica-"
"""Prefix of the buffers of a replica other than the first, before its number."""

Names = Mapping[str, str]
"""Name in the checkpoint of parameters and buffers of a stage, by its name in the stage's module."""


def stage_names(model: Model, stage: int) -> Names:
    """Names of a stage of this process; a parameter or buffer that stages share has that of its first place.

    Rows of a divided layer are not among them (`row_names`).
    """
    task, module = model.task, model.stages[stage].module
    own = [local for local, _ in chain(module.named_parameters(), _buffers(module))]
    names = {local: task.model_name(stage, local) for local in own if local not in row_names(model, stage)}
    for places in (*(shared.places for shared in model.shared), *model.shared_buffers):
        names |= {local: task.model_name(*places[0]) for s, local in places if s == stage and local in names}
    return names


def row_names(model: Model, stage: int) -> Names:
    """Name of the layer of which a stage holds rows, if it does: that which it has where it is not divided."""
    divided = model.vocabulary
    if divided is None or stage not in divided.holders:
        return {}
    return {ROWS: model.task.model_name(*divided.place)}


def buffer_names(model: Model, stage: int, replica: int) -> Names:
    """Names of a stage's buffers in a replica other than the first, which has seen other microbatches."""
    module = model.stages[stage].module
    return {local: f"{REPLICA}{replica}.{model.task.model_name(stage, local)}" for local, _ in _buffers(module)}


def stage_tensors(module: nn.Module, optimizer: torch.optim.Optimizer | None, names: Names) -> dict[str, Tensor]:
    """Copies on the CPU of what has one of the `names`, and of its optimizer state; none shares memory with another.

    Buffers that are not persistent are left out, as the module builds them anew. Raises CheckpointError where module or
    optimizer keep state that is not in tensors.
    """
    refuse_unwritten(module)
    return _copies(chain(_weights(module, names), _optimizer_state(module, optimizer, names)))


def stage_buffers(module: nn.Module, names: Names) -> dict[str, Tensor]:
    """Buffers of `stage_tensors`: the part that differs between replicas, as each sees its own microbatches."""
    return _copies((names[name], buffer) for name, buffer in _buffers(module))


def load_stage(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tensors: Mapping[str, Tensor],
    names: Names,
    where: str,
) -> None:
    """Copy saved tensors into a module and its optimizer, on their device.

    `tensors` are those of the stage alone. Nothing is cast. Raises CheckpointError naming the first tensor that is
    missing or of another dtype or shape.
    """
    weights = dict(_weights(module, names))
    for name in sorted(weights):
        _compare(where, name, tensors.get(name), weights[name])
    parameters = {names[local]: parameter for local, parameter in module.named_parameters() if local in names}
    states: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        if full.startswith(OPTIMIZER):
            states.setdefault(saved_of(full), {})[full.rpartition(".")[2]] = tensor
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])
    if optimizer is not None:
        _load_optimizer(optimizer, parameters, states)


def saved_of(full: str) -> str:
    """Name of the parameter or buffer that a saved tensor is, or belongs to."""
    return full.removeprefix(OPTIMIZER).rpartition(".")[0] if full.startswith(OPTIMIZER) else full


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named}


def _weights(module: nn.Module, names: Names) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(module.named_parameters(), _buffers(module)):
        if name in names:
            yield names[name], tensor


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield name, buffer


def _optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, names: Names
) -> Iterator[tuple[str, Tensor]]:
    if optimizer is None:
        return
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items() if name in names else ():
            if isinstance(value, Tensor):
                yield f"{OPTIMIZER}{names[name]}.{key}", value
            elif value is not None:
                raise CheckpointError(
                    f"the optimizer keeps {key} of {name} as {type(value).__name__}, but only tensors are written."
                )


def _load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], states: Mapping[str, dict[str, Tensor]]
) -> None:
    """Set the state directly: `load_state_dict` would cast moments to the parameter's dtype."""
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    # Torch's optimizers count steps in a scalar on the CPU, unless they are fused or capturable.
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    on_device = {parameter for group in groups for parameter in group["params"]}
    for name, state in states.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: tensor.to(parameter.device if tensor.dim() or parameter in on_device else "cpu", copy=True)
            for key, tensor in state.items()
        }


def _compare(where: str, name: str, saved: Tensor | None, now: Tensor) -> None:
    if saved is None:
        raise CheckpointError(f"{where}: {name} is in the model but not in the checkpoint. {OTHER_MODEL}")
    if (saved.dtype, saved.shape) != (now.dtype, now.shape):
        raise CheckpointError(
            f"{where}: {name} is {saved.dtype} of shape {tuple(saved.shape)} in the checkpoint but {now.dtype} of "
            f"shape {tuple(now.shape)} now. {OTHER_MODEL}"
        )


OTHER_MODEL = "Maybe the code of the model has changed since."


def refuse_unwritten(module: nn.Module) -> None:
    """Raise CheckpointError where a stage has state that the files of a checkpoint cannot hold."""
    for name, tensor in chain(module.named_parameters(), _buffers(module)):
        try:
            save({"": torch.empty(0, dtype=tensor.dtype)})
        except KeyError:
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which safetensors, the format of checkpoints, does not have. Maybe "
                "torch.complex64, or train without a folder for checkpoints."
            ) from None
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{name or 'the stage'} ({type(part).__name__}) has extra state beside its tensors, which is not "
                "written. Maybe keep it in buffers."
            )


class CheckpointWriter:
    """One checkpoint, of the state before `step`, written by all processes together.

    Made between two steps, with updates settled: what is written is the state at that moment. If `asynchronous`, all
    of it is copied to the host's memory at once, and a thread writes it while training continues; otherwise each stage
    is copied and written before `__init__` returns. `finish` publishes it. Both raise CheckpointError in every process
    if one fails; then nothing is left of it.
    """

    def __init__(
        self, folder: Path, config: TrainingConfig, model: Model, step: int, disk: Disk, *, asynchronous: bool = False
    ) -> None:
        self.step = step
        self._folder, self._launch, self._disk = folder, model.launch, disk
        self._partial = partial_path(folder, step)
        self._files: dict[str, Any] = {}
        self._tensors: dict[str, str] = {}
        self._divided: dict[str, dict[str, int]] = defaultdict(dict)
        self._error: BaseException | None = None
        self._thread: Thread | None = None
        self._document = {
            "format": FORMAT,
            "step": step,
            "seed": config.seed,
            "stages": len(model.program.placement),
            "batch_microbatches": model.microbatches * model.launch.replicas,
            "task": model.task.identity(),
            "options": config.to_data(),
            "given_schedule": schedule_sha256(config.schedule),
            "launched": {"processes": model.launch.world, "replicas": model.launch.replicas},
            "versions": versions_now(),
        }
        self._schedule, self._generators = model.schedule, generator_states(model.hardware)
        self._texts: dict[str, str] = {}
        self._loader = model.task.loader if 0 in model.stages else None
        # Every phase ends with a gather: no process writes into a folder that is not there, and the folder is published
        # only when the files of all of them are on the disk.
        try:
            gather_or_raise(self._launch, self._begin)
            if asynchronous:
                files: list[_File] = []
                gather_or_raise(self._launch, lambda: files.extend(_files_of(model)))
                self._thread = Thread(
                    target=self._write_in_thread, args=[files], name="optpipe-checkpoint", daemon=True
                )
                self._thread.start()
            else:
                self._parts = gather_or_raise(self._launch, lambda: self._write(_files_of(model)))
        except CheckpointError:
            self._undo()
            raise

    @property
    def written(self) -> bool:
        """True once this process's files are on its disk, or could not be written."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> int:
        """Wait for the files of all processes and publish them; returns the checkpoint's size in bytes."""
        try:
            if self._thread is not None:
                self._parts = gather_or_raise(self._launch, self._written_in_thread)
            return max(gather_or_raise(self._launch, self._publish))
        except CheckpointError:
            self._undo()
            raise

    def join(self) -> None:
        """Wait for the thread of this process, if there is one, and leave what it has written unpublished."""
        if self._thread is not None:
            self._thread.join()

    def _begin(self) -> None:
        if self._launch.rank == 0:
            clear_leftovers(self._folder, self._disk)
            self._disk.make_folder(self._partial)
        if self._loader is not None:
            self._texts[loader_file(self._launch.replica)] = json.dumps(self._loader.state()) + "\n"

    def _undo(self) -> None:
        if self._launch.rank == 0:
            with suppress(OSError):
                self._disk.remove(self._partial)

    def _write(self, files: Iterable[_File]) -> dict[str, Any]:
        """Write this process's files; returns what the manifest says of them."""
        while self._texts:
            name, text = self._texts.popitem()
            self._files[name] = self._disk.write_text(self._partial / name, text).to_data()
        for name, tensors, first_rows in files:
            self._files[name] = self._disk.write_tensors(self._partial / name, tensors, first_rows).to_data()
            self._tensors |= dict.fromkeys(tensors.keys() - first_rows.keys(), name)
            for tensor, first in first_rows.items():
                self._divided[tensor][name] = first
        of_all = {"tensors": self._tensors, "divided": self._divided, "generators": self._generators}
        return {"files": self._files} | of_all

    def _write_in_thread(self, files: list[_File]) -> None:
        try:
            while files:
                self._write([files.pop(0)])  # the copies of a file are freed as soon as it is written
        except BaseException as error:
            self._error = error

    def _written_in_thread(self) -> dict[str, Any]:
        self.join()
        if self._error is not None:
            raise self._error
        return self._write(())

    def _publish(self) -> int:
        """Write the manifest last and publish; returns the checkpoint's size in bytes, 0 on ranks other than 0."""
        if self._launch.rank:
            return 0
        partial, final, disk = self._partial, final_path(self._folder, self.step), self._disk
        files = {name: SavedFile(**file) for part in self._parts for name, file in part["files"].items()}
        generators = as_tensors([part["generators"] for part in self._parts])
        files[GENERATORS] = disk.write_tensors(partial / GENERATORS, generators)
        files[SCHEDULE] = disk.write_text(partial / SCHEDULE, schedule_text(self._schedule))
        tensors = {name: file for part in self._parts for name, file in part["tensors"].items()}
        contents: dict[str, Any] = {"files": {n: f.to_data() for n, f in files.items()}, "tensors": tensors}
        divided: dict[str, dict[str, int]] = defaultdict(dict)
        for name, rows in chain.from_iterable(part["divided"].items() for part in self._parts):
            divided[name] |= rows
        if divided:  # releases that divide none read the others
            contents["divided"] = divided
        document = CheckpointDocument.from_data(self._document | contents, "")
        manifest = disk.write_text(partial / MANIFEST, document.sealed())
        if final.exists():  # a damaged one: a whole one of that step would have been resumed
            disk.remove(final)
        disk.publish(partial, final)
        return document.size_bytes + manifest.size_bytes


def schedule_sha256(schedule: Schedule | None) -> str | None:
    """Identity of the schedule that a run is started with; None if it is to find one."""
    return None if schedule is None else hashlib.sha256(schedule_text(schedule).encode()).hexdigest()


_File = tuple[str, dict[str, Tensor], Mapping[str, int]]
"""Name of a file, its tensors, and the number of the first row of those of which it has some rows."""


def _files_of(model: Model) -> Iterator[_File]:
    """Files of this process's stages: replica 0's whole, the others', whose weights are the same, buffers alone.

    A parameter or buffer that stages share is written with the first of them.
    """
    replica = model.launch.replica
    for s, stage in model.stages.items():
        if replica == 0:
            all_places = (*(shared.places for shared in model.shared), *model.shared_buffers)
            elsewhere = {local for places in all_places for place, local in places[1:] if place == s}
            elsewhere |= {local for place, local in model.followers if place == s}
            names = {local: name for local, name in stage_names(model, s).items() if local not in elsewhere}
            rows, first_rows = _rows_of(model, s)
            yield stage_file(s), stage_tensors(stage.module, model.optimizers.get(s), names) | rows, first_rows
        elif tensors := stage_buffers(stage.module, buffer_names(model, s, replica)):
            yield buffers_file(s, replica), tensors, {}


def _rows_of(model: Model, stage: int) -> tuple[dict[str, Tensor], Mapping[str, int]]:
    """Rows of a divided layer and of its optimizer state in a stage, with the first row of each.

    Scalars, which are the same for all rows, are written with the first rows alone. Raises CheckpointError for other
    state that is not divided by rows.
    """
    names = row_names(model, stage)
    if not names or model.vocabulary is None:
        return {}, {}
    module, own = model.stages[stage].module, model.vocabulary.rows_in(stage)
    tensors = stage_tensors(module, model.optimizers.get(stage), names)
    shape = module.get_parameter(ROWS).shape
    for name, tensor in tensors.items():
        if tensor.dim() and tensor.shape != shape:
            raise CheckpointError(
                f"the optimizer keeps {name.removeprefix(OPTIMIZER)} of shape {tuple(tensor.shape)} for rows of shape "
                f"{tuple(shape)}, from which no state of the whole layer can be made. Maybe train with a schedule "
                "without spread passes."
            )
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.dim() or not own.start}
    return tensors, {name: own.start for name, tensor in tensors.items() if tensor.dim()}


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
