"""Steps with a vocabulary layer on all devices: predicted from published passes, and what searches give.

`python -m benchmarks.vocabulary vocabulary --size full` prints the first table, `... spread-searches` and
`... vocabulary-places` the others. The passes of the first are those of 40 runs on 8 GPUs of Vocabulary Parallelism
(arXiv 2411.05288), as its repository has them (`benchmarks/published/README.md`). The last plans models of today with
their output layer in the last stage, alone in it, and on all devices.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.markdown import Time, TimedRow, machine, table
from benchmarks.section import Section, Size, main, say
from instances import uniform
from optpipe.cluster.machine import Machine
from optpipe.cluster.model import load_model
from optpipe.cluster.software import software_of
from optpipe.problem import Problem
from solver.layout.cluster_plan import Solved, plan_cluster, rank_memory, solve_family
from solver.layout.fitting import Job
from solver.layout.strategies import Fixed, Rater
from solver.limits import Limits
from solver.solve import solve

NAME = "vocabulary"
COMMAND = f"python -m benchmarks.vocabulary {NAME}"
RUNS = Path(__file__).parent / "published" / "vocabulary_runs.csv"
MICROBATCHES = 128
TIME_LIMIT_S: dict[Size, float] = {"quick": 5.0, "full": 20.0}
PLAN_LIMIT_S: dict[Size, float] = {"quick": 5.0, "full": 40.0}

METHODS = {"base": "1f1b", "redis": "1f1b", "vocab": "vocab-2", "synctwice": "vocab-1"}
"""Our name of the schedule of each method: the layer in the last stage, layers cut anew, Algorithms 2 and 1."""

LABELS = {"base": "in the last stage", "redis": "layers cut anew", "vocab": "vocab-2", "synctwice": "vocab-1"}

FIRST_SHARE = {"vocab": 2 / 3, "synctwice": 1 / 3}
"""Share of S in the time of both passes: of three equal products it has two in Algorithm 2, one in Algorithm 1."""


@dataclass(frozen=True)
class Run:
    """A published run: milliseconds of its step, and microseconds of every device's passes for one microbatch."""

    method: str
    vocabulary: int
    sequence: int
    step_ms: float
    forward_us: Sequence[float]
    backward_us: Sequence[float]
    passes_us: Sequence[float]
    hop_us: float

    def problem(self, *, spare: int | None = None, splits: bool = False) -> Problem:
        """The problem of the run: with `spare` microbatches more than 1F1B holds on each device, with halved backwards.

        An activation counts as one byte. Collectives count as no time, since their times are not published.
        """
        devices = len(self.forward_us)
        stages = [
            {"device": d, "forward_us": forward, "backward_input_us": backward / 2, "backward_weight_us": backward / 2}
            | {"activation_bytes": 2, "backward_weight_bytes": 1, "split_backward": splits}
            for d, (forward, backward) in enumerate(zip(self.forward_us, self.backward_us, strict=True))
        ]
        data: dict[str, Any] = {"format": "optpipe.problem/1", "microbatches": MICROBATCHES, "stages": stages}
        data["devices"] = [
            {"memory_bytes": None if spare is None else 2 * (devices - d + spare)} for d in range(devices)
        ]
        data["transfer_us"] = self.hop_us
        if self.method in FIRST_SHARE:
            share, last = FIRST_SHARE[self.method], devices - 1
            first, second = ([part * us for us in self.passes_us] for part in (share, 1 - share))
            data["spread"] = [
                {"name": "S", "us": first, "after": [{"op": "F", "stage": last}]},
                {"name": "T", "us": second, "after": [{"pass": "S"}]},
            ]
            gate = "S" if self.method == "vocab" else "T"
            data["gates"] = [{"op": "B", "stage": last, "after": [{"pass": gate}]}]
        return Problem.from_data(data)


def runs() -> Iterator[Run]:
    """All published runs but those of a synchronous layer (interlaced), for which no schedule is published."""
    with RUNS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    hops = {(row["vocabulary"], row["sequence"]): row["hop_us"] for row in rows if row["method"] == "vocab"}
    for row in rows:
        if row["method"] not in METHODS:
            continue
        times = {name: [float(us) for us in text.split()] for name, text in row.items() if name.endswith("_us")}
        # The embedding's passes run with the first stage's in the published order, and count as a part of it here.
        forward, backward = (
            [own + more for own, more in zip(times[name], times[f"input_{name}"], strict=True)]
            for name in ("forward_us", "backward_us")
        )
        hop_us = float(hops[row["vocabulary"], row["sequence"]].split()[0])
        sizes = int(row["vocabulary"]), int(row["sequence"]), float(row["step_ms"])
        yield Run(row["method"], *sizes, forward, backward, times["passes_us"], hop_us)


