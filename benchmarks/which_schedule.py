"""Tables of docs/which-schedule.md: step time and bubble of each kind of schedule for a model on some devices.

`python -m benchmarks.which_schedule` computes all tables anew and puts them into the document; a table's name after
it computes that table alone. Nothing but a time limit depends on the machine: the problems are these few numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.curves import MemoryChart, MemoryLine, draw_bubble_over_memory
from benchmarks.markdown import machine, table
from benchmarks.marks import replaced
from benchmarks.runs import run, warm_up
from benchmarks.section import SIZES, Size, say
from optpipe.problem import Problem
from optpipe.sequences import slice_lengths, slice_times_us
from optpipe.units import share_text
from solver.methods import METHODS

DOCUMENT = Path("docs/which-schedule.md")
PICTURES, QUICK_PICTURES = DOCUMENT.parent / "pictures" / DOCUMENT.stem, Path("out/benchmarks")
TIME_LIMIT_S: dict[Size, float] = {"quick": 1, "full": 20}
"""Time limit for each placement that OptPipe solves."""

Placement = Literal["linear", "interleaved", "V"]
Unit = Literal["bubble", "step"]
"""Figure of a schedule in a table; the time of a step is in units of F."""

CHUNKS: dict[Placement, int] = {"linear": 1, "interleaved": 2, "V": 2}
"""Stages per device, by placement."""

UNIT_BYTES = 80
"""Activation of one microbatch on one device's share of the model."""

PUBLISHED = [name for name, method in METHODS.items() if method.kind == "published" and name != "ada-offload"]


@dataclass(frozen=True)
class Numbers:
    """Model on some devices. Times are in the F of one device's share of the model (1000 us in the problems).

    `budget`: memory of every device over that of 1F1B on the first one. `round_trip`: to the host and back, over F, B
    and W together (PipeOffload's k); None where nothing may leave. `recomputed`: the share of an activation that may
    be made anew, in the time of F; None where all is kept. `head`: the time of the output layers over that of a
    device's share, on top of it; `even`: the layers before them are cut so that every device has as much to do.
    `attention`: its share of F and of B, W has none; `slices`: of equal length, into which each sequence is cut.
    """

    devices: int = 8
    microbatches: int = 16
    backward: float = 1.0
    weight: float = 1.0
    transfer: float = 0.05
    budget: float = 1.0
    round_trip: float | None = None
    recomputed: float | None = None
    head: float = 0.0
    even: bool = False
    attention: float = 0.0
    slices: int = 1

    def problem(self, placement: Placement) -> Problem:
        """Build the problem; with two stages per device each has half of the device's share."""
        chunks, p = CHUNKS[placement], self.devices
        order = {
            "linear": range(p),
            "interleaved": [*range(p), *range(p)],
            "V": [*range(p), *reversed(range(p))],
        }[placement]
        stages = [self._stage(device, 1 / chunks, s == len(order) - 1) for s, device in enumerate(order)]
        return Problem.from_data(
            {
                "format": "optpipe.problem/1",
                "microbatches": self.microbatches,
                "transfer_us": 1000 * self.transfer / self.slices,
                "devices": [{"memory_bytes": round(self.budget * p * UNIT_BYTES)}] * p,
                "stages": stages,
            }
            | ({"slices": self._slices()} if self.slices > 1 else {})
        )

    def _slices(self) -> dict[str, Any]:
        times = slice_times_us(self.slices, 0, self.attention * self.slices, slice_lengths(UNIT_BYTES, self.slices))
        return {"count": self.slices, "factors": {"forward": times, "backward_input": times}}

    def _stage(self, device: int, share: float, last: bool) -> dict[str, Any]:
        whole = 1 + self.head / self.devices if self.even else 1.0
        share /= self.slices
        load = 1000 * (share * whole + (0 if self.even else self.head * last / self.slices))
        held = round(share * UNIT_BYTES)
        stage: dict[str, Any] = {
            "device": device,
            "forward_us": load,
            "backward_input_us": self.backward * load,
            "backward_weight_us": self.weight * load,
            "activation_bytes": held,
            "backward_weight_bytes": held // 2,
        }
        if self.round_trip is not None and not last:
            copy_us = 500 * share * self.round_trip * (1 + self.backward + self.weight)
            stage["offload"] = {"bytes": held, "offload_us": copy_us, "reload_us": copy_us}
        if self.recomputed is not None:
            kept = round((1 - self.recomputed) * held)
            stage["modes"] = [{"name": "full", "kept_bytes": kept, "recompute_us": load}]
        return stage


