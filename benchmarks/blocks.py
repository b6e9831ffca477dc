"""Expert models with blocks of a forward and a backward, by formula, against published schedules.

`python -m benchmarks.blocks blocks --size quick` prints the table. Costs of layers are those of the project's cost
model, and so is the time of a block.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.accuracy import FOLDER
from benchmarks.markdown import conditions, table
from benchmarks.section import Section, Size, main, say
from optpipe.cluster.layers import strategy_layers
from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import Model
from optpipe.cluster.rows import read_rows
from optpipe.cluster.strategy import Strategy
from optpipe.errors import MethodError
from optpipe.partition import Batching, Partition, build_problem
from optpipe.placement import placement
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.units import percent_text
from solver.bounds.blocks import without_blocks
from solver.build import peak_budgets, within_budgets
from solver.limits import Limits
from solver.published.dualpipe_v import dualpipe_v
from solver.published.interleaved import interleaved_1f1b
from solver.published.zb_v import zb_v
from solver.solve import solve

NAME = "blocks"
COMMAND = f"python -m benchmarks.blocks {NAME}"
TIME_LIMIT_S: dict[Size, float] = {"quick": 2, "full": 10}
SEQUENCE, DEVICES, MICROBATCHES = 4096, 8, 32
SHARES = (1.0, 0.75, 0.5)
"""Budgets of each device in what DualPipeV holds there."""

CASES = {
    "DeepSeek-V3 on H100": ("nvidia-dgxc-299", "h100", Strategy(expert=64, data=64)),
    "DeepSeek-V3 on GB200": ("nvidia-dgxc-299", "gb200", Strategy(expert=64, data=64)),
    "Qwen3-235B on H100": ("nvidia-dgxc-302", "h100", Strategy(tensor=2, expert=32, data=16)),
    "Qwen3-235B on GB200": ("nvidia-dgxc-302", "gb200", Strategy(expert=32, data=32)),
}
"""Row whose model it is, machine and strategy, on 8 devices of two stages each."""


def expert_problem(model: Model, machine_name: str, strategy: Strategy, *, v_shape: bool) -> Problem:
    """Two stages a device along a V or interleaved, in whole microseconds, and a block of each pair of a device."""
    machine = named_machines()[machine_name]
    sizes = [*strategy.layers_of_stages(model)]
    layers = strategy_layers(model, machine, strategy, SEQUENCE)
    layout = Partition(
        (sizes[0] + 1, *sizes[1:-1], sizes[-1] + 1), placement("v" if v_shape else "interleaved", DEVICES, 2)
    )
    problem = build_problem(layers.replaced(memory_bytes=None), layout, Batching(1, MICROBATCHES))
    assert problem is not None, "no budget is too small"
    whole = ("forward_us", "backward_input_us", "backward_weight_us")
    stages = [stage.replaced(**{name: round(getattr(stage, name)) for name in whole}) for stage in problem.stages]
    problem = problem.replaced(stages=stages)
    least_us = {
        pair: max(stages[pair[0]].duration_us("F"), stages[pair[1]].duration_us("BW")) for pair in problem.block_us
    }
    overlaps = [
        {"forward_stage": f, "backward_stage": b, "us": max(round(us), least_us[f, b])}
        for (f, b), us in problem.block_us.items()
    ]
    return Problem.from_data(problem.to_data() | {"overlaps": overlaps})


HEAD = ("profile", "memory", "interleaved, overlapped", "dualpipe-v", "zb-v", "apart", "auto", "less", "bound", "gap")


def measure(size: Size, _: Path) -> str:
    """Measure every profile at every budget; returns a table."""
    rows = {row.name: row for row in read_rows(FOLDER / "steps.csv", FOLDER / "models.json")[0]}
    lines = []
    for name in CASES if size == "full" else list(CASES)[:1]:
        row, machine, strategy = CASES[name]
        lines += _lines(name, rows[row].model, machine, strategy, size)
    measured = conditions(f"{COMMAND} --size {size}", TIME_LIMIT_S[size], " Values are seconds.")
    return f"{table(HEAD, lines, 2)}\n\n{measured}"


def _lines(name: str, model: Model, machine: str, degrees: Strategy, size: Size) -> list[tuple[str, ...]]:
    one = replace(degrees, pipeline=DEVICES, virtual=2, overlap="yes")
    interleaved = expert_problem(model, machine, one, v_shape=False)
    megatron = simulate(interleaved, orders := interleaved_1f1b(interleaved))
    along_v = expert_problem(model, machine, one, v_shape=True)
    held = peak_budgets(along_v, dualpipe_v(along_v))
    most = max(mine / theirs for mine, theirs in zip(peak_budgets(interleaved, orders), held, strict=True))
    lines = []
    for share in SHARES:
        say(f"{name} at {share:.0%}")
        devices = [{"memory_bytes": int(share * size_bytes)} for size_bytes in held]
        problem = Problem.from_data(along_v.to_data() | {"devices": devices})
        published = [_value_us(problem, dualpipe_v), _value_us(without_blocks(problem), zb_v)]
        apart_us = solve(without_blocks(problem), "auto", Limits(TIME_LIMIT_S[size])).value_us
        schedule = solve(problem, "auto", Limits(TIME_LIMIT_S[size]))
        line = (
            *(name, percent_text(share), f"{_seconds(megatron.value_us)} ({percent_text(most)})"),
            *(_seconds(us) if us < float("inf") else "-" for us in published),
            _seconds(apart_us),
            _seconds(schedule.value_us),
            percent_text(1 - schedule.value_us / min(apart_us, *published)),
            *(_seconds(schedule.bound_us), percent_text(schedule.gap)),
        )
        say("  ".join(line))
        lines.append(line)
    return lines


def _seconds(time_us: float) -> str:
    return f"{time_us / 1e6:.3f}"


def _value_us(problem: Problem, make: object) -> float:
    """Value of a published schedule; infinite if it exceeds a budget."""
    assert callable(make)
    try:
        orders = make(problem)
    except MethodError:
        return float("inf")
    simulation = simulate(problem, orders)
    return simulation.value_us if within_budgets(problem, orders, simulation) else float("inf")


SECTIONS = (
    Section(
        NAME,
        "Expert models with blocks",
        "Steps of two models with experts on 8 devices of two stages, 32 microbatches of 4,096 tokens. Times of "
        "layers, sizes and exchanges are by formula, with the calibration of each machine; a block takes the sum over "
        "its pairs of layers of attention or the other's combine, dispatch or experts, experts or dispatch, combine or "
        "attention, whichever is longer (MindSpeed). `memory` is the budget of each device, in what DualPipeV holds "
        "there. `interleaved, overlapped` is Megatron's: interleaved 1F1B with one forward more ahead, and each steady "
        "forward in a block with the backward before it. It holds as much on some device as stands in brackets, and is "
        "the same in each row. `apart` is `auto` without blocks. A dash: over the budget. `less`: by how much `auto` "
        "with blocks is shorter than the best of `dualpipe-v`, `zb-v` and `apart`.",
        COMMAND,
        measure,
    ),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