def measure(size: Size, _: Path) -> str:
    """Predict every run, and solve those with passes in the memory of `vocab-2`."""
    chosen = [run for run in runs() if size == "full" or (run.vocabulary, run.sequence) == (256_000, 2048)]
    lines = []
    for run in chosen:
        say(f"vocabulary {run.vocabulary}, {run.sequence} tokens, {LABELS[run.method]}")
        predicted_ms = solve(run.problem(), METHODS[run.method]).value_us / 1000
        error = predicted_ms / run.step_ms - 1
        cells = [f"{run.vocabulary // 1000}k", str(run.sequence), LABELS[run.method], f"{run.step_ms:,.0f}"]
        cells += [f"{predicted_ms:,.0f}", f"{error:+.1%}"]
        cells += [*_ours(run, TIME_LIMIT_S[size])] if run.method == "vocab" else ["", "", ""]
        lines.append(cells)
    header = [
        "vocabulary",
        "tokens",
        "layer",
        "measured ms",
        "predicted ms",
        "error",
        "ours, fused",
        "ours, split",
        "bound",
    ]
    notes = (
        "Measured and published: 8 A100, 32 layers, 128 microbatches. Predicted: the published times of each device's "
        "passes in `1f1b`, `vocab-2` and `vocab-1`, with no time for collectives, of which none is published. Ours: "
        "`auto` for these times in the memory of `vocab-2`, with fused backwards, and with backwards split in halves; "
        "the bound is that of both. What is ours is predicted and was not run."
    )
    return f"{table(header, lines, 3)}\n\n{notes}\n\n{machine()}"


def _ours(run: Run, time_limit_s: float) -> Iterator[str]:
    schedules = [
        solve(run.problem(spare=1, splits=splits), "auto", Limits(time_limit_s, workers=2)) for splits in (False, True)
    ]
    for schedule in schedules:
        yield f"{schedule.value_us / 1000:,.0f}"
    yield f"{min(schedule.bound_us for schedule in schedules) / 1000:,.0f}"


class Pipeline(NamedTuple):
    """A model on H100 as one pipeline for each group of `devices`."""

    model: str
    gpus: int
    devices: int
    global_batch: int
    sequence: int = 4096

    def solved(self, place: str, time_limit_s: float) -> tuple[Job, Solved]:
        """Cut and schedule it with its output layer in a place."""
        job = Job(load_model(self.model), Machine.load("h100"), self.sequence, self.global_batch, software_of(""))
        fixed: Fixed = {"pp": [self.devices], "tp": [1], "cp": [1], "microbatch_size": [1], "vocabulary": [place]}
        # One family: its published schedules take no time, so that all of the limit is for the search.
        rated = plan_cluster(job, self.gpus, fixed, Limits(0)).ratings[0]
        found = solve_family(job, rated, fixed, Limits(time_limit_s, workers=2))
        assert found is not None, "they fit"
        return job, found


PIPELINES = (
    Pipeline("gemma-2-9b", 32, 16, 256),
    Pipeline("gemma-2-27b", 16, 16, 128),
    Pipeline("llama-3.1-8b", 16, 16, 128),
    Pipeline("qwen3-8b", 8, 8, 64),
)
PLACES = {"last": "in the last stage", "own": "a stage of its own", "spread": "on all devices"}


def measure_places(size: Size, _: Path) -> str:
    """Plan each pipeline with its output layer in each place."""
    lines = []
    for pipeline in PIPELINES if size == "full" else PIPELINES[-1:]:
        for place, label in PLACES.items():
            say(f"{pipeline.model} on {pipeline.devices} devices, {label}")
            job, found = pipeline.solved(place, PLAN_LIMIT_S[size])
            layer = Rater(job, {}).output_layer(found.strategy)
            assert layer is not None, "a pipeline has several devices"
            ranks = rank_memory(job, found.strategy, found.schedule)
            held = max(sum(kinds.values()) for kinds in ranks)
            bound_s = found.judged.bound_us / 1e6 + found.added_s
            cells = [pipeline.model, label, found.judged.candidate.placement, f"{pipeline.gpus}", f"{pipeline.devices}"]
            cells += [f"{layer.layers:.1f}", f"{layer.most_layers:.1f}", f"{found.seconds:.3f}", f"{bound_s:.3f}"]
            lines.append([*cells, f"{held / 2**30:.1f}"])
    header = ["model", "output layer", "placement", "GPUs", "pp", "layer", "N / (p - 1)", "step s", "bound s"]
    header.append("peak GiB")
    notes = (
        "Planned for H100 by the cost model, nothing was run. Layer: what the output layer takes, in layers of the "
        "model; N / (p - 1) of them a cut evens out at most. Each place was cut and scheduled within "
        f"{PLAN_LIMIT_S[size]:g} s. The bound is that of its best cut; the peak that of the fullest rank. With the "
        "layer on all devices all others count as 7 to 9 % slower, as measured, and nothing is offloaded."
    )
    return f"{table(header, lines, 3)}\n\n{notes}\n\n{machine()}"


