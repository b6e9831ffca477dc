"""Slabs are used again and again, and grow between steps only."""

from __future__ import annotations

import pytest
import torch

from optpipe.runtime.host_slabs import HostSlab, HostSlabs


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
