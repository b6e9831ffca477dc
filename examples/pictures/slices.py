"""Whole sequences and slices of them (docs/concepts/slices.md)."""

from __future__ import annotations

from examples.pictures.pipelines import GIB, MS, optimum, pipeline, published
from examples.pictures.sheet import Strip, figures_text, sheet
from optpipe.plot.panel import Panel
from optpipe.problem import Problem
from optpipe.sequences import slice_lengths, slice_times_us

MICROBATCHES, SLICES = 3, 4
FORWARD_US, ATTENTION_SHARE = 0.96 * MS, 0.5


def whole() -> Problem:
    """Build three microbatches of 1 GiB whose F takes 0.96 ms, half of it attention, and their backward twice that."""
    data = pipeline(MICROBATCHES, None).to_data()
    for stage in data["stages"]:
        stage |= {f"{kind}_us": FORWARD_US for kind in ("forward", "backward_input", "backward_weight")}
        stage |= {"backward_weight_bytes": 0, "split_backward": False}
    return Problem.from_data(data)


def sliced(budget_gib: float) -> Problem:
    """Build the same in four slices of equal length: 0.15, 0.21, 0.27 and 0.33 ms of F, and 256 MiB each."""
    data = whole().to_data()
    times_us = slice_times_us(FORWARD_US, 0, ATTENTION_SHARE * FORWARD_US, slice_lengths(64, SLICES))
    mean_us = FORWARD_US / SLICES
    factors = [time_us / mean_us for time_us in times_us]
    names = ("forward", "backward_input", "backward_weight")
    for stage in data["stages"]:
        stage |= {f"{kind}_us": mean_us for kind in names} | {"activation_bytes": GIB // SLICES}
    data["slices"] = {"count": SLICES, "factors": dict.fromkeys(names, factors)}
    data["devices"] = [{"memory_bytes": int(budget_gib * GIB)} for _ in data["devices"]]
    return Problem.from_data(data)


def in_slices() -> Panel:
    """Draw 1F1B of whole microbatches, Seq1F1B of slices, and the optimum with one slice more of memory."""
    one, seq, best = published(whole(), "1f1b"), published(sliced(1.75), "seq1f1b"), optimum(sliced(2))
    titles = {
        f"Whole sequences, 1F1B, {MICROBATCHES} GiB: {figures_text(one)}": one,
        f"Four slices, Seq1F1B, 1.75 GiB: {figures_text(seq)}": seq,
        f"Four slices, optpipe solve, 2 GiB: {figures_text(best)}, proved optimal": best,
    }
    strips = [Strip(title, timed, memory=(0,), microbatch_shades=True) for title, timed in titles.items()]
    return sheet(strips)[0]


PICTURES = {"slices": in_slices}
