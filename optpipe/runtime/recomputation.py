"""Recomputation: what a forward needs that runs twice, and blocks of a stage that are run again one at a time.

The two runs of a forward have to agree: `Replay` gives the second one the buffers of the first and compares their
outputs, `AllGeneratorStates` gives it the random numbers. A `Segment` is one call of a block. F records the call
without keeping what autograd saves in it; the input alone stays. The backward finds the saved tensors missing when it
comes to the block, and runs it again, so that at no time more than one block is there; or C has run all of them again
ahead of it. The graph is that of F throughout.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.mode_names import Recomputed
from optpipe.runtime.activations import ActivationStore, storage_key
from optpipe.runtime.messages import leaves, rebuild
from optpipe.runtime.module_state import ModuleState
from optpipe.runtime.rng import AllGeneratorStates
from optpipe.runtime.slices import Rebuilt, packed, unpacked
from optpipe.runtime.storage_view import StorageView
from optpipe.runtime.torch_private import FakeTensor, saving_through, within_checkpoint
from optpipe.runtime.weight_gradients import compiled_around, compiled_part, is_distributed


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer of a module. A forward may change it in place or replace the tensor."""

    full_name: str
    registry: dict[str, Tensor | None]
    name: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that is the buffer now."""
        tensor = self.registry[self.name]
        assert tensor is not None, "buffers stay registered"
        return tensor


Values = Sequence[tuple[_Buffer, Tensor]]
"""Values of buffers at one time."""

Sample = Sequence[tuple[torch.dtype, Sequence[complex]]]
"""Dtype of each tensor of an output, and some numbers of it."""

SAMPLED = 64
"""Numbers of each tensor of an output, about, that are compared."""

COMPARED = 32
"""Recomputations of a module that are compared with the first run: what differs does so in nearly all of them."""


class Replay:
    """Buffers of a module whose forward runs twice for one microbatch, such as running statistics, and its output.

    The second run has to find the buffers as the first one did, and leave them and Python's attributes as they are.
    Which buffers a forward changes is learnt from the first: the version counter alone does not tell, since batch
    norm's kernel bypasses it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: list[_Buffer] | None = None
        self._constant: list[_Buffer] = []
        self._compared = 0

    @contextmanager
    def first(self, inputs: Sequence[Any]) -> Iterator[list[tuple[_Buffer, Tensor]]]:
        """Context of the first run, which fills the list with copies of the buffers that it is to change.

        Raises TrainingError if it changes an input, or a buffer that earlier runs did not.
        """
        tensors = [part for part in inputs if isinstance(part, Tensor)]
        input_versions = [part._version for part in tensors]
        learning = self._changing is None
        watched = self._buffers() if self._changing is None else self._changing
        before = [(buffer, buffer.tensor.detach().clone()) for buffer in watched]
        constant = [(buffer.tensor, buffer.tensor._version) for buffer in self._constant]
        values: list[tuple[_Buffer, Tensor]] = []
        yield values
        if [part._version for part in tensors] != input_versions:
            raise TrainingError(
                "the stage changes its input in place, so it cannot be recomputed from it. Maybe leave inplace=True "
                "out of its first layer, or solve without stages[].modes."
            )
        for buffer, (tensor, version) in zip(self._constant, constant, strict=True):
            if buffer.tensor is not tensor or tensor._version != version:
                raise TrainingError(
                    f"the forward changes the buffer {buffer.full_name} now, but did not at first, so it cannot be "
                    "recomputed. Maybe solve without stages[].modes."
                )
        if learning:
            # Of a module one of whose buffers changes, all count: another may have had its new value by chance.
            changed = {id(buffer.registry) for buffer, value in before if not _equal(buffer.tensor, value)}
            self._changing = [buffer for buffer in watched if id(buffer.registry) in changed]
            self._constant = [buffer for buffer in watched if id(buffer.registry) not in changed]
        values += [(buffer, value) for buffer, value in before if buffer in (self._changing or ())]

    @contextmanager
    def second(self, values: Values) -> Iterator[None]:
        """Context of the second run: it changes the copies of the first, in the place of the buffers."""
        attributes = ModuleState([self._module], tensors=False)
        own = [(buffer, buffer.tensor) for buffer, _ in values]
        for buffer, value in values:
            buffer.registry[buffer.name] = value
        try:
            yield
        finally:
            for buffer, tensor in own:
                buffer.registry[buffer.name] = tensor
            attributes.restore()

    def sample(self, output: Any) -> Sample | None:
        """Numbers of the output of the first run, without memory on the device; None once enough were compared."""
        if self._compared >= COMPARED:
            return None
        return [(part.dtype, _sampled(part)) for part in leaves(output) if isinstance(part, Tensor)]

    def compare(self, sample: Sample | None, output: Any) -> None:
        """Compare the output of the second run with the sample of the first. Raises TrainingError if they differ.

        The same kernels on the same numbers give the same up to the order of a GPU's atomic sums: half of the digits
        are the same in any case. Other random numbers leave none the same.
        """
        if sample is None:
            return
        self._compared += 1
        for number, ((dtype, before), (_, after)) in enumerate(zip(sample, self.sample(output) or (), strict=False)):
            finite = [abs(x) for x in before if math.isfinite(abs(x))]
            eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
            limit = math.sqrt(eps) * max(finite, default=0.0)
            for x, y in zip(before, after, strict=False):
                if not (abs(x - y) <= limit or x == y or (x != x and y != y)):
                    raise TrainingError(
                        f"tensor {number} of the output is {y:.6g} when {type(self._module).__name__} is run again, "
                        f"but was {x:.6g} at first, so its gradients would be wrong. Maybe it draws random numbers "
                        "from a generator that none of its modules holds, or depends on what it counts: keep the "
                        "generator as an attribute from its __init__ on, or solve without stages[].modes."
                    )

    def _buffers(self) -> list[_Buffer]:
        return [
            _Buffer(f"{path}.{name}".lstrip("."), part._buffers, name)
            for path, part in self._module.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]


