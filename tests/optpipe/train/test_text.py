"""The data: real text, in an order fixed by the seed."""

from __future__ import annotations

import torch

from optpipe.train.text import MAX_TEXT_BYTES, Batches, standard_library_text


def batches(seed: int = 0, microbatches: int = 3) -> Batches:
    return Batches(standard_library_text(), microbatches=microbatches, size=2, sequence=16, seed=seed)


def test_the_text_is_python_source() -> None:
    text = standard_library_text()
    assert 10**6 < len(text) <= MAX_TEXT_BYTES
    assert "import" in bytes(text[:20_000].tolist()).decode()


def test_the_target_of_a_byte_is_the_next_byte() -> None:
    inputs, targets = batches().batch(0)
    assert [x.shape for x in inputs] == [(2, 16)] * 3
    for x, y in zip(inputs, targets, strict=True):
        assert torch.equal(x[:, 1:], y[:, :-1])
        piece = bytes([*x[0].tolist(), int(y[0, -1])])
        assert piece in bytes(standard_library_text().tolist())


def test_the_order_is_fixed_by_seed_and_step() -> None:
    first = torch.stack(batches().batch(7)[0])
    assert torch.equal(torch.stack(batches().batch(7)[0]), first)
    assert not torch.equal(torch.stack(batches().batch(8)[0]), first)
    assert not torch.equal(torch.stack(batches(seed=1).batch(7)[0]), first)
