"""`optpipe calibrate`: fits a machine's efficiencies to measured steps, or holds predictions against them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import AsJson, doing_long, print_json, stdout, table
from optpipe.errors import InputError, Issue
from optpipe.files import check_writable, write_atomically
from optpipe.units import share_text

if TYPE_CHECKING:
    from optpipe.cluster.machine import Machine
    from optpipe.cluster.rows import Row, Skipped

SHOWN = 20
"""Most rows and reasons that are printed; `--json` has all."""
PERCENTILE = 90
GIB = 2**30


def command(
    rows: Annotated[Path, typer.Argument(help="Measured training steps, a line each.", metavar="ROWS.csv")],
    machine: Annotated[
        str, typer.Option(help="The machine that they ran on: a name of `optpipe machines`, or a file.")
    ],
    models: Annotated[
        Path | None,
        typer.Option(
            help="Further models of the rows: an object of configurations (fields of a config.json) by name.",
            metavar="MODELS.json",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Output file for the machine.", metavar="FILE.toml")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fit nothing: predict every row with the machine as it is.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Fit the efficiencies of a machine to training steps that were measured on it, or check its predictions.

    The facts of its data sheet stay as they are. A row that cannot be predicted is skipped, and the reason said. Rows
    without a time are checked for memory alone.
    """
    from optpipe.cluster.calibrate import calibrate, split_rows
    from optpipe.cluster.machine import Machine
    from optpipe.cluster.rows import read_rows

    if check and output:
        detail = "has no meaning here: --check fits nothing. Maybe leave out one of the two."
        raise InputError([Issue("--output", "meaningless", detail)])
    if output:
        check_writable(output, rows, models)
    known = Machine.load(machine)
    found, skipped = read_rows(rows, models)
    mine, others = split_rows(known, found)
    skipped = sorted([*skipped, *others], key=lambda one: one.name)
    if not mine and not check:
        reasons = "; ".join(dict.fromkeys(one.reason for one in skipped[:SHOWN]))
        raise InputError([Issue("", "no_rows", f"has no row for {known.name}: {reasons}.")], str(rows))
    if not check:
        with doing_long(f"fitting efficiencies of {known.name} to {len(mine)} rows"):
            known = calibrate(known, mine, f"{rows.name}")
        if output:
            write_atomically(output, known.to_toml())
    document = _document(known, mine, skipped)
    if as_json:
        print_json(document | {"output": str(output) if output else None})
    else:
        _print(known, document, output, check)
    return 0


def _document(machine: Machine, rows: Sequence[Row], skipped: Sequence[Skipped]) -> dict[str, Any]:
    import numpy as np

    from optpipe.cluster.calibrate import memory_of, predict

    entries, errors, memory_errors = [], [], []
    for row in rows:
        predicted, memory = predict(machine, row).seconds, memory_of(machine, row)
        error = None if row.seconds is None else predicted / row.seconds - 1
        peak = memory.held.total / GIB
        measured = row.allocated_gib
        if measured is None and row.reserved_gib is not None:
            peak, measured = memory.reserved_bytes / GIB, row.reserved_gib
        errors += [] if error is None else [abs(error)]
        memory_errors += [] if measured is None else [abs(peak / measured - 1)]
        entries.append(
            {
                "id": row.name,
                "predicted_s": predicted,
                "measured_s": row.seconds,
                "error": error,
                "predicted_peak_gib": peak,
                "measured_peak_gib": measured,
                "fits": memory.fits,
                "assumed": list(row.assumptions),
            }
        )
    return {
        "machine": machine.name,
        "rows": entries,
        "skipped": [{"id": one.name, "reason": one.reason} for one in skipped],
        "median_error": float(np.median(errors)) if errors else None,
        "p90_error": float(np.percentile(errors, PERCENTILE)) if errors else None,
        "median_memory_error": float(np.median(memory_errors)) if memory_errors else None,
    }


def _print(machine: Machine, document: dict[str, Any], output: Path | None, check: bool) -> None:
    console = stdout()
    timed = [row for row in document["rows"] if row["error"] is not None]
    rows = table("farthest rows", "predicted s", "measured s", "error")
    for row in sorted(timed, key=lambda one: -abs(one["error"]))[:SHOWN]:
        rows.add_row(row["id"], f"{row['predicted_s']:.2f}", f"{row['measured_s']:.2f}", f"{row['error']:+.1%}")
    if timed:
        console.print(rows)
    fits = sum(row["fits"] for row in document["rows"])
    console.print(
        f"{len(timed)} steps of {machine.name} {'predicted' if check else 'fitted'}; {fits} of "
        f"{len(document['rows'])} layouts fit its memory"
    )
    for name, what in (("median_error", "half"), ("p90_error", f"{PERCENTILE} %")):
        if document[name] is not None:
            console.print(f"{what} of the steps are within {share_text(document[name])}")
    if document["median_memory_error"] is not None:
        console.print(f"half of the measured peaks are within {share_text(document['median_memory_error'])}")
    if not check:
        for one in machine.efficiencies:
            if not one.software and one.rows and one.unseen_model_error is not None:
                unseen = share_text(one.unseen_model_error)
                console.print(f"{one.precision}: half of the steps of a model that is left out are within {unseen}")
    reasons: dict[str, int] = {}
    for one in document["skipped"]:
        reasons[one["reason"]] = reasons.get(one["reason"], 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1])[:SHOWN]:
        console.print(f"skipped {count}: {reason}")
    if len(reasons) > SHOWN:
        console.print(f"and {len(reasons) - SHOWN} more reasons; --json lists all")
    if output:
        console.print(f"wrote {output}")