@dataclass(frozen=True)
class Offer:
    """Schedule: its scheduler, step time and bubble, and whether it is proved optimal for its placement."""

    name: str
    value_us: float
    bubble: float
    optimal: bool = False

    def text(self, unit: Unit) -> str:
        """Name with the bubble, or with the time of a step."""
        shown = share_text(self.bubble) if unit == "bubble" else f"{self.value_us / 1000:.2f}"
        return f"{self.name} {shown}{' *' if self.optimal else ''}"


Row = tuple[str, list[Offer | None]]
"""Label of a row, and the best offer of each column; None if nothing fits."""

COLUMNS = (
    *("1F1B", "best published", "OptPipe", "PipeOffload", "OptPipe with offload"),
    *("OptPipe with recomputation", "OptPipe with both", "Seq1F1B", "SlimPipe", "OptPipe with slices"),
)
RESIDENT, OFFLOADING, ALL, RECOMPUTING = (0, 1, 2), (3, 4), (0, 1, 2, 3, 4), (2, 5, 4, 6)
"""Columns of schedules without offload, with offload, both, and without either next to with each and both."""
SLICED = (2, 5, 4, 7, 8, 9)
"""Columns of whole sequences, also recomputed or offloaded, next to slices of them."""

NEED_NOT = {4: (2,), 5: (2,), 6: (2, 4, 5)}
"""Columns whose schedules stand for a column too: what may leave or be recomputed need not."""


def _row(
    label: str, numbers: Numbers, columns: Sequence[int], placements: Sequence[Placement], time_limit_s: float
) -> Row:
    say(f"-- {label}")
    exact = "cp-sat" if columns == RECOMPUTING else "auto"
    sliced = replace(numbers, recomputed=None, round_trip=None)
    numbers = replace(numbers, slices=1)
    kept = replace(numbers, recomputed=None)
    resident = replace(kept, round_trip=None)
    asked = (
        (resident, ["1f1b"]),
        (resident, PUBLISHED),
        (resident, [exact]),
        (kept, ["po-h", "po-f"]),
        (kept, [exact]),
        (replace(numbers, round_trip=None), [exact]),
        (numbers, [exact]),
        (sliced, ["seq1f1b"]),
        (sliced, ["slimpipe"]),
        (sliced, [exact]),
    )
    found = {column: list(_offers(*asked[column], placements, time_limit_s)) for column in columns}
    best = []
    for column in columns:
        offers = [offer for other in (column, *NEED_NOT.get(column, ())) for offer in found.get(other, ())]
        best.append(min(offers, key=lambda offer: offer.value_us, default=None))
    return label, best


def _offers(
    numbers: Numbers, methods: Sequence[str], placements: Sequence[Placement], time_limit_s: float
) -> Iterator[Offer]:
    """Schedules by these methods within the budget, on every one of these placements that they can handle."""
    for placement in placements:
        problem = numbers.problem(placement)
        for method in methods:
            measured = run(placement, problem, method, time_limit_s)
            if measured.failed:
                raise AssertionError(f"{method} on {numbers}, {placement}: {measured.why_not}")
            if measured.figures:
                figures, ours = measured.figures, method in ("auto", "cp-sat")
                name = placement if ours else method
                # Of the model's own work: a device that recomputes is as good as idle.
                bubble = 1 - max(problem.work_us) / figures.value_us
                yield Offer(name, figures.value_us, bubble, figures.optimal and ours)


@dataclass(frozen=True)
class Table:
    """Table: its name, the head of its rows, and the model of each row."""

    name: str
    first: str
    rows: Sequence[tuple[str, Numbers]]
    columns: Sequence[int] = RESIDENT
    unit: Unit = "bubble"
    placements: Sequence[Placement] = tuple(CHUNKS)

    def measure(self, size: Size, pictures: Path) -> str:
        """Compute the table as Markdown; the table over memory is drawn as well."""
        limit_s = TIME_LIMIT_S[size]
        warm_up(["cp-sat" if self.columns == RECOMPUTING else "auto"])
        chosen = self._chosen(size)
        rows = [_row(label, numbers, self.columns, self.placements, limit_s) for label, numbers in chosen]
        if self.columns == ALL:
            _draw(rows, _subtitle(chosen[0][1]), pictures / f"{self.name}.png")
        cells = [[label, *(offer.text(self.unit) if offer else "does not fit" for offer in row)] for label, row in rows]
        head = [self.first, *(COLUMNS[column] for column in self.columns)]
        shown = table(head, cells, text_columns=len(head))
        return (
            f"{shown}\n\n`python -m benchmarks.which_schedule {self.name}`: {machine()}, at most {limit_s:g} s a run."
        )

    def _chosen(self, size: Size) -> Sequence[tuple[str, Numbers]]:
        if size == "full":
            return self.rows
        return [(label, replace(numbers, devices=4, microbatches=4)) for label, numbers in self.rows[:2]]


