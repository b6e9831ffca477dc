"""Messages over a boundary: tensors and trees, gradients without those of integers, and shapes that must stay."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from optpipe.errors import TrainingError
from optpipe.runtime import Mailbox
from optpipe.runtime.channel import open_channel
from optpipe.runtime.messages import message_spec

CPU = torch.device("cpu")
HIDDEN, MASK = torch.arange(6.0).view(2, 3), torch.tensor([True, False])
TREE = {"hidden": HIDDEN, "rest": (MASK, HIDDEN[0])}


def across(message: Any, spec: Any, direction: Literal["F", "B"]) -> Any:
    """Message that arrives on device 1, from device 0."""
    mailbox = Mailbox()
    sender, receiver = (open_channel(mailbox, (0, 1), 4, direction, spec, CPU) for _ in range(2))
    receipt = receiver.post_receive()
    sender.send(message)
    assert receipt.ready()
    mailbox.finish()
    return receipt.wait()


@pytest.mark.parametrize("direction", ["F", "B"])
def test_a_tensor_arrives(direction: Literal["F", "B"]) -> None:
    assert torch.equal(across(HIDDEN, message_spec(HIDDEN), direction), HIDDEN)


def test_a_tree_arrives_in_its_form() -> None:
    found = across(TREE, message_spec(TREE), "F")
    assert torch.equal(found["hidden"], HIDDEN)
    assert torch.equal(found["rest"][0], MASK)
    assert torch.equal(found["rest"][1], HIDDEN[0])


def test_a_tree_is_ready_when_all_of_it_is() -> None:
    mailbox = Mailbox()
    receipt = open_channel(mailbox, (0, 1), 0, "F", message_spec(TREE), CPU).post_receive()
    mailbox.send(0, 1, HIDDEN)
    mailbox.send(0, 1, MASK)
    assert not receipt.ready()
    mailbox.send(0, 1, HIDDEN[0])
    assert receipt.ready()


def test_of_a_gradient_only_floating_tensors_travel_and_what_is_missing_is_zero() -> None:
    found = across({"hidden": HIDDEN, "rest": (None, None)}, message_spec(TREE), "B")
    assert torch.equal(found["hidden"], HIDDEN)
    assert found["rest"][0] is None
    assert torch.equal(found["rest"][1], torch.zeros(3))


def test_a_message_of_integers_has_no_gradient_to_send() -> None:
    assert across(None, message_spec(MASK), "B") is None
    assert torch.equal(across(MASK, message_spec(MASK), "F"), MASK)


REFUSED = [
    (HIDDEN[:, :2], r"float32\[2, 2\] but must be float32\[2, 3\]"),
    (HIDDEN.double(), r"float64\[2, 3\] but must be float32\[2, 3\]"),
    ((HIDDEN,), r"\(float32\[2, 3\]\) but must be float32\[2, 3\]"),
    (7, r"a int but must be"),
]


@pytest.mark.parametrize(("message", "what"), REFUSED)
def test_another_shape_is_refused_with_the_boundary(message: Any, what: str) -> None:
    where = r"the activation across the boundary between stages 4 and 5 is "
    with pytest.raises(TrainingError, match=f"{where}{what}.* Maybe pad"):
        across(message, message_spec(HIDDEN), "F")


BROKEN = [
    {"hidden": HIDDEN},
    TREE | {"rest": [MASK, HIDDEN[0]]},
    TREE | {"rest": (MASK, HIDDEN)},
    TREE | {"hidden": None},
]


@pytest.mark.parametrize("message", BROKEN)
def test_another_tree_is_refused(message: Any) -> None:
    with pytest.raises(TrainingError, match=r"must be \{hidden: float32\[2, 3\], rest: \(bool\[2\], float32\[3\]\)\}"):
        across(message, message_spec(TREE), "F")


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"the gradient across the boundary .* is float32\[3\] but"):
        across(HIDDEN[0], message_spec(HIDDEN), "B")
