"""DTensors across stage boundaries: messages are their local parts, and the next stage puts them together again.

Each rank of tensor parallelism sends its part to the same rank of the next stage. Mesh and placements go ahead once,
before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from optpipe.errors import TrainingError
from optpipe.pipelining import fsdp
from optpipe.runtime.messages import Tree, leaves, rebuild


@dataclass(frozen=True)
class Layout:
    """Layout of a DTensor: names of its mesh's dimensions, placements ("r" or the dimension cut), whole shape."""

    mesh: tuple[str, ...]
    placements: tuple[int | str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor, stage: int) -> Layout:
        """Layout of an output of a stage. Raises TrainingError for one that has no name in other processes."""
        placements: list[int | str] = []
        for placement in tensor.placements:
            if type(placement) is Shard:
                placements.append(placement.dim)
            elif type(placement) is Replicate:
                placements.append("r")
            else:
                raise TrainingError(
                    f"stages[{stage}] returns a DTensor placed as {placement}, which cannot be sent. "
                    "Maybe redistribute it to Shard or Replicate in the stage's last layer."
                )
        if not tensor.device_mesh.mesh_dim_names:
            raise TrainingError(
                f"stages[{stage}] returns a DTensor on a mesh without names, by which the next stage would find its "
                "own. Maybe give mesh_dim_names to init_device_mesh."
            )
        return cls(tensor.device_mesh.mesh_dim_names, tuple(placements), tuple(tensor.shape), tensor.stride())

    def to_data(self) -> list[Any]:
        """The layout as JSON values."""
        return [list(self.mesh), list(self.placements), list(self.shape), list(self.stride)]

    @classmethod
    def from_data(cls, data: Sequence[Sequence[Any]]) -> Layout:
        """Inverse of `to_data`."""
        return cls(*map(tuple, data))


Layouts = list[Layout | None]
"""One entry for each leaf of a message; None: a plain tensor."""


def to_local(message: Tree, stage: int) -> tuple[Tree, Layouts]:
    """The local parts of a stage's output, and its layouts. Gradients come back in the same layout."""
    parts, layouts = [], []
    for part in leaves(message):
        is_cut = isinstance(part, DTensor)
        layouts.append(Layout.of(part, stage) if is_cut else None)
        parts.append(part.to_local() if is_cut else part)
    return (rebuild(message, parts) if any(layouts) else message), layouts


def from_local(message: Tree, layouts: Layouts, stage: PipelineStage) -> Tree:
    """Put the DTensors of a message together on the meshes of the stage that has received it."""
    parts = [
        _whole(part, layout, stage) if layout else part for part, layout in zip(leaves(message), layouts, strict=True)
    ]
    return rebuild(message, parts)


def _whole(part: Tensor, layout: Layout, stage: PipelineStage) -> DTensor:
    placements: list[Placement] = [Replicate() if at == "r" else Shard(int(at)) for at in layout.placements]
    mesh = fsdp.mesh_named(stage, layout.mesh)
    if mesh is None:
        raise TrainingError(
            f"stages[{stage.stage_index}] receives a DTensor on the mesh {layout.mesh}, but has no parameter on such a "
            "mesh. Maybe give get_mesh to its PipelineStage."
        )
    whole: DTensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=layout.stride
    )
    return whole