SEARCHES = "spread-searches"
SEARCH_S = 10.0
"""Time limit of `auto` for each row."""


def equal_stages(p: int, m: int, memory: str, *, splits: bool) -> Problem:
    """F, B and W of 3 us, S of 2, T of 1, messages and collectives of 1; activations of 2 units, logits of 1.

    `memory`: the activations of 1F1B on each device, one more for `vocab-2`, and the logits of one microbatch.
    """
    data = uniform(p, m, activation_bytes=2, backward_weight_bytes=1).to_data()
    for stage in data["stages"]:
        stage.update(forward_us=3, backward_input_us=3, backward_weight_us=3, split_backward=splits)
    data["spread"] = [
        {"name": "S", "us": [2] * p, "kept_bytes": [1] * p, "after": [{"op": "F", "stage": p - 1, "us": 1}]},
        {"name": "T", "us": [1] * p, "frees": "S", "after": [{"pass": "S", "us": 1}]},
    ]
    data["gates"] = [{"op": "B", "stage": p - 1, "after": [{"pass": "S", "us": 1}]}]
    if memory != "free":
        data["devices"] = [{"memory_bytes": 2 * (p - d + (memory == "vocab-2")) + 1} for d in range(p)]
    return Problem.from_data(data)


def measure_searches(size: Size, _: Path) -> str:
    """Compare list schedules, `auto` without annealing, and all of it for equal stages."""
    lines: list[TimedRow] = []
    sizes = product((4, 8, 16), (32, 128)) if size == "full" else [(4, 32)]
    for (p, m), memory, splits in product(sizes, ("vocab-2", "1f1b", "free"), (False, True)):
        say(f"{p} devices, {m} microbatches, memory {memory}, {'split' if splits else 'fused'}")
        problem = equal_stages(p, m, memory, splits=splits)
        found = [
            solve(problem, "auto", Limits(SEARCH_S, workers=2, without=frozenset(without)))
            for without in (("search", "windows", "cp-sat"), ("search",), ())
        ]
        value_us, bound_us = found[-1].value_us, max(one.bound_us for one in found)
        above = (f"{one.value_us / bound_us - 1:.2%}" for one in found)
        choices = (str(p), str(m), memory, "split" if splits else "fused")
        lines.append([*choices, Time(value_us), Time(bound_us), *above])
    header = ["devices", "microbatches", "memory", "backward", "value", "bound"]
    header += ["lists", "without annealing", "auto"]
    notes = (
        "F, B and W of 3 us, S of 2, T of 1, messages and collectives of 1. An activation is 2 units of memory, logits "
        "from S to T are 1. Memory of `1f1b`: its activations on each device and logits once; of `vocab-2` one "
        "activation more. Lists, `auto` with windows and CP-SAT but without annealing, and all of `auto`: above the "
        f"bound after {SEARCH_S:g} s on two cores."
    )
    return f"{table(header, lines, 4)}\n\n{notes}\n\n{machine()}"


SECTIONS = [
    Section(
        NAME,
        "A vocabulary layer on all devices",
        "Published times of the passes of a vocabulary layer predict the published steps, and what an order of ours "
        "would save.",
        COMMAND,
        measure,
    ),
    Section(
        "vocabulary-places",
        "Places of a large output layer",
        "What plans take with the output layer in the last stage with layers, alone in it, and on all devices.",
        "python -m benchmarks.vocabulary vocabulary-places",
        measure_places,
    ),
    Section(
        SEARCHES,
        "Searches with spread passes",
        "How far from the bound list schedules of problems with passes end, and what searches add.",
        f"python -m benchmarks.vocabulary {SEARCHES}",
        measure_searches,
    ),
]


if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
