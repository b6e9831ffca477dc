"""Circles among ops that have times, against networkx."""

from __future__ import annotations

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe.circles import find_circle

PLACES = st.integers(0, 6)


@settings(deadline=None)
@given(st.sets(st.tuples(PLACES, PLACES)), st.lists(st.sampled_from([0.0, 0.1, 0.3, 5.0]), min_size=7, max_size=7))
def test_finds_one_where_there_is_one(edges: set[tuple[int, int]], starts: list[float]) -> None:
    op, before = np.array(sorted(edges), np.int64).reshape(-1, 2).T
    circle = find_circle(op, before, np.array(starts))
    if nx.is_directed_acyclic_graph(nx.DiGraph(edges)):
        assert circle is None
    else:
        assert circle
        assert {*zip(circle, [circle[-1], *circle], strict=False)} <= edges
