"""The model: a GPT whose weights do not depend on how it is cut, and whose layers may not see ahead."""

from __future__ import annotations

import torch
from torch import nn

from optpipe.train.config import SIZES, GPTShape
from optpipe.train.tasks.gpt import MAX_TEXT_BYTES, Batches, build_stages, byte_loss, standard_library_text

SHAPE = GPTShape(width=16, heads=2, sequence=8, layers=5)
TEXT = torch.arange(16).reshape(2, 8)


def logits(stages: int, seed: int = 3, text: torch.Tensor = TEXT) -> torch.Tensor:
    model = nn.Sequential(*build_stages(SHAPE, stages, seed, torch.float64))
    result: torch.Tensor = model(text)
    return result


def test_the_cut_changes_no_bit() -> None:
    whole = logits(1)
    assert whole.shape == (2, 8, 256)
    for stages in (2, 3, 5):
        assert torch.equal(logits(stages), whole)
    assert not torch.equal(logits(1, seed=4), whole)


def test_every_stage_has_a_layer() -> None:
    stages = build_stages(SHAPE, 3, 0, torch.float32)
    assert [sum(name.endswith("projection.bias") for name, _ in s.named_parameters()) for s in stages] == [2, 2, 1]


def test_no_position_sees_a_later_one() -> None:
    changed = TEXT.clone()
    changed[:, 5] = 99
    before, after = logits(1), logits(1, text=changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_an_untrained_model_knows_nothing() -> None:
    """ln 256 = 5.55 nats a byte."""
    assert abs(byte_loss(logits(1), TEXT).item() - 5.545) < 0.1


def test_parameters_of_the_sizes() -> None:
    def parameters(name: str, layers: int) -> int:
        size = SIZES[name]
        modules = build_stages(GPTShape(size.width, size.heads, size.sequence, layers), 1, 0, torch.float32)
        return sum(p.numel() for p in modules[0].parameters())

    def a_layer(name: str) -> int:
        return parameters(name, 2) - parameters(name, 1)

    assert [a_layer(name) for name in ("tiny", "small", "medium")] == [12_704, 789_760, 1_774_464]
    assert parameters("small", 4) == 3_323_392


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
