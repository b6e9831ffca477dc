"""Kinds of op: their rows against the contract's rules, and against torch."""

from typing import get_args

import pytest

from optpipe.kinds import DUTIES, KIND, KIND_OF_TORCH, KINDS, PASSAGE, PRECEDENCES, ROWS, KindName, covering
from optpipe.trace.observed import ACTION
from tests import mode_oracle


def test_documents_and_type_checkers_know_every_kind() -> None:
    assert get_args(KindName) == KINDS
    assert sorted(PASSAGE) == sorted(DUTIES)


def test_every_op_follows_what_the_contract_names() -> None:
    stage = {"activation_bytes": 2, "offload": {"bytes": 1}, "modes": []}
    stage["modes"] = [{"name": "again", "kept_bytes": 1, "segment_bytes": 1, "offload": {"bytes": 1}}]
    for name in mode_oracle.mode_names(stage):
        for kinds in mode_oracle.ways(stage, name):
            there = {(kind, s, 0) for kind in ("F", *kinds) for s in range(3)}
            edges = {
                ((KINDS[before], s + rule.need.stage, 0), (KINDS[after], s, 0))
                for rule in PRECEDENCES
                for before in rule.before
                for after in rule.after
                for s in range(3)
            }
            found = {op: {before for before, after in edges if after == op and before in there} for op in there}
            assert found == {op: {*mode_oracle.needs(op, there, 2)} & there for op in there}


def test_letters_are_those_of_torch() -> None:
    types = pytest.importorskip("torch.distributed.pipelining.schedules")._ComputationType
    letters = {"F": types.FORWARD, "B": types.BACKWARD_INPUT, "W": types.BACKWARD_WEIGHT, "BW": types.FULL_BACKWARD}
    for name, letter in letters.items():
        assert types.from_str(KIND[name].torch) == letter
        assert KIND_OF_TORCH[KIND[name].torch] == name
    # A backward that recomputes inside itself is torch's own, of a module that is checkpointed.
    for row in ROWS:
        plain = [*{*row.duties} - {"C"}]
        assert row.torch == (KIND[covering(*plain)[0]].torch if row.stream == "compute" and plain else None)
        assert row.torch is None or ACTION.fullmatch(f"PP:0{row.torch}1")
