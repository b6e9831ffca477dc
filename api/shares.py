"""How many of a scarce thing may be held at once, by all callers and by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from uuid import UUID

from api.faults import passing


class Shares:
    """Counts what is held. `name` is the code of the error; use it from one event loop."""

    def __init__(self, name: str, most: int, most_of_one: int) -> None:
        self.name, self.most, self.most_of_one = name, most, most_of_one
        self._held: Counter[UUID | None] = Counter()

    @property
    def held(self) -> int:
        """How many are held now."""
        return self._held.total()

    @contextmanager
    def taken(self, owner: UUID | None) -> Iterator[None]:
        """Hold one. Raises ProblemError: 429 where the caller holds too many, 503 where all together do."""
        what = self.name.replace("_", " ")
        if self._held[owner] >= self.most_of_one:
            text = f"this caller has {self.most_of_one} {what} already, which is all that one key may have at once."
            raise passing(HTTPStatus.TOO_MANY_REQUESTS, f"too_many_{self.name}", text, retry_after_s=1)
        if self.held >= self.most:
            text = f"the server has {self.most} {what} already, which is all it takes at once."
            raise passing(HTTPStatus.SERVICE_UNAVAILABLE, f"too_many_{self.name}", text, retry_after_s=1)
        self._held[owner] += 1
        try:
            yield
        finally:
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]
