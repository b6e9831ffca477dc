"""One boundary in one direction between two devices: takes messages apart into tensors, and puts them together again.

A message whose shape is not that of the first step is refused on the sender, where the mistake is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from optpipe.errors import TrainingError
from optpipe.runtime.messages import Gradient, MessageSpec, Spec, Tree, leaves, message_spec, rebuild, spec_text
from optpipe.runtime.transport import Receipt, Transport

Direction = Literal["F", "B"]


class TreeReceipt(Protocol):
    """A message on its way; `Receipt` is one where it is a single tensor."""

    def ready(self) -> bool:
        """Whether the message is here."""

    def wait(self) -> Any:
        """The message, once it is here."""


class Crossing(Protocol):
    """Sends and receives for one boundary, direction and pair of devices."""

    def send(self, message: Tree | Gradient) -> None:
        """Send a message; returns before it has arrived."""

    def post_receive(self) -> TreeReceipt:
        """Make room for the next message, and say when it is here."""


class _Route:
    """From where to where, and what for."""

    def __init__(self, transport: Transport, source: int, target: int, boundary: int, direction: Direction) -> None:
        self.transport, self.source, self.target = transport, source, target
        self.boundary, self.direction = boundary, direction

    def send(self, tensor: Tensor) -> None:
        self.transport.send(self.source, self.target, tensor)

    def post_receive(self, spec: MessageSpec, device: torch.device) -> Receipt:
        return self.transport.post_receive(self.source, self.target, spec, device)

    def refusal(self, expected: Spec, found: str) -> TrainingError:
        what = "activation" if self.direction == "F" else "gradient"
        return TrainingError(
            f"the {what} across the boundary between stages {self.boundary} and {self.boundary + 1} is {found} but "
            f"must be {spec_text(expected)}, as in every microbatch. Maybe pad the batch to one shape."
        )


def crossing(
    transport: Transport,
    pair: tuple[int, int],
    boundary: int,
    direction: Direction,
    spec: Spec,
    device: torch.device,
) -> Crossing:
    """The crossing from device `pair[0]` to `pair[1]`; receives allocate on `device`."""
    route = _Route(transport, *pair, boundary, direction)
    if isinstance(spec, MessageSpec) and (spec.has_gradient or direction == "F"):
        return _TensorCrossing(route, spec, device)
    return _TreeCrossing(route, spec, device)


class _TensorCrossing:
    """A single tensor: the usual case, with nothing to take apart."""

    def __init__(self, route: _Route, spec: MessageSpec, device: torch.device) -> None:
        self._route, self._spec, self._device = route, spec, device
        self._shape, self._dtype = torch.Size(spec.shape), spec.dtype

    def send(self, message: Tree | Gradient) -> None:
        if message is None and self._route.direction == "B":
            message = self._spec.empty(self._device).zero_()
        if not isinstance(message, Tensor) or message.shape != self._shape or message.dtype != self._dtype:
            raise self._route.refusal(self._spec, _text(message))
        self._route.send(message)

    def post_receive(self) -> Receipt:
        return self._route.post_receive(self._spec, self._device)


class _TreeCrossing:
    """Any tree: its tensors go one after the other; of a gradient only those that can have one."""

    def __init__(self, route: _Route, spec: Spec, device: torch.device) -> None:
        self._route, self._spec, self._device = route, spec, device
        self._leaves: list[MessageSpec] = leaves(spec)
        self._travel = [route.direction == "F" or leaf.has_gradient for leaf in self._leaves]

    def send(self, message: Tree | Gradient) -> None:
        found = leaves(message) if message is not None else [None] * len(self._leaves)
        if not self._fits(message, found):
            raise self._route.refusal(self._spec, _text(message))
        for tensor, spec, travels in zip(found, self._leaves, self._travel, strict=True):
            if travels:
                self._route.send(spec.empty(self._device).zero_() if tensor is None else tensor)

    def post_receive(self) -> TreeReceipt:
        receipts = [
            self._route.post_receive(spec, self._device) if travels else None
            for spec, travels in zip(self._leaves, self._travel, strict=True)
        ]
        return _Receipts(self._spec, receipts)

    def _fits(self, message: Tree | Gradient, found: Sequence[Tensor | None]) -> bool:
        """Whether form, shapes and dtypes are the expected ones; a gradient may lack any tensor."""
        lacks = self._route.direction == "B"
        if message is not None and not _same_form(message, self._spec):
            return False
        return all(
            lacks if tensor is None else (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
            for tensor, spec in zip(found, self._leaves, strict=True)
        )


class _Receipts:
    """The receipts of the tensors of one message; None where none travels."""

    def __init__(self, spec: Spec, receipts: Sequence[Receipt | None]) -> None:
        self._spec, self._receipts = spec, receipts

    def ready(self) -> bool:
        return all(receipt.ready() for receipt in self._receipts if receipt is not None)

    def wait(self) -> Tree | Gradient:
        return rebuild(self._spec, [receipt and receipt.wait() for receipt in self._receipts])


def _same_form(message: Any, spec: Spec) -> bool:
    """Whether two trees differ in their leaves alone."""
    if isinstance(spec, MessageSpec):
        return message is None or isinstance(message, Tensor)
    if type(message) is not type(spec) or len(message) != len(spec):
        return False
    if isinstance(spec, dict):
        return message.keys() == spec.keys() and all(_same_form(message[key], spec[key]) for key in spec)
    return all(map(_same_form, message, spec))


def _text(message: Tree | Gradient) -> str:
    """What was found, for messages."""
    if all(isinstance(leaf, Tensor) for leaf in leaves(message)):
        return spec_text(message_spec(message))
    return f"a {type(message).__name__}"
