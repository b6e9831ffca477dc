"""Sequences cut into slices, and microbatches of unequal lengths: what each costs relative to the others.

A layer's time has a part that grows with the tokens and, with causal attention, one that grows with the pairs of
tokens of one document: ``S^2 / 2`` in a document of S tokens. A slice of L tokens that ends at token P of its sequence
attends to ``L P - L^2 / 2`` of these pairs (Seq1F1B, arXiv 2406.03488), so later slices take longer, or are shorter. Of
microbatches the tokens and the squares of the documents' lengths add up (WLB-LLM, arXiv 2503.17924).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, sqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

from optpipe.document import parse_json, read_bounded, utf8_text
from optpipe.errors import InputError, Issue, shown
from optpipe.fields import MAX_COUNT, MAX_FACTOR
from optpipe.layers import LayerProfile

SliceBy = Literal["compute", "length"]
"""The quantity that slices of one sequence share equally: the time they take, or the tokens they have."""

DECIMALS = 6
"""Decimals of a factor."""

MOST_MULTIPLE = 128
"""Largest number of tokens of which the length of a slice is a multiple by default."""

MAX_LENGTHS_BYTES = 2**24
MOST_ISSUES = 20
"""Most wrong entries of a file that are named."""

MAX_LENGTH = 10**9
"""Most tokens of a document."""


def slice_lengths(
    sequence: int, count: int, by: SliceBy = "length", attention_share: float = 0.0, multiple: int | None = None
) -> tuple[int, ...]:
    """Tokens of each slice of a sequence, all with the same number of tokens or all with the same work.

    `attention_share`: share of attention in the work on the whole sequence. Lengths are multiples of `multiple`, but
    for the rest at the end; None: of the largest power of two up to 128 that is at most a 64th of an equal slice.
    Raises ValueError if the slices are too many.
    """
    if not 1 <= count <= sequence:
        raise ValueError(f"a sequence of {sequence:,} tokens has no {count:,} slices. Maybe from 1 to {sequence:,}.")
    if multiple is None:
        multiple = min(MOST_MULTIPLE, 2 ** int(log2(max(1, sequence // (64 * count)))))
    linear = 1 - attention_share if by == "compute" else 1.0
    ends = [0]
    for k in range(1, count):
        # Up to this place the work, ``linear x + (1 - linear) x^2`` in a sequence of length 1, is k of count parts.
        work = k / count
        place = 2 * work / (linear + sqrt(linear**2 + 4 * (1 - linear) * work))
        rounded = multiple * round(place * sequence / multiple)
        ends.append(min(max(rounded, ends[-1] + 1), sequence - (count - k)))
    return tuple(end - begin for begin, end in zip(ends, [*ends[1:], sequence], strict=True))


def attention_shares(lengths: Sequence[int]) -> list[float]:
    """Share of each slice in the causal attention of the whole sequence."""
    sequence, end, shares = sum(lengths), 0, []
    for length in lengths:
        end += length
        shares.append(length * (2 * end - length) / sequence**2)
    return shares


def slice_times_us(time_us: float, fixed_us: float, attention_us: float, lengths: Sequence[int]) -> list[float]:
    """Time of each slice in an op that takes `time_us` on the whole sequence.

    `attention_us` of it is causal attention; `fixed_us` does not depend on the length, and every slice takes it.
    """
    sequence, linear_us = sum(lengths), time_us - fixed_us - attention_us
    return [
        fixed_us + linear_us * length / sequence + attention_us * share
        for length, share in zip(lengths, attention_shares(lengths), strict=True)
    ]


def require_attention(profile: LayerProfile, field: str) -> int:
    """Tokens of a profile's sequences. Raises InputError if it does not say, or not what attention costs."""
    if profile.sequence is None or not any(layer.attention for layer in profile.layers):
        missing = "sequence" if profile.sequence is None else "layers[].attention"
        detail = (
            f"needs to know how costs grow with the length of a sequence, but the profile has no {missing}. Maybe "
            "make the profile with --slices, which measures it, or of a table: optpipe profile --from-table."
        )
        raise InputError([Issue(field, "missing_attention", detail)])
    return profile.sequence


class ModelTimes(NamedTuple):
    """Time of ops of the whole model for one microbatch: all of it, its fixed part, and that of attention."""

    total_us: float
    fixed_us: float
    attention_us: float

    def factor(self, tokens: float, pairs: float) -> float:
        """Time with other multiples of tokens, and of pairs of tokens that attend to one another; 1 of no time."""
        linear_us = self.total_us - self.fixed_us - self.attention_us
        time_us = self.fixed_us + linear_us * tokens + self.attention_us * pairs
        return round(time_us / self.total_us if self.total_us else 1.0, DECIMALS)


