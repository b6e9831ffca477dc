"""Channel over one stage boundary in one direction: splits messages into tensors and reassembles them.

A message of another shape than in the first step is rejected by the sender, where the fault is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from optpipe.errors import TrainingError
from optpipe.runtime.messages import Gradient, MessageSpec, Spec, Tree, leaves, message_spec, rebuild, spec_text
from optpipe.runtime.transport import Receipt, Transport

Direction = Literal["F", "B"]


class TreeReceipt(Protocol):
    """Pending receive of a message; `Receipt` is one for a single tensor."""

    def ready(self) -> bool:
        """True if the message has arrived."""

    def wait(self) -> Any:
        """Wait for the message and return it."""


class Channel(Protocol):
    """Sends and receives of one boundary, direction and pair of devices."""

    def send(self, message: Tree | Gradient) -> None:
        """Send a message without waiting for its arrival."""

    def post_receive(self) -> TreeReceipt:
        """Allocate memory for the next message and post its receive."""


class _Route:
    """Transport, end points, boundary and direction of a channel."""

    def __init__(
        self, transport: Transport, source: int, target: int, boundary: int, direction: Direction, *, varies: bool
    ) -> None:
        self.transport, self.source, self.target = transport, source, target
        self.boundary, self.direction, self._varies = boundary, direction, varies

    def send(self, tensor: Tensor) -> None:
        self.transport.send(self.source, self.target, tensor)

    def post_receive(self, spec: MessageSpec, device: torch.device) -> Receipt:
        return self.transport.post_receive(self.source, self.target, spec, device)

    def mismatch(self, expected: Spec, actual: str) -> TrainingError:
        subject = "activation" if self.direction == "F" else "gradient"
        why = "as follows from the sizes of its input" if self._varies else "as in every microbatch"
        return TrainingError(
            f"the {subject} across the boundary between stages {self.boundary} and {self.boundary + 1} is {actual} but "
            f"must be {spec_text(expected)}, {why}. Maybe pad the batch to one shape, and "
            "return the same tensors in training and in evaluation."
        )


def open_channel(
    transport: Transport,
    pair: tuple[int, int],
    boundary: int,
    direction: Direction,
    spec: Spec | Callable[[], Spec],
    device: torch.device,
) -> Channel:
    """The channel from device `pair[0]` to `pair[1]`; receives allocate on `device`.

    `spec`: that of every message, or a function that gives the one of the next.
    """
    varies = callable(spec)
    route = _Route(transport, *pair, boundary, direction, varies=varies)
    return _VaryingChannel(route, spec, device) if varies else _channel(route, spec, device)


def _channel(route: _Route, spec: Spec, device: torch.device) -> Channel:
    direction = route.direction
    if isinstance(spec, MessageSpec) and (spec.has_gradient or direction == "F"):
        return _TensorChannel(route, spec, device)
    return _TreeChannel(route, spec, device)


class _TensorChannel:
    """Channel for messages of a single tensor, the usual case."""

    def __init__(self, route: _Route, spec: MessageSpec, device: torch.device) -> None:
        self._route, self._spec, self._device = route, spec, device
        self._shape, self._dtype = torch.Size(spec.shape), spec.dtype

    def send(self, message: Tree | Gradient) -> None:
        if message is None and self._route.direction == "B":
            message = self._spec.empty(self._device).zero_()
        if not isinstance(message, Tensor) or message.shape != self._shape or message.dtype != self._dtype:
            raise self._route.mismatch(self._spec, _text(message))
        self._route.send(message)

    def post_receive(self) -> Receipt:
        return self._route.post_receive(self._spec, self._device)


class _VaryingChannel:
    """Channel for messages of which each has a spec of its own."""

    def __init__(self, route: _Route, spec: Callable[[], Spec], device: torch.device) -> None:
        self._route, self._spec, self._device = route, spec, device

    def send(self, message: Tree | Gradient) -> None:
        _channel(self._route, self._spec(), self._device).send(message)

    def post_receive(self) -> TreeReceipt:
        return _channel(self._route, self._spec(), self._device).post_receive()


class _TreeChannel:
    """Channel for any tree: one send per tensor; of a gradient, only tensors that can have one."""

    def __init__(self, route: _Route, spec: Spec, device: torch.device) -> None:
        self._route, self._spec, self._device = route, spec, device
        self._leaves: list[MessageSpec] = leaves(spec)
        self._travel = [route.direction == "F" or leaf.has_gradient for leaf in self._leaves]

    def send(self, message: Tree | Gradient) -> None:
        tensors = leaves(message) if message is not None else [None] * len(self._leaves)
        may_lack = self._route.direction == "B"  # a gradient has no tensor where nothing depends on the message
        if (message is not None and not _same_form(message, self._spec)) or not all(
            may_lack if tensor is None else (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
            for tensor, spec in zip(tensors, self._leaves, strict=True)
        ):
            raise self._route.mismatch(self._spec, _text(message))
        for tensor, spec, travels in zip(tensors, self._leaves, self._travel, strict=True):
            if travels:
                self._route.send(spec.empty(self._device).zero_() if tensor is None else tensor)

    def post_receive(self) -> TreeReceipt:
        receipts = [
            self._route.post_receive(spec, self._device) if travels else None
            for spec, travels in zip(self._leaves, self._travel, strict=True)
        ]
        return _Receipts(self._spec, receipts)


class _Receipts:
    """Receipts of the tensors of one message; None for tensors that are not sent."""

    def __init__(self, spec: Spec, receipts: Sequence[Receipt | None]) -> None:
        self._spec, self._receipts = spec, receipts

    def ready(self) -> bool:
        return all(receipt.ready() for receipt in self._receipts if receipt is not None)

    def wait(self) -> Tree | Gradient:
        return rebuild(self._spec, [receipt and receipt.wait() for receipt in self._receipts])


def _same_form(message: Any, spec: Spec) -> bool:
    """True if message and spec are equal but for their leaves."""
    if isinstance(spec, MessageSpec):
        return message is None or isinstance(message, Tensor)
    if type(message) is not type(spec) or len(message) != len(spec):
        return False
    if isinstance(spec, dict):
        return message.keys() == spec.keys() and all(_same_form(message[key], spec[key]) for key in spec)
    return all(map(_same_form, message, spec))


def _text(message: Tree | Gradient) -> str:
    """Text of a message for errors."""
    if all(isinstance(leaf, Tensor) for leaf in leaves(message)):
        return spec_text(message_spec(message))
    return f"a {type(message).__name__}"
