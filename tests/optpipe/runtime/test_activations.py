"""Saved activations leave to the host, are really freed, and come back bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from optpipe.runtime.activations import ActivationStore, HeldBytes, HostSlab, HostSlabs, storage_key
from optpipe.runtime.recorder import MemoryMeter
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


@pytest.mark.parametrize(("precision", "bits"), [("bf16", 8), ("fp8", 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_copies_in_low_precision_round_each_entry(precision: str, bits: int, dtype: torch.dtype) -> None:
    """To so many bits; in fp8 entries far below the largest to a share of that. What is small or no float is exact."""
    large = torch.randn(3 * 2**19, dtype=dtype, generator=torch.Generator().manual_seed(0)).mul_(1000)
    large[:4] = torch.tensor([0.0, 1e-9, -1e-3, 3e4])
    statistic, mask = torch.randn(64, dtype=dtype), torch.randint(2, (2**20,)).bool()
    copied = HeldBytes()
    store, slab = ActivationStore(()), HostSlab(held=copied)
    held = [store.hold(tensor.clone()) for tensor in (large, statistic, mask)]
    store.copy_out(slab, precision)
    assert copied.now == large.numel() * (2 if precision == "bf16" else 1) + statistic.nbytes + mask.nbytes
    store.free()
    store.allocate()
    store.copy_in()
    found = [store.held(description) for description in held]
    assert found[0].dtype is dtype
    error, entry = (found[0] - large).abs(), large.abs()
    smallest = float(entry.max()) * 2.0**-18 if precision == "fp8" else 0.0
    assert bool((error <= (entry * 2.0**-bits).clamp_min(smallest)).all())
    assert float((error / entry.clamp_min(1e-30)).max()) > 2.0 ** -(bits + 1), "it is rounded"
    assert torch.equal(found[1], statistic)
    assert torch.equal(found[2], mask)


def test_what_is_all_zeros_or_has_two_types_returns_as_it_left() -> None:
    zeros, shared = torch.zeros(32), torch.randn(32)
    store, slab = ActivationStore(()), HostSlab()
    held = [store.hold(tensor) for tensor in (zeros, shared, shared.view(torch.int32))]
    before = shared.clone()
    store.copy_out(slab, "fp8")
    store.free()
    store.allocate()
    store.copy_in()
    assert torch.equal(store.held(held[0]), zeros)
    assert torch.equal(store.held(held[1]), before)


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


@pytest.mark.parametrize("view", [Tensor.conj, lambda x: x.conj().imag], ids=["conjugate", "negative"])
def test_what_torch_only_notes_about_a_tensor_returns_with_it(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, dtype=torch.complex64)
    store, slab = ActivationStore(()), HostSlab()
    held, before = store.hold(view(x)), view(x).resolve_conj().resolve_neg().clone()
    there_and_back(store, slab)
    assert torch.equal(store.held(held), before)


def test_weights_and_the_batch_stay_where_they_are() -> None:
    stage, slabs = Stage(nn.Linear(8, 8), first=True, loss=nn.functional.mse_loss), HostSlabs([0])
    stage.forward(0, torch.randn(4, 8), torch.randn(4, 8), offloads=True)
    stage.copy_out(0, slabs[0])
    assert slabs.in_use_bytes == 4 * 8 * 4, "the prediction, which the loss saves; not the weight, input and target"


def test_a_slab_is_used_again() -> None:
    slab = HostSlab(64)
    first = slab.take(64)
    slab.give_back()
    assert slab.take(48).data_ptr() == first.data_ptr()


def test_a_slab_holds_one_microbatch_at_a_time() -> None:
    slab = HostSlab(64)
    slab.take(64)
    with pytest.raises(AssertionError, match="one microbatch at a time"):
        slab.take(64)


def test_a_slab_that_is_too_small_grows_to_exactly_what_was_wanted_once_the_step_is_over() -> None:
    slabs = HostSlabs([0, 16])
    rooms = [slabs[0].take(40), slabs[1].take(16)]
    assert [len(room) for room in rooms] == [40, 16]
    assert slabs.size_bytes == 16
    assert slabs.too_small
    slabs[0].give_back()
    slabs.grow()
    assert slabs.size_bytes == 40 + 16
    assert not slabs.too_small


def test_bytes_are_counted_over_all_slabs_of_a_device() -> None:
    slabs = HostSlabs([0, 0])
    slabs[0].take(40)
    slabs[1].take(24)
    slabs[0].give_back()
    assert (slabs.in_use_bytes, slabs.peak_bytes) == (24, 64)
    slabs[0].give_back()
    assert slabs.in_use_bytes == 24, "a slab that is free stays free"


def test_pinned_memory_has_exactly_the_wanted_size_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered with a CUDA runtime that only takes notes."""
    registered: dict[int, int] = {}

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, size_bytes: int, _flags: int) -> int:  # noqa: N802
            registered[address] = size_bytes
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> None:  # noqa: N802
            del registered[address]

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    slabs = HostSlabs([100, 0], pinned=True)
    assert list(registered.values()) == [100]
    room = slabs[1].take(37)
    assert list(registered.values()) == [100], "nothing is pinned within a step"
    slabs[1].give_back()
    slabs.grow()
    assert sorted(registered.values()) == [37, 100]
    del slabs, room
    assert registered == {}
