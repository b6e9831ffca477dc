"""The meter counts storages while they live, on the device that made them."""

from __future__ import annotations

import torch

from optpipe.runtime import MemoryMeter


def test_bytes_count_from_allocation_to_the_end_of_the_last_view() -> None:
    meter = MemoryMeter()
    with meter, meter.on(0):
        x = torch.zeros(10)
        assert meter.live_bytes[0] == 40
        view = x[2:4]
        x.add_(1)
        del x
        assert meter.live_bytes[0] == 40
        del view
    assert (meter.live_bytes[0], meter.peak_bytes[0]) == (0, 40)


def test_what_was_there_before_is_not_counted_even_through_views() -> None:
    weight = torch.zeros(10, 2)
    meter = MemoryMeter()
    with meter, meter.on(0):
        views = [weight.t(), weight.detach(), weight[0]]
        assert meter.live_bytes[0] == 0
        product = weight @ weight.t()
        assert meter.live_bytes[0] == 400
    assert len(views) == 3
    del product


def test_each_device_has_its_own_count() -> None:
    meter = MemoryMeter()
    with meter:
        with meter.on(0):
            x = torch.zeros(10)
            with meter.on(1):
                y = x + 1
            with meter.on(None):
                z = x.clone()
        assert dict(meter.live_bytes) == {0: 40, 1: 40}
        del x  # freed while no device works, still its own device's
    assert (meter.live_bytes[0], meter.live_bytes[1]) == (0, 40)
    del y, z


def test_the_peak_within_an_expression_is_seen() -> None:
    meter = MemoryMeter()
    with meter, meter.on(0):
        x = torch.zeros(10)
        x = (x + 1) * 2
        assert (meter.live_bytes[0], meter.peak_bytes[0]) == (40, 120)
        meter.restart_peak()
        assert meter.peak_bytes[0] == 40


def test_a_graph_is_counted_until_its_backward() -> None:
    leaf = torch.zeros(10, requires_grad=True)
    leaf.grad = torch.zeros(10)
    meter = MemoryMeter()
    with meter, meter.on(0):
        loss = (leaf.exp() + 1).sum()
        assert meter.live_bytes[0] == 40 + 4, "exp's result, which its backward needs, and the sum"
        torch.autograd.backward(loss)
        assert meter.live_bytes[0] == 4
        del loss
    assert meter.live_bytes[0] == 0