def _draw(rows: Sequence[Row], subtitle: str, path: Path) -> None:
    """Lines over memory, one per column."""
    lines = []
    for place, column in enumerate(COLUMNS[column] for column in ALL):
        found = [(float(label), offers[place]) for label, offers in reversed(rows)]
        points = [(memory, offer.bubble) for memory, offer in found if offer]
        if points:
            lines.append(MemoryLine(column, points))
    chart = MemoryChart("Bubble within a budget", subtitle, "memory over that of 1F1B", lines)
    draw_bubble_over_memory(chart, path, "What memory buys")


def _subtitle(numbers: Numbers) -> str:
    """Description of everything but the memory, which the rows have in common."""
    assert numbers.backward == numbers.weight == 1
    times = f"F = B = W, transfers of {100 * numbers.transfer:g} % of F"
    copies = f"to the host and back {100 * (numbers.round_trip or 0):g} % of F + B + W"
    return f"p = {numbers.devices}, m = {numbers.microbatches}, {times}, {copies}"


BASE = Numbers()
SMALL = Numbers(devices=4, microbatches=8, transfer=0)
"""Small enough that nearly all is proved."""
LONG = Numbers(devices=4, microbatches=4, transfer=0, attention=1 / 3, slices=4, recomputed=0.9)
"""A few long sequences, in four slices."""

TABLES = (
    Table(
        "which-memory",
        "memory over 1F1B's",
        [
            (f"{budget:g}", replace(BASE, budget=budget, round_trip=0.8))
            for budget in (2, 1, 0.75, 0.5, 0.375, 0.25, 0.125)
        ],
        ALL,
    ),
    Table("which-transfer", "transfer over F", [(f"{c:g}", replace(BASE, transfer=c)) for c in (0, 0.05, 0.2, 0.5)]),
    Table("which-weight", "W over F", [(f"{w:g}", replace(BASE, weight=w)) for w in (0, 0.25, 0.5, 1, 1.5)]),
    Table(
        "which-offload",
        "k",
        [(f"{k:g}", replace(BASE, budget=0.25, round_trip=k)) for k in (0.25, 0.5, 0.8, 1, 1.2, 1.5, 2)],
        OFFLOADING,
    ),
    Table(
        "which-recomputation",
        "memory over 1F1B's, k",
        [
            (f"{budget:g}, {k:g}", replace(SMALL, budget=budget, round_trip=k, recomputed=0.9))
            for budget, k in ((0.5, 0.5), (0.5, 2), (0.375, 0.5), (0.375, 1), (0.375, 2))
        ],
        RECOMPUTING,
        placements=("linear",),
    ),
    Table(
        "which-slices",
        "memory over 1F1B's, k",
        [
            (f"{budget:g}, {k:g}", replace(LONG, budget=budget, round_trip=k))
            for budget, k in ((1, 0.5), (0.5, 0.5), (0.5, 2), (0.375, 0.5), (0.375, 2), (0.25, 0.5), (0.25, 2))
        ],
        SLICED,
        placements=("linear",),
    ),
    Table(
        "which-microbatches",
        "m over p",
        [(f"{m // BASE.devices}", replace(BASE, microbatches=m)) for m in (8, 16, 32, 64, 128)],
    ),
    Table(
        "which-unequal",
        "output layers over a device's share",
        [
            ("0", BASE),
            *((f"{head:g}", replace(BASE, head=head)) for head in (0.25, 0.5, 1)),
            *((f"{head:g}, cut evenly", replace(BASE, head=head, even=True)) for head in (0.5, 1)),
        ],
        unit="step",
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: compute tables and insert them into the document, or print smaller ones."""
    names = [table.name for table in TABLES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"all, or some of {', '.join(names)}")
    parser.add_argument("--size", choices=SIZES, default="full", help="quick: print the begin of a smaller table")
    options = parser.parse_args(arguments)
    if unknown := set(options.tables) - set(names):
        parser.error(f"no tables: {', '.join(sorted(unknown))}. Maybe one of {', '.join(names)}.")
    pictures = PICTURES if options.size == "full" else QUICK_PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for chosen in TABLES:
        if not options.tables or chosen.name in options.tables:
            body = chosen.measure(options.size, pictures)
            if options.size == "quick":
                print(body)
            else:
                DOCUMENT.write_text(replaced(DOCUMENT.read_text(), chosen.name, body))


if __name__ == "__main__":
    main()