def _sampled(tensor: Tensor) -> Sequence[complex]:
    """About `SAMPLED` numbers of a tensor, evenly apart in each dimension. Reads a view: takes no memory."""
    if is_distributed(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if type(tensor) is not Tensor or tensor.is_meta:
        return ()
    each = round(SAMPLED ** (1 / max(1, tensor.dim()))) or 1
    numbers: list[Any] = [
        tensor.detach()[tuple(slice(None, None, max(1, size // each)) for size in tensor.shape)].tolist()
    ]
    for _ in tensor.shape:
        numbers = [number for row in numbers for number in row]
    return numbers


def _equal(one: Tensor, other: Tensor) -> bool:
    """True if equal, where NaN is equal to NaN; tensors without memory count as equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, FakeTensor):
        raise TrainingError(
            "a block has buffers, and without values it is not known which of them its forward changes. Maybe leave "
            "out the modes that recompute it."
        )
    if is_distributed(one) and is_distributed(other):
        one, other = one.to_local(), other.to_local()  # type: ignore[attr-defined]
    return one.is_meta or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def saving_nothing() -> AbstractContextManager[Any]:
    """Context in which autograd keeps no saved tensor, so that its graph can be recorded but not run."""
    return saving_through(lambda _tensor: None, _not_saved)


def _not_saved(_: None) -> Tensor:
    raise TrainingError(
        "the stage differentiates within its forward, so it cannot be recomputed. Maybe solve without stages[].modes."
    )


def blocks_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a stage, with their names, in order; the stage itself where it has no list of modules.

    Blocks are the modules with parameters in the stage's outermost nn.Sequential or nn.ModuleList that are of its most
    frequent class: the layers of a transformer without embedding and head. A list may have none, as that of the layers
    in a stage that has the head alone.
    """
    level = [("", module)]
    while level:
        for path, part in level:
            if isinstance(part, nn.Sequential | nn.ModuleList):
                children = [(f"{path}.{name}".lstrip("."), child) for name, child in part.named_children()]
                children = [(name, child) for name, child in children if next(child.parameters(), None) is not None]
                kinds = [type(child) for _, child in children]
                frequent = max(
                    kinds, key=lambda kind: (kinds.count(kind), _parameters_of(kind, children)), default=None
                )
                return [(name, child) for name, child in children if type(child) is frequent]
        level = [(f"{path}.{name}".lstrip("."), child) for path, part in level for name, child in part.named_children()]
    return [("", module)]


def _parameters_of(kind: type[nn.Module], children: Sequence[tuple[str, nn.Module]]) -> int:
    return sum(p.numel() for _, child in children if type(child) is kind for p in child.parameters())


def parts_of(module: nn.Module, recomputed: Recomputed) -> list[tuple[str, nn.Module]]:
    """The modules of a stage, with their names, that a selective mode runs again.

    Raises TrainingError if the stage has no such blocks or parts, or torch.compile has taken them with what is around
    them: then there is one graph of all, and none of theirs.
    """
    parts = _parts_of(module, recomputed)
    for name, _ in parts:
        if (outer := compiled_around(module, name)) is not None:
            raise TrainingError(
                f"has {name} within {outer or 'its module'}, which torch.compile has taken as one, so it cannot be "
                "recomputed by itself. Maybe compile the blocks one by one (block.compile()), or the mode 'full'."
            )
    return parts


def _parts_of(module: nn.Module, recomputed: Recomputed) -> list[tuple[str, nn.Module]]:
    blocks = blocks_of(module)
    if not blocks:
        raise TrainingError("has no blocks that could be recomputed one at a time. Maybe the mode 'full'.")
    most = max(recomputed.blocks or 0, recomputed.group)
    if most > len(blocks):
        names = ", ".join(name or "the whole stage" for name, _ in blocks[:4])
        at_once = " at a time" if recomputed.group > 1 else ""
        raise TrainingError(
            f"has {len(blocks)} block(s) ({names}), but {most} are to be recomputed{at_once}. Maybe fewer."
        )
    blocks = blocks[: recomputed.blocks]
    if not recomputed.part:
        return blocks
    found = []
    for name, block in blocks:
        try:
            found.append((f"{name}.{recomputed.part}".lstrip("."), block.get_submodule(recomputed.part)))
        except AttributeError:
            inner = ", ".join(child for child, _ in block.named_children()) or "no modules"
            raise TrainingError(
                f"has no module {recomputed.part!r} in its block {name or 'itself'}, which has {inner}. Maybe one of "
                "these."
            ) from None
    return found


RunningAgain = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]
"""Context in which blocks run again, in C or within a backward: they have what they need, such as their parameters."""


class Segments:
    """Modules of a stage each of whose calls is recomputed, in a context of `running_again`.

    So many as a `group` has are recomputed together: what one of them hands to the next is made anew, and not kept.
    """

    def __init__(self, parts: Sequence[tuple[str, nn.Module]], running_again: RunningAgain, group: int = 1) -> None:
        self._running_again, self._group = running_again, group
        self._parts = [(name, part, Replay(part), _place_of_call(part)) for name, part in parts]

    @contextmanager
    def recording(
        self,
        activations: ActivationStore | None,
        device: torch.device,
        generators: Callable[[], AllGeneratorStates | None],
    ) -> Iterator[list[Segment]]:
        """Context of an F in which the modules keep their inputs alone; yields the list of their calls.

        `activations` holds what stays, if it is to leave. `generators` returns the present states of those from which
        the modules may draw. Raises TrainingError if a module changes its input, if the input is changed behind it
        before F ends, or if a checkpoint of torch is to run the module again.
        """
        calls: list[Segment] = []
        versions: list[tuple[str, Tensor, int]] = []

        def recording_calls(number: int, name: str, part: nn.Module, replay: Replay, place: str) -> Callable[..., Any]:
            forward, compiled = getattr(part, place), compiled_part(part) is not None

            def record(*arguments: Any, **named: Any) -> Any:
                if not torch.is_grad_enabled():
                    return forward(*arguments, **named)
                if within_checkpoint():
                    raise TrainingError(
                        f"the stage runs its block {name} within torch.utils.checkpoint, which recomputes it already. "
                        "Maybe turn that off (gradient_checkpointing_disable()), or solve without this mode."
                    )
                call = Segment(part, forward, replay, self._running_again, device, generators(), compiled=compiled)
                follows = number % self._group and calls and calls[-1].block is blocks[number - 1]
                hands_on = (number + 1) % self._group and number + 1 < len(blocks)
                output = call.first((arguments, named), activations, calls[-1] if follows else None, bool(hands_on))
                versions.extend((name, x.detach(), x._version) for x in call.kept((arguments, named)))
                calls.append(call)
                return output

            return record

        blocks = [part for _, part, _, _ in self._parts]
        own = [part.__dict__.get(place) for _, part, _, place in self._parts]
        for number, (name, part, replay, place) in enumerate(self._parts):
            part.__dict__[place] = recording_calls(number, name, part, replay, place)
        try:
            yield calls
        finally:
            for (_, part, _, place), forward in zip(self._parts, own, strict=True):
                del part.__dict__[place]
                if forward is not None:
                    part.__dict__[place] = forward
        for name, tensor, version in versions:
            if tensor._version != version:
                raise TrainingError(
                    f"the stage changes the input of its block {name} in place behind it, so the block cannot be "
                    "recomputed from it. Maybe leave inplace=True out there, or solve without this mode."
                )


def _place_of_call(part: nn.Module) -> str:
    """The attribute that is to record a module's calls: around its compiled code, which must not come to record."""
    return "forward" if part._compiled_call_impl is None else "_compiled_call_impl"


class Segment:
    """One call of `block`, from F until the backward has come to it. `compiled`: torch.compile has taken some of it.

    Of a group, each call is run again right behind the one `before` it, whose output it takes.
    """

    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        replay: Replay,
        running_again: RunningAgain,
        device: torch.device,
        generators: AllGeneratorStates | None,
        *,
        compiled: bool,
    ) -> None:
        self.block, self._forward, self._replay = block, forward, replay
        self._running_again, self._compiled = running_again, compiled
        self._graphs: list[type] = []
        self._generators = generators
        self._autocast = device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        self._buffers: Values = ()
        self._sample: Sample | None = None
        self._form: Any = None
        self._input: list[Any] = []
        self._outputs: dict[int, object] = {}
        self._resolve: Callable[[Any], Tensor] = _itself
        self._count: int | None = None
        self._saved: list[Tensor | Rebuilt | None] | None = None
        self._before: Segment | None = None
        self._returned: list[tuple[weakref.ref[Tensor], int] | None] = []
        self._handed_on: dict[int, Tensor | None] = {}

    def first(
        self, inputs: Any, activations: ActivationStore | None, before: Segment | None = None, hands_on: bool = False
    ) -> Any:
        """Run the block on its positional and named arguments in F; of its tensors the input stays.

        So does an output that autograd saves, since what follows keeps it too, unless it `hands_on` to the next call of
        a group. What the call `before` has returned does not stay, if it comes as it was. Raises TrainingError if the
        block changes its input, or differentiates.
        """
        taken = [before.number_of(part) if before else None for part in leaves(inputs)]
        hold: Callable[[Tensor], object] = activations.hold if activations else Tensor.detach
        self._resolve = activations.held if activations else _itself
        seen: list[tuple[weakref.ref[torch.UntypedStorage], StorageView] | None] = []

        def pack(tensor: Tensor) -> int:
            plain = type(tensor) in (Tensor, FakeTensor)
            seen.append((weakref.ref(tensor.untyped_storage()), StorageView.of(tensor)) if plain else None)
            return len(seen) - 1

        arguments, named = inputs
        with self._replay.first(leaves(inputs)) as self._buffers, saving_through(pack, self._unpack):
            output = self._forward(*arguments, **named)
        self._sample = self._replay.sample(output)
        self._count = len(seen)
        if self._compiled:
            self._graphs = _compiled_graphs(leaves(inputs), leaves(output))
        if hands_on:
            self._returned = [
                (weakref.ref(part), part._version) if isinstance(part, Tensor) else None for part in leaves(output)
            ]
        made = {storage_key(part): part for part in leaves(output) if type(part) in (Tensor, FakeTensor)}
        for number, entry in enumerate(() if hands_on else seen):
            if entry is not None and (storage := entry[0]()) is not None and storage._cdata in made:
                self._outputs[number] = hold(entry[1].on(made[storage._cdata]))
        self._form = rebuild(inputs, [None] * len(leaves(inputs)))
        self._input = [
            (_Held(hold(part), part.requires_grad) if place is None else _Made(place, part.requires_grad))
            if isinstance(part, Tensor)
            else part
            for part, place in zip(leaves(inputs), taken, strict=True)
        ]
        if before:
            before._returned, before._handed_on = [], {place: None for place in taken if place is not None}
            self._before = before if before._handed_on else None
        return output

    def kept(self, inputs: Any) -> list[Tensor]:
        """The tensors of its input that stay."""
        parts = zip(leaves(inputs), self._input, strict=True)
        return [part for part, held in parts if isinstance(held, _Held)]

    def number_of(self, tensor: object) -> int | None:
        """The place of a tensor among what the call has returned in F; None if it is none of it, or changed since."""
        for number, entry in enumerate(self._returned):
            if entry is not None and entry[0]() is tensor and entry[1] == tensor._version:  # type: ignore[union-attr]
                return number
        return None

    def recompute(self) -> None:
        """Run the block again on the same input, random numbers and buffers; what autograd saves is there then.

        Before it, those of its group from which its input comes. Layers split their backward as the weight gradients of
        the stage say at this time. Raises TrainingError if autograd saves more or less than in F.
        """
        group = [self]
        while (before := group[-1]._before) is not None and before._saved is None:
            group.append(before)
        for segment in reversed(group):
            segment._recompute()

    def _recompute(self) -> None:
        tensors: list[Tensor | Rebuilt | None] = []

        def pack(tensor: Tensor) -> int:
            known = self._outputs.get(len(tensors))
            of_slices = packed(tensor)
            if of_slices is not None:
                tensors.append(of_slices)
            else:
                tensors.append(tensor.detach() if known is None else self._resolve(known))
            return len(tensors) - 1

        received = [self._received(part) for part in self._input]
        if self._before is not None:
            self._before._handed_on, self._before = {}, None
        arguments, named = rebuild(self._form, received)
        device, dtype, autocast = self._autocast
        with (
            self._running_again([self.block]),
            torch.enable_grad(),
            torch.autocast(device, dtype, enabled=autocast),
            self._replay.second(self._buffers),
            self._generators.again() if self._generators else nullcontext(),
            saving_through(pack, _not_saved),
        ):
            output = self._forward(*arguments, **named)
        if self._compiled and _compiled_graphs(received, leaves(output)) != self._graphs:
            raise TrainingError(
                "a block is run again by another graph of torch.compile than at first, having been compiled anew in "
                "between. Maybe compile it with dynamic=True, or give all microbatches one shape."
            )
        if len(tensors) != self._count:
            raise TrainingError(
                f"a block saves {len(tensors)} tensors for its backward when it is run again, but saved {self._count} "
                "at first. Maybe its forward depends on more than its input, buffers and random numbers."
            )
        self._replay.compare(self._sample, output)
        returned = leaves(output)
        self._handed_on = {number: returned[number].detach() for number in self._handed_on}
        self._saved = tensors
        self._form, self._input, self._outputs, self._buffers = None, [], {}, ()

    def _received(self, part: Any) -> Any:
        """A part of the block's input, as the block was given it."""
        if isinstance(part, _Held):
            return self._resolve(part.description).detach().requires_grad_(part.requires_grad)
        if isinstance(part, _Made):
            made = self._before._handed_on[part.number] if self._before else None
            assert made is not None, "the call that returns it was run again just now"
            return made.detach().requires_grad_(part.requires_grad)
        return part

    def _unpack(self, number: int) -> Tensor:
        """Tensor that autograd saved under this number; the first one that is asked for makes all of them."""
        if self._count is None:
            _not_saved(None)
        if self._saved is None:
            self.recompute()
        assert self._saved is not None, "it was made just now"
        tensor, self._saved[number] = self._saved[number], None  # freed after its use, as autograd does it
        if tensor is None:
            raise TrainingError(
                "the backward of a recomputed block asks twice for a tensor that it has saved. Maybe a "
                "torch.autograd.Function in it reads ctx.saved_tensors twice: read it once, or solve without this mode."
            )
        made: Tensor = unpacked(tensor)
        return made


def _compiled_graphs(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[type]:
    """Classes of the nodes that stand for graphs of torch.compile in a block's; each such graph has one of its own."""
    entries = {part.grad_fn for part in inputs if isinstance(part, Tensor)}
    pending = [part.grad_fn for part in outputs if isinstance(part, Tensor)]
    seen: dict[Any, None] = {}  # in order
    while pending:
        node = pending.pop()
        if node is not None and node not in seen and node not in entries:
            seen[node] = None
            pending += [following for following, _ in node.next_functions]
    return [type(node) for node in seen if type(node).__name__ == "CompiledFunctionBackward"]


class _Held(NamedTuple):
    """A tensor of a block's input: what describes it while it is held, and whether it had a gradient."""

    description: object
    requires_grad: bool


class _Made(NamedTuple):
    """A tensor of a block's input that the call before it makes anew: its number among what that one returns."""

    number: int
    requires_grad: bool


def _itself(description: Any) -> Tensor:
    tensor: Tensor = description
    return tensor
