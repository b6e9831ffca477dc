"""Shapes of messages as functions of the sizes of a microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optpipe.errors import TrainingError
from optpipe.runtime import Mailbox, MessageShapes, MessageSpec
from optpipe.runtime.channel import open_channel
from optpipe.runtime.messages import message_spec

FLOAT, LONG = torch.float32, torch.int64


def ids(rows: int, length: int) -> MessageSpec:
    return MessageSpec((rows, length), LONG)


def shapes(*samples: tuple[Any, Any]) -> MessageShapes:
    return MessageShapes([(inputs, [message]) for inputs, message in samples])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (lambda n, t: (n, t, 8), (2, 7, 8)),
        (lambda n, t: (t, n, 8), (7, 2, 8)),  # sequence first
        (lambda n, t: (n * t, 8), (14, 8)),  # rows of all sequences together
        (lambda n, t: (n, 1, t, t), (2, 1, 7, 7)),  # a mask
        (lambda n, t: (n, t + 1, 8), (2, 8, 8)),  # one token more
        (lambda n, t: (n, 2 * t), (2, 14)),
        (lambda n, t: (3, 8), (3, 8)),  # nothing depends on the input
    ],
)
def test_dimensions_follow_those_of_the_input(message: Any, expected: tuple[int, ...]) -> None:
    samples = [(4, 16), (4, 6), (2, 10)]
    found = shapes(*((ids(n, t), MessageSpec(message(n, t), FLOAT)) for n, t in samples))
    assert found.of(torch.zeros(2, 7, dtype=LONG)) == [MessageSpec(expected, FLOAT)]


def test_from_one_sample_a_dimension_is_that_of_the_input_in_its_place_or_constant() -> None:
    found = shapes((ids(4, 16), MessageSpec((4, 16, 16), FLOAT)))
    assert found.of(torch.zeros(2, 7, dtype=LONG)) == [MessageSpec((2, 7, 16), FLOAT)]


def test_trees_of_several_tensors_keep_their_form() -> None:
    def sample(t: int, documents: int) -> tuple[Any, Any]:
        inputs = {"ids": ids(1, t), "ends": MessageSpec((documents,), LONG)}
        return inputs, {"hidden": MessageSpec((1, t, 8), FLOAT), "ends": MessageSpec((documents,), LONG)}

    found = shapes(sample(16, 3), sample(9, 2))
    batch = {"ids": torch.zeros(1, 12, dtype=LONG), "ends": torch.zeros(5, dtype=LONG)}
    assert found.of(batch) == [sample(12, 5)[1]]


def test_sizes_that_follow_from_nothing_are_refused() -> None:
    samples = [(ids(4, 16), MessageSpec((4, 5), FLOAT)), (ids(4, 8), MessageSpec((4, 3), FLOAT))]
    samples.append((ids(4, 12), MessageSpec((4, 11), FLOAT)))
    with pytest.raises(
        TrainingError, match=r"dimension 1 of the message between stages 0 and 1 has the sizes 5, 3, 11"
    ):
        shapes(*samples)


def test_other_forms_and_inputs_are_refused() -> None:
    with pytest.raises(TrainingError, match="only sizes may differ"):
        shapes((ids(4, 16), MessageSpec((4, 5), FLOAT)), (ids(4, 8), MessageSpec((4, 5), LONG)))
    found = shapes((ids(4, 16), MessageSpec((4, 16), FLOAT)))
    with pytest.raises(TrainingError, match="differs in more than its sizes"):
        found.of(torch.zeros(4, 16))


def test_a_channel_takes_another_shape_for_each_message_and_no_other() -> None:
    mailbox, specs = Mailbox(), [MessageSpec((2, 3), FLOAT), MessageSpec((5, 3), FLOAT)]
    left, device = iter(specs * 2), torch.device("cpu")
    sender = open_channel(mailbox, (0, 1), 0, "F", lambda: specs[0], device)
    receiver = open_channel(mailbox, (0, 1), 0, "F", lambda: next(left), device)
    for spec in specs:
        receipt = receiver.post_receive()
        assert message_spec(receipt.wait() if receipt.ready() else spec.empty()) == spec
    message = "must be float32[2, 3], as follows from the sizes of its input"
    with pytest.raises(TrainingError) as error:
        sender.send(torch.zeros(4, 3))
    assert message in str(error.value)
