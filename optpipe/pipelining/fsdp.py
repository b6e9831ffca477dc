"""Stages wrapped by FSDP2 (`fully_shard`, `replicate`): when parameters are gathered, and when gradients are reduced.

FSDP reduces gradients in the backward. Here weight gradients may come later, so within a step it only adds them up,
and the reduction begins where the program says that the last W is done.

This is the one file of `optpipe.pipelining` that uses private names of torch: FSDPModule has no public call to begin a
reduction outside of a backward, nor to ask whether a module reshards. (The runtime's are in
`optpipe.runtime.torch_private`.) Tried with torch 2.13.0 on the CPU over gloo, and with the versions that
tests/optpipe/pipelining/test_torch_versions.py names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor


def is_wrapped(module: nn.Module) -> bool:
    """True if FSDP wraps the module or a part of it."""
    return any(True for _ in _wrapped(module))


def begin_step(module: nn.Module) -> None:
    """Add gradients up without reducing them; parameters stay gathered after a backward as they do after a forward.

    So a module that reshards after its forward is gathered for each F and each B, and any other once a step. W needs
    no gathered parameters.
    """
    for part in _wrapped(module):
        # This decides what a module at the top does that was not told whether to reshard.
        part._get_fsdp_state()._lazy_init()
        part.set_is_last_backward(False)
        _add_up(part)


def _add_up(part: FSDPModule) -> None:
    part.set_requires_gradient_sync(False, recurse=False)
    part.set_reshard_after_backward(_reshards(part), recurse=False)


def _groups(part: FSDPModule) -> list[Any]:
    """The groups of parameters of a wrapped module that are gathered and reduced together; before torch 2.13 one."""
    state: Any = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _reshards(part: FSDPModule) -> bool:
    """True if parameters are gathered anew for each F and each B."""
    return any(group._reshard_after_forward for group in _groups(part))


def gather(module: nn.Module) -> None:
    """Gather the parameters that then stay until they are resharded with the last reduction."""
    for part in _wrapped(module):
        if not _reshards(part):
            part.unshard()


@contextmanager
def gathered(module: nn.Module, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Gather the parameters of parts of `module` where they are not, and free at the end what was gathered for this.

    Those that only one of several parts needs are left to be gathered for it. What FSDP wraps within a part is gathered
    as it runs.
    """
    needs = Counter(owner for part in parts for owner in _nearest(module, part))
    gathers = [owner for owner, count in needs.items() if count > 1 or len(parts) == 1]
    gathers = [owner for owner in gathers if not all(group.is_unsharded for group in _groups(owner))]
    for owner in gathers:
        owner.unshard()
    try:
        yield
    finally:
        for owner in gathers:
            owner.reshard()


def _nearest(module: nn.Module, part: nn.Module) -> Sequence[FSDPModule]:
    """The wrapped module that has the parameters of a part, which is the part or around it; none without one."""
    around = [wrapped for wrapped in module.modules() if any(inner is part for inner in wrapped.modules())]
    return [outer for outer in around if isinstance(outer, FSDPModule)][-1:]


class GatherAhead:
    """Keeps FSDP's gathering ahead of the backward within the microbatch whose turn it is.

    FSDP notes the order in which forwards go through its groups, and gathers in a backward the one before. With several
    microbatches in progress it would go on to another one's last group at the end of each backward, which would hold
    memory until the stage's next op.
    """

    def __init__(self, module: nn.Module) -> None:
        states: list[Any] = [part._get_fsdp_state() for part in _wrapped(module) if _reshards(part)]
        self._shared = list({id(state._comm_ctx): state._comm_ctx for state in states}.values())

    def begin_forward(self) -> None:
        """Forget the order of earlier microbatches."""
        for shared in self._shared:
            shared.post_forward_order.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of a part's forward that runs again, in its turn or within a backward: the order stays as it is."""
        orders = [list(shared.post_forward_order) for shared in self._shared]
        indices = [(group, list(group._post_forward_indices)) for order in orders for group in order]
        yield
        for shared, order in zip(self._shared, orders, strict=True):
            shared.post_forward_order[:] = order
        for group, before in indices:
            group._post_forward_indices[:] = before

    def begin_backward(self) -> None:
        """Go back from the end of the last forward's order, which is that of all."""
        for shared in self._shared:
            for group in shared.post_forward_order:
                group._post_forward_indices.clear()
            for index, group in enumerate(shared.post_forward_order):
                group._post_forward_indices.append(index)


