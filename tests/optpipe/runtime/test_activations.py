"""Saved activations leave to the host, are really freed, and come back bit for bit."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from optpipe.runtime.activations import ActivationStore, storage_key
from optpipe.runtime.host_slabs import HostSlab, HostSlabs
from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.stage import Stage


def there_and_back(store: ActivationStore, slab: HostSlab) -> None:
    store.copy_out(slab)
    store.free()
    store.allocate()
    store.copy_in()


def saved_by(store: ActivationStore, x: Tensor) -> Tensor:
    """A small graph over x: the sine and the square save one storage each, of 16 floats."""
    with store.hooks():
        y = x.sin()
        return (y * y).sum()


def test_offload_frees_and_reload_brings_back_the_same_bits() -> None:
    x = torch.randn(16, requires_grad=True)
    store, slabs = ActivationStore({storage_key(x)}), HostSlabs([64])
    loss = saved_by(store, x)
    assert store.size_bytes == 16 * 4, "y is saved twice but held once; x is resident"
    there_and_back(store, slabs[0])
    assert slabs.in_use_bytes == 0, "another microbatch may take the slab before the backward"
    slabs[0].take(64).zero_()
    store.hand_over()
    torch.autograd.backward(loss)
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.sin() * x.cos())


def test_a_backward_without_reload_is_refused() -> None:
    x = torch.randn(16, requires_grad=True)
    store = ActivationStore(set())
    loss = saved_by(store, x)
    store.copy_out(HostSlab())
    store.free()
    with pytest.raises(AssertionError, match="on the host"):
        torch.autograd.backward(loss)


def test_each_step_needs_the_one_before() -> None:
    store = ActivationStore(set())
    saved_by(store, torch.randn(16, requires_grad=True))
    with pytest.raises(AssertionError, match="freed before it was offloaded"):
        store.free()
    with pytest.raises(AssertionError, match="reloaded before it was offloaded"):
        store.copy_in()
    store.copy_out(HostSlab())
    store.free()
    with pytest.raises(AssertionError, match="reloaded before memory was prepared"):
        store.copy_in()


def test_memory_is_there_until_it_is_freed_and_from_when_it_is_prepared() -> None:
    x = torch.randn(16, requires_grad=True)
    store, meter, alive = ActivationStore({storage_key(x)}), MemoryMeter(), []
    with meter, meter.on(0):
        loss = saved_by(store, x)
        with meter.on(None):
            store.copy_out(HostSlab(64))
        for step in (lambda: None, store.free, store.allocate, store.copy_in):
            step()
            alive.append(meter.live_bytes[0])
    assert alive == [64 + 4, 4, 64 + 4, 64 + 4], "what is saved, and the loss"
    del loss


def test_views_of_one_storage_are_moved_once() -> None:
    store = ActivationStore(set())
    x = torch.randn(3, 8, requires_grad=True)
    with store.hooks():
        whole = x.exp()
        first, second, third = whole.unbind()
        loss = (first * second * third).sum()
    assert store.size_bytes == 3 * 8 * 4 + 8 * 4, "exp's result with its views, and the product of two rows"
    store.copy_out(HostSlab())
    store.free()
    del whole, first, second, third
    store.allocate()
    store.copy_in()
    torch.autograd.backward(loss)
    plain = x.detach().requires_grad_()
    a, b, c = plain.exp().unbind()
    torch.autograd.backward((a * b * c).sum())
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


@pytest.fixture
def stage() -> Stage:
    return Stage(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))


def test_offload_frees_the_input_of_the_stage_and_all_that_its_layers_save(stage: Stage) -> None:
    """Nothing but the store holds them: neither the graph nor the stage."""
    saved: list[weakref.ref[torch.UntypedStorage]] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        saved.append(weakref.ref(inputs[0].untyped_storage()))

    handles = [layer.register_forward_pre_hook(note) for layer in stage.module.children()]
    stage.forward(0, torch.randn(4, 8), None, offloads=True)
    assert [ref() is not None for ref in saved] == [True, True, True]
    stage.copy_out(0, HostSlab())
    stage.free(0)
    assert [ref() is not None for ref in saved] == [False, False, False]
    for handle in handles:
        handle.remove()


def test_the_output_of_a_stage_is_not_kept(stage: Stage) -> None:
    output = weakref.ref(stage.forward(0, torch.randn(4, 8), None, offloads=False).untyped_storage())
    assert output() is None


def test_offload_changes_no_bit_of_any_gradient(stage: Stage) -> None:
    x, gradient = torch.randn(4, 8), torch.randn(4, 8)
    found = []
    for offloads in (False, True):
        stage.zero_gradients()
        stage.forward(0, x.clone(), None, offloads)
        if offloads:
            stage.copy_out(0, HostSlab())
            stage.free(0)
            stage.allocate(0)
            stage.copy_in(0)
        input_gradient = stage.backward_input(0, gradient)
        stage.backward_weight(0)
        assert input_gradient is not None
        found.append([input_gradient, *(p.grad.clone() for p in stage.module.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(found[0]) == 5


def test_weights_and_the_batch_stay_where_they_are() -> None:
    stage, slabs = Stage(nn.Linear(8, 8), first=True, loss=nn.functional.mse_loss), HostSlabs([0])
    stage.forward(0, torch.randn(4, 8), torch.randn(4, 8), offloads=True)
    stage.copy_out(0, slabs[0])
    assert slabs.in_use_bytes == 4 * 8 * 4, "the prediction, which the loss saves; not the weight, input and target"
