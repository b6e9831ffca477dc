"""Saved activations leave to the host, are really freed, and come back bit for bit."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from optpipe.runtime.activations import ActivationStore
from optpipe.runtime.host_pool import HostPool
from optpipe.runtime.stage import Stage

CPU = torch.device("cpu")


def saved_by(store: ActivationStore, x: Tensor) -> Tensor:
    """A small graph over x: the sine and the square save one storage each, of 16 floats."""
    with store.hooks():
        y = x.sin()
        return (y * y).sum()


def test_offload_frees_and_reload_brings_back_the_same_bits() -> None:
    x = torch.randn(16, requires_grad=True)
    store, pool = ActivationStore({x.untyped_storage().data_ptr()}), HostPool()
    loss = saved_by(store, x)
    assert store.size_bytes == 16 * 4, "y is saved twice but held once; x is resident"
    store.offload(pool)
    assert pool.in_use_bytes == 64
    store.reload(CPU)
    store.release()
    assert pool.in_use_bytes == 0
    torch.autograd.backward(loss)
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.sin() * x.cos())


def test_a_backward_without_reload_is_refused() -> None:
    x = torch.randn(16, requires_grad=True)
    store = ActivationStore(set())
    loss = saved_by(store, x)
    store.offload(HostPool())
    with pytest.raises(AssertionError, match="on the host"):
        torch.autograd.backward(loss)


def test_views_of_one_storage_are_moved_once() -> None:
    store = ActivationStore(set())
    x = torch.randn(3, 8, requires_grad=True)
    with store.hooks():
        whole = x.exp()
        first, second, third = whole.unbind()
        loss = (first * second * third).sum()
    assert store.size_bytes == 3 * 8 * 4 + 8 * 4, "exp's result with its views, and the product of two rows"
    pool = HostPool()
    store.offload(pool)
    del whole, first, second, third
    store.reload(CPU)
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
    stage.offload(0, HostPool())
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
            stage.offload(0, HostPool())
            stage.reload(0)
        input_gradient = stage.backward_input(0, gradient)
        stage.backward_weight(0)
        assert input_gradient is not None
        found.append([input_gradient, *(p.grad.clone() for p in stage.module.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(found[0]) == 5


def test_weights_and_the_batch_stay_where_they_are() -> None:
    stage, pool = Stage(nn.Linear(8, 8), first=True, loss=nn.functional.mse_loss), HostPool()
    stage.forward(0, torch.randn(4, 8), torch.randn(4, 8), offloads=True)
    stage.offload(0, pool)
    assert pool.in_use_bytes == 4 * 8 * 4, "the prediction, which the loss saves; not the weight, input and target"


def test_buffers_are_used_again() -> None:
    pool = HostPool()
    first = pool.take(64)
    pool.give_back(first)
    assert pool.take(64) is first
    assert pool.take(64) is not first
    assert (pool.in_use_bytes, pool.peak_bytes) == (128, 128)
