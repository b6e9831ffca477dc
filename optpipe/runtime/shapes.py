"""Shapes of messages where microbatches differ: functions of the sizes of a microbatch's input.

A receive is posted long before its message is made, so the receiver has to know the shape before the sender has run.
Every process has the inputs of a step before it starts, so nothing has to be sent ahead: each dimension of a message is
learnt from a few microbatches as a function of the sizes of the input. A sender holds every message against that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod

from optpipe.errors import TrainingError
from optpipe.runtime.messages import MessageSpec, Spec, Tree, leaves, map_leaves, message_spec, rebuild, spec_text

Rule = Callable[[Sequence[int]], Fraction | int]
"""A dimension of a message from the dimensions of all tensors of the input, one after the other."""


class MessageShapes:
    """Messages at all boundaries as functions of a microbatch's input.

    Learnt from `samples`, pairs of an input's spec and the messages that it makes (`learn_messages`). A dimension is
    one of the input's or a constant, else the product of two, or a dimension times a factor or plus a number. Raises
    TrainingError where none of these explains all samples, or where messages have other forms or dtypes.
    """

    def __init__(self, samples: Sequence[tuple[Spec, Sequence[Spec]]]) -> None:
        self.input = samples[0][0]
        self._forms = samples[0][1]
        inputs = [_sizes(spec) for spec, _ in samples]
        self._rules: list[list[list[Rule]]] = []
        for boundary in range(len(self._forms)):
            messages = [of_sample[boundary] for _, of_sample in samples]
            for message in messages:
                if not alike(message, messages[0]):
                    raise TrainingError(
                        f"the message between stages {boundary} and {boundary + 1} is {spec_text(messages[0])} for one "
                        f"microbatch but {spec_text(message)} for another: only sizes may differ. Maybe return tensors "
                        "of the same form for every microbatch."
                    )
            rules = []
            for tensors in zip(*map(leaves, messages), strict=True):
                columns = zip(*(spec.shape for spec in tensors), strict=True)
                rules.append([_rule(boundary, place, inputs, column) for place, column in enumerate(columns)])
            self._rules.append(rules)
        self._known: dict[tuple[int, ...], list[Spec]] = {}

    def of_units(self, inputs: Sequence[Tree]) -> Sequence[Sequence[Spec]]:
        """Messages of each microbatch of a step (`of`)."""
        return [self.of(microbatch) for microbatch in inputs]

    def of(self, microbatch: Tree) -> Sequence[Spec]:
        """Messages of a microbatch with this input. Raises TrainingError for an input of another form."""
        spec = message_spec(microbatch)
        if not alike(spec, self.input):
            raise TrainingError(
                f"the input of a microbatch is {spec_text(spec)}, which differs in more than its sizes from "
                f"{spec_text(self.input)}, the first. Maybe give all microbatches the same form and dtypes."
            )
        sizes = tuple(_sizes(spec))
        if sizes not in self._known:
            self._known[sizes] = [
                rebuild(form, [_spec(tensor, rule, sizes) for tensor, rule in zip(leaves(form), rules, strict=True)])
                for form, rules in zip(self._forms, self._rules, strict=True)
            ]
        return self._known[sizes]


@dataclass(frozen=True)
class SliceMessages:
    """Messages of slices of sequences: `slices[q][b]` is that of slice q of each microbatch over boundary b."""

    slices: Sequence[Sequence[Spec]]

    def of_units(self, inputs: Sequence[Tree]) -> Sequence[Sequence[Spec]]:
        """Messages of each slice of a step."""
        return [self.slices[unit % len(self.slices)] for unit in range(len(inputs))]


def alike(one: Spec, other: Spec) -> bool:
    """True if two specs are equal but for the sizes of dimensions."""

    def form(spec: MessageSpec) -> MessageSpec:
        return MessageSpec((0,) * len(spec.shape), spec.dtype)

    equal: bool = map_leaves(form, one) == map_leaves(form, other)
    return equal


def _sizes(spec: Spec) -> list[int]:
    return [size for tensor in leaves(spec) for size in tensor.shape]


def _spec(tensor: MessageSpec, rules: Sequence[Rule], sizes: Sequence[int]) -> MessageSpec:
    return MessageSpec(tuple(int(rule(sizes)) for rule in rules), tensor.dtype)


def _rule(boundary: int, place: int, inputs: Sequence[Sequence[int]], values: Sequence[int]) -> Rule:
    """The simplest rule for the dimension at `place` of a message that gives all `values`."""
    for rule in _candidates(place, inputs, values):
        if all(rule(sizes) == value for sizes, value in zip(inputs, values, strict=True)):
            return rule
    raise TrainingError(
        f"dimension {place} of the message between stages {boundary} and {boundary + 1} has the sizes "
        f"{', '.join(map(str, values[:6]))} for microbatches whose inputs have {', '.join(map(str, inputs[:6]))}: "
        "it is no function of one or two of these. Maybe pad the microbatches to one shape."
    )


def _candidates(place: int, inputs: Sequence[Sequence[int]], values: Sequence[int]) -> Iterator[Rule]:
    """Rules by simplicity. Where few samples leave a choice, the input's dimension at the same place comes first."""
    numbers = range(len(inputs[0]))
    for k in [place] if place in numbers else []:
        yield lambda sizes, k=k: sizes[k]  # type: ignore[misc]
    yield lambda _sizes: values[0]
    products = [(k,) for k in numbers] + list(combinations_with_replacement(numbers, 2))
    for dimensions in products:
        yield lambda sizes, of=dimensions: prod(sizes[k] for k in of)  # type: ignore[misc]
    for dimensions in products:
        first = prod(inputs[0][k] for k in dimensions)
        if first:
            factor = Fraction(values[0], first)
            yield lambda sizes, of=dimensions, by=factor: by * prod(sizes[k] for k in of)  # type: ignore[misc]
        yield lambda sizes, of=dimensions, by=values[0] - first: prod(sizes[k] for k in of) + by  # type: ignore[misc]
