"""Shares of what is scarce."""

from __future__ import annotations

from contextlib import ExitStack
from uuid import UUID

import pytest

from api.faults import ProblemError
from api.shares import Shares

ONE, OTHER = UUID(int=1), UUID(int=2)


def test_one_caller_has_its_share_and_others_theirs() -> None:
    shares = Shares("open_things", most=3, most_of_one=2)
    with ExitStack() as stack:
        stack.enter_context(shares.taken(ONE))
        stack.enter_context(shares.taken(ONE))
        assert _refused(shares, ONE) == 429
        stack.enter_context(shares.taken(OTHER))
        assert _refused(shares, OTHER) == 503
        assert shares.held == 3
    assert shares.held == 0
    with shares.taken(ONE):
        assert shares.held == 1


def _refused(shares: Shares, owner: UUID) -> int:
    with pytest.raises(ProblemError, match="open things already") as caught, shares.taken(owner):
        pass
    assert caught.value.headers is not None
    assert int(caught.value.headers["Retry-After"]) >= 1
    return int(caught.value.status)
