"""A vocabulary layer in the last stage, and as passes of every device (docs/concepts/spread.md)."""

from __future__ import annotations

from examples.pictures.pipelines import MS, pipeline
from examples.pictures.sheet import Strip, sheet
from optpipe.plot.panel import Panel
from optpipe.problem import Problem
from optpipe.simulate import simulate
from solver.limits import Limits
from solver.solve import solve

MICROBATCHES, LAYERS_MS, HEAD_MS = 8, 3, 4
TIMES = ("forward_us", "backward_input_us", "backward_weight_us")


def in_the_last_stage() -> Problem:
    """Build stages of 3 ms an op, the last one with 4 ms more for the vocabulary layer."""
    data = pipeline(MICROBATCHES, None).to_data()
    last = len(data["stages"]) - 1
    for s, stage in enumerate(data["stages"]):
        stage |= dict.fromkeys(TIMES, (LAYERS_MS + HEAD_MS * (s == last)) * MS)
    return Problem.from_data(data)


def on_every_device(spare: int | None) -> Problem:
    """Build the same with the layer's work in two passes, and memory for `spare` microbatches more than 1F1B's."""
    data = pipeline(MICROBATCHES, None).to_data()
    devices, unit_bytes = len(data["devices"]), data["stages"][0]["activation_bytes"]
    for stage in data["stages"]:
        stage |= dict.fromkeys(TIMES, LAYERS_MS * MS)
    after_forward = {"op": "F", "stage": devices - 1}
    data["spread"] = [
        {"name": "S", "us": [2 * MS] * devices, "after": [after_forward]},
        {"name": "T", "us": [1 * MS] * devices, "after": [{"pass": "S"}]},
    ]
    data["gates"] = [{"op": "B", "stage": devices - 1, "after": [{"pass": "S"}]}]
    if spare is not None:
        data["devices"] = [{"memory_bytes": (devices - d + spare) * unit_bytes} for d in range(devices)]
    return Problem.from_data(data)


def spread() -> Panel:
    """Draw 1F1B with the layer in the last stage, the paper's order of its passes, and ours in the same memory."""
    whole, passes = in_the_last_stage(), on_every_device(1)
    searched = Limits(60, workers=1)
    strips = (
        ("In the last stage", simulate(whole, solve(whole, "1f1b").orders)),
        ("On every device, vocab-2", simulate(passes, solve(passes, "vocab-2").orders)),
        ("On every device, auto", simulate(passes, solve(passes, "auto", searched).orders)),
    )
    return sheet([Strip(f"{words}: {timed.value_us / MS:g} ms", timed, memory=(0,)) for words, timed in strips])[0]


PICTURES = {"spread": spread}
