"""Answers of `optpipe plan --why`: what an alternative loses to the best, and to what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.cli.console import stdout, table
from optpipe.cli.plan_layouts import first_of
from optpipe.errors import InputError, Issue, shown
from optpipe.placement import parse_placement, placement
from optpipe.units import change_text, difference_text, time_text, time_unit

if TYPE_CHECKING:
    from optpipe.layers import LayerProfile
    from optpipe.partition import Partition
    from solver.layout.candidates import Candidate, Search
    from solver.layout.ranking import Judged

Losses = tuple[str, Mapping[str, float]]
"""Name of an alternative, and what it loses by kind, in us."""

CHOICES: Mapping[str, Callable[[Candidate], str]] = {
    "placement": lambda one: one.placement,
    "cut": lambda one: one.cut.partition("-")[0],
    "microbatch_size": lambda one: str(one.batching.microbatch_size),
    "slices": lambda one: str(max(1, len(one.slices))),
    "offload": lambda one: "yes" if one.offload else "no",
    "vocabulary": lambda one: one.vocabulary,
}
"""Choices of a layout by name, as their values are written."""


def print_losses(header: str, one: Losses, best: Losses) -> None:
    """Print what an alternative loses, first what it loses more than the best; nothing that neither loses."""
    (name, mine), (best_name, others) = one, best
    rows = table(header, name, best_name, "difference")
    unit = time_unit(max([*mine.values(), *others.values()], default=0.0))
    for kind in sorted(mine, key=lambda kind: others[kind] - mine[kind]):
        if mine[kind] or others[kind]:
            difference = difference_text(mine[kind] - others[kind], unit)
            rows.add_row(kind, time_text(mine[kind], unit), time_text(others[kind], unit), difference)
    stdout().print(rows)


@dataclass(frozen=True)
class AskedLayout:
    """Layout that a user asks about: some of its choices, and its cut where that is given by numbers of layers."""

    choices: Mapping[str, str]
    sizes: tuple[int, ...]

    @classmethod
    def read(cls, text: str, profile: LayerProfile, search: Search, cuts: Sequence[str]) -> AskedLayout:
        """Read a text such as ``placement=v,cut=5,3``. Raises InputError for a choice that is not searched.

        `cuts`: names of cuts.
        """
        from solver.layout.why import read_pairs

        where, example = "--why", f"placement={search.placements[-1]},cut=even"
        choices = read_pairs(text, where, CHOICES, example, lists=("cut",))
        searched: dict[str, Sequence[object]] = {
            "placement": search.placements,
            "microbatch_size": search.microbatch_sizes,
            "slices": search.slices,
            "offload": ["yes" if offload else "no" for offload in search.offload],
            "vocabulary": [*search.vocabulary],
        }
        for name, values in searched.items():
            if name in choices and choices[name] not in map(str, values):
                known = ", ".join(map(str, values))
                detail = f"has {name} {shown(choices[name])}, which is not searched. Maybe {name} of {known}."
                raise InputError([Issue(where, "not_searched", detail)])
        cut = choices.get("cut", "even")
        if cut in cuts:
            return cls(choices, ())
        layers = len(profile.each_layer)
        sizes = tuple(int(part) if part.isdecimal() and len(part) <= len(str(layers)) else 0 for part in cut.split(","))
        if sum(sizes) != layers or 0 in sizes or len(sizes) % search.devices:
            detail = (
                f"has cut {shown(cut)}, but a cut is {', '.join(cuts)}, or the layers of each stage: {layers} in all, "
                f"and as many stages on each of {search.devices} devices."
            )
            raise InputError([Issue(where, "no_cut", detail)])
        asked = cls(choices, sizes)
        if not list(asked.layouts(search)):
            detail = f"has cut {cut} of {len(sizes)} stages, which no placement has: {', '.join(search.placements)}."
            raise InputError([Issue(where, "no_placement", f"{detail} Maybe name another one by --placements.")])
        return asked

    def layouts(self, search: Search) -> Iterator[Partition]:
        """Layouts of the cut that is given by numbers of layers."""
        from optpipe.partition import Partition

        for name in search.placements if self.sizes else ():
            kind, chunks = parse_placement(name)
            if chunks * search.devices == len(self.sizes) and self.choices.get("placement", name) == name:
                yield Partition(self.sizes, placement(kind, search.devices, chunks))

    def _has_choices(self, one: Candidate) -> bool:
        named = {name: value for name, value in self.choices.items() if not (self.sizes and name == "cut")}
        is_cut = not self.sizes or (one.layout is not None and one.layout.sizes == self.sizes)
        return is_cut and all(CHOICES[name](one) == value for name, value in named.items())

    def print(self, judged: Sequence[Judged]) -> None:
        """Print what the best layout with these choices loses, or why it has no schedule."""
        from solver.layout.ranking import with_schedule
        from solver.layout.why import time_by_kind_us

        console, best = stdout(), judged[0]
        what = ", ".join(f"{name} {value}" for name, value in self.choices.items())
        found = [one for one in judged if self._has_choices(one.candidate)]
        if not found:
            console.print(f"no layout with {what} was rated. Maybe a longer --time-limit.")
            return
        one = with_schedule(found[0])
        name, best_name = one.candidate.name, best.candidate.name
        if one.candidate is best.candidate:
            console.print(f"the best with {what} is the {first_of(judged)}: {name}, {time_text(one.value_us)}")
            return
        end = one.end.replace("_", " ") if one.end else "no end"
        if one.schedule is None or best.schedule is None:
            console.print(f"the best with {what} is {name}: {end}, {one.why_not}")
            return
        losses = time_by_kind_us(one.schedule), time_by_kind_us(best.schedule)
        print_losses("of a step", (name, losses[0]), (best_name, losses[1]))
        change = change_text(one.value_us, best.value_us)
        console.print(f"{name} takes {time_text(one.value_us)}, {best_name} {time_text(best.value_us)}: {change}")
        console.print(f"{end}: no schedule of this cut takes less than {time_text(one.bound_us)}")