def begin_reduction(module: nn.Module, *, last: bool = True) -> None:
    """Begin to reduce the gradients that the step has added up; the last reduction of a step reshards parameters."""
    for part in _wrapped(module):
        part.set_requires_gradient_sync(True, recurse=False)
        part.set_reshard_after_backward(last, recurse=False)
        for group in _groups(part):
            for member in group.fsdp_params:
                # Those of the last W are still in the parameters' precision, those that a backward has added up not.
                member.accumulate_unsharded_grad_if_needed()
                member.to_accumulated_grad_if_needed()
            group.post_backward()
        if not last:
            _add_up(part)


def finish_reduction(module: nn.Module) -> None:
    """Have the current stream wait for the reductions that were begun."""
    for part in _wrapped(module):
        part.set_is_last_backward(True)
    for part in _wrapped(module):
        state: Any = part._get_fsdp_state()
        if state._is_root:
            state._root_post_backward_final_callback()


def abandon_step(module: nn.Module) -> None:
    """After an error: drop what was added up, so that the next step begins anew."""
    for part in _wrapped(module):
        for member in (member for group in _groups(part) for member in group.fsdp_params):
            member.unsharded_accumulated_grad = None
            if hasattr(member, "_unsharded_param"):
                member._unsharded_param.grad = None
    for part in _wrapped(module):
        state: Any = part._get_fsdp_state()
        if not state._is_root:
            continue
        if hasattr(part, "reset_iter_state"):
            part.reset_iter_state()
        else:  # torch before 2.13: end the step, in which nothing is left to be reduced
            part.set_requires_gradient_sync(True)
            part.set_reshard_after_backward(True)
            part.set_is_last_backward(True)
            state._root_post_backward_final_callback()
            state._state_ctx.iter_forward_root = None


def mesh_named(stage: PipelineStage, names: tuple[str, ...]) -> DeviceMesh | None:
    """The mesh of this process with these dimensions: by the stage's `get_mesh`, or from one of its parameters."""
    callback = getattr(getattr(stage, "_mesh_cache", None), "_get_mesh_cb", None)
    if callback is not None:
        found: DeviceMesh | None = callback(names, None)
        return found
    for parameter in stage.submod.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if mesh is not None and set(names) <= set(mesh.mesh_dim_names or ()):
            return mesh if mesh.mesh_dim_names == names else mesh[names]
    return None


def kept_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that stay gathered from the first F of a step to its last reduction."""
    groups = [group for part in _wrapped(module) if not _reshards(part) for group in _groups(part)]
    return [member._unsharded_param for group in groups for member in group.fsdp_params]


def gathered_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that FSDP gathers, by name, as the layers use them: objects that stay, with memory or without.

    At the first call each module is gathered once, one after the other.
    """
    found: dict[str, nn.Parameter] = {}
    for part in _wrapped(module):
        state: Any = part._get_fsdp_state()
        state._lazy_init()
        members = [member for group in _groups(part) for member in group.fsdp_params]
        if not all(hasattr(member, "_unsharded_param") for member in members):
            part.unshard()
            part.reshard()
        found |= {member._param_fqn: member._unsharded_param for member in members}
    return found


def _wrapped(module: nn.Module) -> Iterator[FSDPModule]:
    """The modules that FSDP has wrapped, each before those within it."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))
