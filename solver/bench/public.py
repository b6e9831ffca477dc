"""What public schedulers reach on the instances: the values that ours are held against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict

from optpipe.document import Document, read_document
from optpipe.errors import InputError, Issue
from optpipe.fields import Share, TimeUs
from solver.bench.measure import Figures

MAX_REFERENCE_BYTES = 4 * 2**20

PRINTED_BUBBLE_ERROR = 0.5e-4
"""Bubbles are published with four digits; the value is taken at the upper end of what was rounded."""


@dataclass(frozen=True)
class Public:
    """The best public schedule of an instance: its objective's value and whose it is."""

    value_us: float
    scheduler: str

    def bubble(self, ours: Figures) -> float:
        """The bubble rate of the public schedule, which does the same work as a schedule of ours."""
        return 1 - (1 - ours.bubble) * ours.value_us / self.value_us


class _Part(Document):
    """A part of the reference; it has more fields than are read here."""

    model_config = ConfigDict(extra="ignore")


class _BestPublic(_Part):
    scheduler: str
    value_us: TimeUs


class _Entry(_Part):
    """What is known of one instance; `best_public` is None where no public scheduler found anything."""

    best_public: _BestPublic | None = None
    zero_bubble_heuristic_us: TimeUs | None = None
    zb_v_us: TimeUs | None = None
    public_bubble: dict[str, Share] = {}
    work_us: TimeUs | None = None

    def public(self) -> Public | None:
        """The best value that is known exactly, else the best that follows from a printed bubble."""
        known = [
            Public(value_us, scheduler)
            for value_us, scheduler in (
                (self.zero_bubble_heuristic_us, "Zero Bubble heuristic"),
                (self.zb_v_us, "ZB-V"),
                (self.best_public.value_us, self.best_public.scheduler) if self.best_public else (None, ""),
            )
            if value_us is not None
        ]
        if not known and self.work_us is not None:
            known = [
                Public(self.work_us / (1 - bubble - PRINTED_BUBBLE_ERROR), scheduler)
                for scheduler, bubble in self.public_bubble.items()
            ]
        return min(known, key=lambda public: public.value_us, default=None)


def load_public(path: Path) -> dict[str, Public]:
    """The best public value of each instance in a reference file that has one. Raises InputError."""
    reference = read_document(path, MAX_REFERENCE_BYTES, {})
    if not isinstance(reference, dict):
        raise InputError([Issue("", "not_an_object", "must be an object with an entry for each instance.")], str(path))
    found = {name: _Entry.from_data(entry, f"{path}: {name}").public() for name, entry in reference.items()}
    return {name: public for name, public in found.items() if public is not None}
