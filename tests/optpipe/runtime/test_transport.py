"""Messages arrive in the order in which they are sent, whether the receive or the send comes first."""

from __future__ import annotations

import pytest
import torch

from optpipe.runtime import Mailbox, MessageSpec

CPU = torch.device("cpu")
SPEC = MessageSpec((2,), torch.float32)


def message(value: float) -> torch.Tensor:
    return torch.full((2,), value)


def test_first_in_first_out_for_each_pair() -> None:
    mailbox = Mailbox()
    early = mailbox.post_receive(0, 1, SPEC, CPU)
    assert not early.ready()
    for value in (1.0, 2.0):
        mailbox.send(0, 1, message(value))
    mailbox.send(1, 0, message(9.0))
    late = mailbox.post_receive(0, 1, SPEC, CPU)
    assert early.ready()
    assert torch.equal(early.wait(), message(1.0))
    assert torch.equal(late.wait(), message(2.0))
    assert torch.equal(mailbox.post_receive(1, 0, SPEC, CPU).wait(), message(9.0))
    mailbox.finish()


def test_a_message_may_change_after_it_is_sent() -> None:
    mailbox = Mailbox()
    sent = message(1.0)
    mailbox.send(0, 1, sent)
    sent.zero_()
    assert torch.equal(mailbox.post_receive(0, 1, SPEC, CPU).wait(), message(1.0))


def test_a_message_that_nobody_received_is_an_error() -> None:
    mailbox = Mailbox()
    mailbox.send(0, 1, message(1.0))
    with pytest.raises(AssertionError, match=r"nobody received: \{\(0, 1\): 1\}"):
        mailbox.finish()


def test_size_of_a_message() -> None:
    assert MessageSpec((3, 5), torch.float64).size_bytes == 120
