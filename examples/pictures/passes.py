"""F, B and W, and the bubble (docs/concepts/passes.md)."""

from __future__ import annotations

from examples.pictures.pipelines import pipeline, published
from examples.pictures.sheet import Strip, figures_text, sheet
from optpipe.plot.panel import Panel


def one_microbatch() -> Panel:
    """Draw one microbatch through four stages and back."""
    timed = published(pipeline(1, None), "zb-h1")
    return sheet([Strip("One microbatch, four stages", timed)])[0]


def fused_and_split() -> Panel:
    """Draw eight microbatches with fused and with split B and W."""
    problem = pipeline(8, None)
    strips = []
    for method, words in (("gpipe", "GPipe"), ("1f1b", "1F1B"), ("zb-h1", "ZB-H1, B and W apart")):
        timed = published(problem, method)
        strips.append(Strip(f"{words}: {figures_text(timed)}", timed, memory=(0,)))
    return sheet(strips)[0]


PICTURES = {"one-microbatch": one_microbatch, "fused-and-split": fused_and_split}
