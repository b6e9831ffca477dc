"""Tables of the recorded runs of the regression suites: value, proof, and the best public schedule.

`python -m benchmarks.suites SECTION` prints one of the tables. Nothing is solved: every row is a run of `optpipe bench
SUITE --record`, which `optpipe bench SUITE` repeats and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks.markdown import Time, TimedRow, seconds_text, table
from benchmarks.section import Section, Size, main
from optpipe.problem import Problem
from optpipe.schedule import relative_gap
from optpipe.units import share_text
from solver.regression.judge import PUBLIC_ROUNDING
from solver.regression.run import Case, Figures, Recorded, Suite, expand_cases, suites_folder

SUITES = suites_folder()

Known = tuple[Case, Figures, Recorded]
"""Case with its record, also as figures."""


def _table_of_records(suite_name: str, _size: Size, _pictures: Path) -> str:
    path = SUITES / f"{suite_name}.json"
    cases = expand_cases(path, Suite.load(path))
    known = [(case, _figures(case.problem, case.recorded), case.recorded) for case in cases if case.recorded]
    if not known:
        return f"Nothing is recorded yet. `optpipe bench {suite_name} --record` does."
    missing = [case.instance for case in cases if not case.recorded]
    parts = [_table(known), *_summaries(known), _conditions(suite_name, [recorded for *_, recorded in known])]
    if missing:
        parts.append(f"Not recorded yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _figures(problem: Problem, recorded: Recorded) -> Figures:
    """Compute the figures of a recorded run."""
    value_us, bound_us = recorded.value_us, recorded.bound_us
    gap, bubble = relative_gap(value_us, bound_us), 1 - max(problem.work_us) / value_us
    return Figures(value_us, bound_us, 0.0 if recorded.proved else gap, bubble, recorded.seconds, recorded.proved)


def _table(known: Sequence[Known]) -> str:
    head = ["instance", "value", "gap", "bubble", "best public", "its bubble", "whose", "seconds", "of at most"]
    return table(head, [_row(*entry) for entry in known], text_columns=1)


def _row(case: Case, figures: Figures, recorded: Recorded) -> TimedRow:
    public = case.public
    ours = [Time(figures.value_us), share_text(figures.gap), share_text(figures.bubble)]
    theirs = [Time(public.value_us), share_text(public.bubble(figures)), public.scheduler] if public else ["-"] * 3
    return [case.instance, *ours, *theirs, seconds_text(figures.seconds), f"{recorded.time_limit_s:g}"]


def _summaries(known: Sequence[Known]) -> list[str]:
    """Number of proofs, and mean bubbles against public values: over all instances, and over those with offload."""
    proved = sum(figures.optimal for _, figures, _ in known)
    lines = [f"{proved} of {len(known)} are proved optimal."]
    compared = [(case, figures) for case, figures, _ in known if case.public]
    offloading = [entry for entry in compared if any(stage.offload for stage in entry[0].problem.stages)]
    for entries, where in ((compared, "that have one"), (offloading, "that have one and may offload")):
        if entries:
            lines.append(_against_public(entries, where))
    return lines


def _against_public(entries: Sequence[tuple[Case, Figures]], where: str) -> str:
    pairs = [(figures, case.public) for case, figures in entries if case.public]
    shares = [figures.value_us / public.value_us - 1 for figures, public in pairs]
    above = sum(share > PUBLIC_ROUNDING for share in shares)
    rounded = sum(0 < share <= PUBLIC_ROUNDING for share in shares)
    ours = mean(figures.bubble for figures, _ in pairs)
    theirs = mean(public.bubble(figures) for figures, public in pairs)
    return (
        f"Above the best public value on {above} of the {len(pairs)} instances {where} (and within the rounding of its "
        f"times, {1e6 * PUBLIC_ROUNDING:g} millionths, on {rounded}); mean bubble {share_text(ours)} against "
        f"{share_text(theirs)}."
    )


def _conditions(suite_name: str, records: Sequence[Recorded]) -> str:
    """Describe how the runs were made, from their records."""
    cores = _range(sorted({recorded.workers for recorded in records}))
    versions = ", ".join(sorted({recorded.version for recorded in records}))
    return (
        f"The runs in `instances/suites/{suite_name}.json`, recorded by `optpipe bench {suite_name} --record` with "
        f"{cores} cores, version {versions}; a run may have been replaced by a better one of another day or of more "
        "time, as its last column says."
    )


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _section(suite_name: str, title: str, intent: str) -> Section:
    command = f"python -m benchmarks.suites {suite_name}"
    return Section(suite_name, title, intent, command, partial(_table_of_records, suite_name))


SECTIONS = (
    _section(
        "published",
        "Against public schedulers",
        "`auto` on every problem of `instances`, beside the best public schedule in `reference.json` there.",
    ),
    _section(
        "budgets",
        "Budgets above that of 1F1B",
        "`auto` on the measured profiles of Zero Bubble with 1.25 to 1.875 times the memory of 1F1B.",
    ),
    _section("large", "Large problems", "`auto` with up to 128 stages and 1024 microbatches."),
)

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS)
