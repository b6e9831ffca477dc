"""Unequal microbatches of sequences whose lengths are drawn from two distributions like those of real data.

Log-normal lengths are those of documents and conversations; bimodal ones those of short instructions among long texts,
or of single images among videos. `python -m instances.lengths` writes `u-p*-m*-lognormal.json` and
`u-p*-m*-bimodal.json`, which the suite `slices` solves.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from instances import INSTANCES
from optpipe.problem import Problem

SEQUENCE = 4096
"""Tokens of a sequence with factor 1."""

ATTENTION_SHARE = 1 / 7
"""Attention's share of a layer's time at that length and as large a hidden size (Zero Bubble, table 1)."""

SHORTEST, LONGEST = 256, 16384

UNIT_US, UNIT_BYTES = 100, 100
"""Time of each of F, B and W, and activation, of a stage and a sequence with factor 1; factors have two decimals."""


def lognormal(random: Random) -> float:
    """Draw a length with a median of 4,096 tokens; one of six is more than twice as long."""
    return random.lognormvariate(8.318, 0.7)


def bimodal(random: Random) -> float:
    """Draw a length: three of four are about 1,024 tokens, the others about 8,192."""
    mean = 1024 if random.random() < 0.75 else 8192
    return random.gauss(mean, mean / 6)


DISTRIBUTIONS: dict[str, Callable[[Random], float]] = {"lognormal": lognormal, "bimodal": bimodal}
SIZES = ((4, 16), (8, 32))
"""Devices and microbatches."""


def lengths(distribution: str, p: int, m: int) -> list[int]:
    """Draw the lengths of m microbatches, in tokens; the seed is made of the arguments."""
    random = Random(f"{distribution}, p = {p}, m = {m}")
    return [round(min(max(DISTRIBUTIONS[distribution](random), SHORTEST), LONGEST)) for _ in range(m)]


def of_lengths(distribution: str, p: int, m: int) -> Problem:
    """Build the problem of one distribution, in a free order; its budget is that of 1F1B with the longest p at once."""
    tokens = [length / SEQUENCE for length in lengths(distribution, p, m)]
    factors = [
        {"time": round((1 - ATTENTION_SHARE) * size + ATTENTION_SHARE * size**2, 2), "bytes": round(size, 2)}
        for size in tokens
    ]
    budget = round(UNIT_BYTES * sum(sorted(entry["bytes"] for entry in factors)[-p:]))
    stage = {f"{kind}_us": UNIT_US for kind in ("forward", "backward_input", "backward_weight")}
    stage |= {"activation_bytes": UNIT_BYTES, "backward_weight_bytes": UNIT_BYTES // 2}
    return Problem.from_data(
        {
            "format": "optpipe.problem/1",
            "name": f"u-p{p}-m{m}-{distribution}",
            "microbatches": m,
            "devices": [{"memory_bytes": budget}] * p,
            "stages": [{"device": device, **stage} for device in range(p)],
            "microbatch_factors": factors,
            "microbatch_order": "free",
            "source": f"lengths drawn by instances/lengths.py, {distribution}; attention takes a seventh of the time "
            f"at {SEQUENCE} tokens",
        }
    )


if __name__ == "__main__":
    for distribution in DISTRIBUTIONS:
        for p, m in SIZES:
            problem = of_lengths(distribution, p, m)
            (INSTANCES / f"{problem.name}.json").write_text(problem.to_json())