PASSES = ("forward", "backward_input", "backward_weight")


def model_times_us(profile: LayerProfile, passes: Sequence[str] = PASSES) -> ModelTimes:
    """Time of passes of the whole model, by default of F, B and W."""
    total_us = fixed_us = attention_us = 0.0
    for layer in profile.each_layer:
        for field in (f"{name}_us" for name in passes):
            time_us = getattr(layer, field)
            total_us += time_us
            fixed_us += min(layer.fixed_us, time_us)
            attention_us += getattr(layer.attention, field) if layer.attention else 0.0
    return ModelTimes(total_us, fixed_us, attention_us)


Lengths = Sequence[Sequence[int]]
"""Tokens of the documents in each microbatch."""


def microbatch_factors(profile: LayerProfile, lengths: Lengths) -> list[dict[str, float]]:
    """Factors of microbatches of these documents (`Problem.microbatch_factors`), relative to the profile's microbatch.

    A factor of times is that of the whole model, for all stages; F, B and W have their own where these differ. Raises
    InputError for a microbatch that is too large against the profile's.
    """
    sequence = require_attention(profile, "lengths")
    whole, of_passes = model_times_us(profile), {name: model_times_us(profile, [name]) for name in PASSES}
    factors = []
    for i, documents in enumerate(lengths):
        tokens = sum(documents) / (profile.microbatch_size * sequence)
        pairs = sum(length**2 for length in documents) / (profile.microbatch_size * sequence**2)
        size, time = round(tokens, DECIMALS), whole.factor(tokens, pairs)
        if max(time, size) > MAX_FACTOR:
            detail = f"has {sum(documents):,} tokens, {max(time, size):,.0f} times the work of the profile's"
            limit = (
                f"microbatch of {profile.microbatch_size * sequence:,}, but at most {MAX_FACTOR:,} times is possible"
            )
            raise InputError([Issue(("--lengths", i), "out_of_range", f"{detail} {limit}. Maybe a digit too many.")])
        own = {name: times.factor(tokens, pairs) for name, times in of_passes.items()}
        own |= {"recompute": own["forward"]}
        of_kinds = {name: factor for name, factor in own.items() if factor != time}
        factors.append({"time": time, "bytes": size, "transfer": size} | of_kinds)
    return factors


def evened(lengths: Lengths) -> Lengths:
    """Lengths of equal microbatches with as many tokens in all: the same number of equal documents in each.

    One document each if they have one each; the length is rounded.
    """
    documents = sum(map(len, lengths))
    each = max(1, round(documents / len(lengths)))
    length = max(1, round(sum(map(sum, lengths)) / (each * len(lengths))))
    return [[length] * each] * len(lengths)


def load_lengths(path: Path) -> Lengths:
    """Read the documents of each microbatch: a JSON list of lengths or of lists of them, or text with a line for each.

    Empty lines are left out. Raises InputError naming the entry or the line, the value and the limit.
    """
    content = read_bounded(path, MAX_LENGTHS_BYTES)
    entries: Any
    lines: list[int] = []
    if content.lstrip()[:1] in (b"[", b"{"):
        entries = parse_json(content, str(path))
    else:
        texts = utf8_text(content, str(path)).splitlines()
        rows = [(number, row) for number, text in enumerate(texts, 1) if (row := text.replace(",", " ").split())]
        lines = [number for number, _ in rows]
        entries = [[int(part) if part.isdecimal() and len(part) <= 10 else part for part in row] for _, row in rows]
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_COUNT:
        count = f"has {len(entries)}" if isinstance(entries, list) else f"is {shown(entries)}"
        detail = f"{count} but must be a list of 1 to {MAX_COUNT:,} lengths, one for each microbatch."
        raise InputError([Issue("", "no_lengths", detail)], str(path))
    issues, microbatches = [], []
    for i, entry in enumerate(entries):
        documents = entry if isinstance(entry, list) else [entry]
        wrong = [one for one in documents if type(one) is not int or not 1 <= one <= MAX_LENGTH]
        if wrong or not documents:
            value = shown(wrong[0]) if wrong else "empty"
            detail = f"is {value} but must be a whole number of tokens from 1 to {MAX_LENGTH:,}, or a list of such."
            issues.append(
                Issue("", "no_length", f"line {lines[i]} {detail}") if lines else Issue((i,), "no_length", detail)
            )
        microbatches.append(documents)
    if issues:
        raise InputError(issues[:MOST_ISSUES], str(path))
    return microbatches
