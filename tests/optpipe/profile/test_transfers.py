"""Conclusions from measured copies; measuring them needs GPUs."""

from __future__ import annotations

import pytest
import torch

from optpipe.profile.transfers import groups_of, measure_contention, on_all_hosts, shares


@pytest.mark.parametrize(("together", "expected"), [(1.0, False), (1.4, False), (1.6, True), (2.0, True)])
def test_copies_that_slow_each_other_share(together: float, expected: bool) -> None:
    assert shares(1.0, together) is expected


def test_groups_join_whoever_shares_with_anyone() -> None:
    assert groups_of([]) == []
    assert groups_of([(0, 1), (2, 3)]) == [[0, 1], [2, 3]]
    assert groups_of([(0, 1), (4, 5), (1, 4)]) == [[0, 1, 4, 5]]


def test_hosts_are_alike() -> None:
    assert on_all_hosts([[0, 1], [2, 3]], 4, 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert on_all_hosts([[0, 1], [2, 3]], 4, 7) == [[0, 1], [2, 3], [4, 5]], "device 6 has no neighbour"


def test_on_the_cpu_it_says_why_not() -> None:
    found = measure_contention(torch.device("cpu"), 4)
    assert found.channels.to_data() == {}
    assert "not measured" in found.how
