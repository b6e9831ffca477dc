"""Plans of drawn models against the best of all their cuts.

`python -m benchmarks.cut_regret cuts --size quick` prints the table. The models are those of
`instances/drawn_models.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import inf
from multiprocessing import get_context
from pathlib import Path

from benchmarks.markdown import conditions, table
from benchmarks.section import Section, Size, main, say
from instances.drawn_models import drawn_model, every_cut
from optpipe.errors import InfeasibleError, NoSolutionError
from optpipe.layers import LayerProfile
from optpipe.partition import Batching, Partition, build_problem
from optpipe.placement import name_of_placement
from optpipe.problem import Problem
from optpipe.units import share_text
from solver.bounds import lower_bound_us
from solver.layout.candidates import Search, candidates
from solver.layout.quick_rating import QuickRating
from solver.layout.ranking import rank
from solver.limits import Cancel, Limits, available_cores
from solver.solve import solve

NAME = "cuts"
COMMAND = f"python -m benchmarks.cut_regret {NAME}"
MODELS: dict[Size, Sequence[int]] = {"quick": range(3), "full": range(100)}
TIME_LIMIT_S = 10.0
WORK = (0.05, 0.25)
"""Units of work of `auto` on each cut, then on those whose value is within `CLOSE` of the least."""

CLOSE = 1.05

SHARES = (0.0005, 0.005, 0.01)
"""Regrets up to which models are counted together."""

HEAD = ("schedules with", "models", *(f"up to {100 * share:g} %" for share in SHARES), "largest regret")


@dataclass(frozen=True)
class DrawnModel:
    """A model with its number as seed, and the problems of all its cuts that fit."""

    seed: int

    @cached_property
    def drawn(self) -> tuple[LayerProfile, tuple[int, ...], int]:
        """Layers, device of each stage, and microbatches."""
        return drawn_model(self.seed)

    @property
    def kind(self) -> str:
        """Kinds of ops other than F, B and W that its schedules may have."""
        profile = self.drawn[0]
        parts = ["blocks"] * any(layer.parts is not None for layer in profile.layers)
        return " and ".join(parts + ["spread passes"] * (profile.spread is not None)) or "plain"

    def problems(self) -> Iterator[Problem]:
        """The problem of each cut."""
        profile, places, microbatches = self.drawn
        for sizes in every_cut(len(profile.each_layer), len(places)):
            batching = Batching(profile.microbatch_size, microbatches)
            problem = build_problem(profile, Partition(sizes, places), batching)
            if problem is not None:
                yield problem

    def plan_us(self) -> float:
        """Value of the plan, found within the time limit."""
        profile, places, microbatches = self.drawn
        search = Search(max(places) + 1, microbatches, (1,), (name_of_placement(places),))
        limits = Limits(TIME_LIMIT_S, workers=available_cores())
        return rank(candidates(profile, search, limits), limits)[0].value_us


def least_us(model: DrawnModel) -> float:
    """Least value of all cuts, each solved by `auto` with the same counted work unless its bound excludes it."""
    cuts = [(QuickRating.of(problem, Cancel()).value_us, problem) for problem in model.problems()]
    best_us = inf
    for work in WORK:
        solved: list[tuple[float, Problem]] = []
        for _, problem in sorted(cuts, key=lambda cut: cut[0]):
            if lower_bound_us(problem) < best_us:
                with suppress(InfeasibleError, NoSolutionError):
                    schedule = solve(problem, "auto", Limits(inf, workers=1, deterministic_limit=work))
                    solved.append((schedule.value_us, problem))
                    best_us = min(best_us, schedule.value_us)
        cuts = [(value_us, problem) for value_us, problem in solved if value_us <= CLOSE * best_us]
    return best_us


def measure(size: Size, _: Path) -> str:
    """Measure every model; returns a table of regrets by what the schedules may have."""
    models = [DrawnModel(seed) for seed in MODELS[size]]
    least = []
    with ProcessPoolExecutor(available_cores(), get_context("spawn")) as pool:
        for model, value_us in zip(models, pool.map(least_us, models), strict=True):
            least.append(value_us)
            say(f"model {model.seed}: {value_us:.1f} us by the best of all cuts")
    regrets: dict[str, list[float]] = {}
    for model, value_us in zip(models, least, strict=True):
        if value_us == inf:
            say(f"model {model.seed} fits by no cut")
            continue
        regret = model.plan_us() / value_us - 1
        regrets.setdefault(model.kind, []).append(regret)
        say(f"model {model.seed}, {model.kind}: {regret:+.3%}")
    rows = [_row(kind, found) for kind, found in sorted(regrets.items())]
    rows.append(_row("all", [regret for found in regrets.values() for regret in found]))
    return f"{table(HEAD, rows, 1)}\n\n{conditions(f'{COMMAND} --size {size}', TIME_LIMIT_S)}"


def _row(kind: str, regrets: Sequence[float]) -> tuple[str, ...]:
    counts = (str(sum(regret <= share for regret in regrets)) for share in SHARES)
    return kind, str(len(regrets)), *counts, share_text(max(regrets))


SECTIONS = (
    Section(
        NAME,
        "Cuts of drawn models",
        "How much longer the step of a plan is than that of the best of all cuts. The models are drawn: 4 to 11 layers "
        "on 2 to 5 devices, uneven, with heavy heads and mostly with tight memory. Of every fourth the layers have "
        "experts, whose exchanges blocks hide, and of every fifth the head's rows lie on all devices. Those that fit "
        f"by no cut are left out. All cuts are solved by `auto` with {WORK[0]:g} units of counted work, those within "
        f"{100 * (CLOSE - 1):.2g} % of the best then with {WORK[1]:g}, unless a bound excludes them. A plan may find a "
        "better schedule than that.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
