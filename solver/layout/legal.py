"""Legal values in place of those with which a job has no legal strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import lcm

from optpipe.cluster.strategy import Strategy
from optpipe.errors import InputError, Issue
from solver.layout.fitting import Job
from solver.layout.strategies import (
    CLOSED_FORMS,
    CONTEXTS,
    FIELDS,
    MICROBATCH_SIZES,
    Fixed,
    families,
    require_blocks,
    require_stages,
    variants,
)

MOST_LISTED = 12
"""Most legal values of an option that are listed."""


def legal_instead(job: Job, gpus: int, fixed: Fixed) -> str:
    """Advice with other values: of the batch and the sequence, of options, or of the GPUs; empty if none helps."""
    advice = [_other_options(job, gpus, fixed), _other_job(job, gpus, fixed), _other_gpus(job, gpus, fixed)]
    return f"Maybe {', or '.join(filter(None, advice))}." if any(advice) else ""


def broken_rule(job: Job, gpus: int, fixed: Fixed) -> str:
    """The first rule that the first of all fixed values break, the others being 1 or 2; empty if they break none."""
    values = {FIELDS[name]: next(iter(fixed[name])) for name in FIELDS if name in fixed}
    if "vpp" not in fixed and "schedule" in fixed:
        values["virtual"] = CLOSED_FORMS[values["schedule"]][0]
    free = [name for name in ("tp", "cp", "pp", "ep") if name not in fixed]
    found: list[tuple[list[Issue], Sequence[Issue]]] = []
    for degrees in product((1, 2), repeat=len(free)):
        one = Strategy(**values | {FIELDS[name]: degree for name, degree in zip(free, degrees, strict=True)})
        if "dp" not in fixed:
            one = replace(one, data=max(1, gpus // one.gpus_of_replica))
        found.append(([*job.rules(gpus).faults(one)], _faults_of_schedule(job, one, fixed)))
    faults, of_schedule = min(found, key=lambda both: (len(both[0]), len(both[1])))
    fault = next(iter(faults or of_schedule), None)
    return "" if fault is None else f": {fault.pointer} {fault.detail.split(' Maybe ')[0].rstrip('.')}"


def _faults_of_schedule(job: Job, one: Strategy, fixed: Fixed) -> Sequence[Issue]:
    if "schedule" not in fixed:
        return []
    try:
        require_stages(one)
        require_blocks(one, one.microbatches(job.global_batch))
    except InputError as error:
        return error.issues
    return []


def _legal(job: Job, gpus: int, fixed: Fixed) -> Iterator[Strategy]:
    for family in families(job, gpus, fixed):
        yield from variants(job, family, fixed)


def _other_job(job: Job, gpus: int, fixed: Fixed) -> str:
    """The nearest batch and sequence that a strategy with all that is fixed divides."""
    sizes = fixed.get("microbatch_size", MICROBATCH_SIZES)
    parts = 2 * lcm(*fixed.get("cp", CONTEXTS)) * lcm(*range(1, job.machine.facts.gpus_per_node + 1))
    divided = replace(job, sequence=job.sequence * parts, global_batch=job.global_batch * gpus * lcm(*sizes))
    found = []
    for one in _legal(divided, gpus, fixed):
        sequence = _multiple(job.sequence, (2 if one.context > 1 else 1) * one.tensor * one.context)
        batch = _multiple(job.global_batch, one.data * one.microbatch_size)
        change = abs(sequence / job.sequence - 1) + abs(batch / job.global_batch - 1)
        found.append((change, sequence, batch))
    if not found:
        return ""
    _, sequence, batch = min(found)
    texts = [f"a sequence of {sequence:,}"] if sequence != job.sequence else []
    return " and ".join([*texts, *([f"a global batch of {batch:,}"] if batch != job.global_batch else [])])


def _multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


def _other_options(job: Job, gpus: int, fixed: Fixed) -> str:
    """Legal values of the options that cannot be as they are fixed, the first of them kept as far as they can."""
    kept = {name: values for name, values in fixed.items() if name not in FIELDS}
    if not _any(_legal(job, gpus, kept)):
        return ""
    wrong = []
    for name in (name for name in FIELDS if name in fixed):
        if _any(_legal(job, gpus, kept | {name: fixed[name]})):
            kept |= {name: fixed[name]}
        else:
            wrong.append(name)
    legal = list(_legal(job, gpus, kept))
    texts = []
    for name in wrong:
        values = [str(value) for value in sorted({getattr(one, FIELDS[name]) for one in legal})]
        more = ["..."] if len(values) > MOST_LISTED else []
        given = ", ".join(map(str, fixed[name]))
        texts.append(f"{name} of {', '.join(values[:MOST_LISTED] + more)} in place of {given}")
    return " and ".join(texts)


def _any(strategies: Iterable[Strategy]) -> bool:
    return next(iter(strategies), None) is not None


def _other_gpus(job: Job, gpus: int, fixed: Fixed) -> str:
    """Whole nodes, the nearest fewer and more, on which a strategy is legal."""
    node = job.machine.facts.gpus_per_node
    near = {gpus // node * node, -(-gpus // node) * node} - {0, gpus}
    legal = [f"{count:,}" for count in sorted(near) if _any(_legal(job, count, fixed))]
    return f"{' or '.join(legal)} GPUs" if legal else ""
