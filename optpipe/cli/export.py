"""`optpipe export`: writes a schedule, a measured step, or the model of a problem for other tools."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optpipe.cli.console import AsJson, compile_once, doing_long, print_json, stderr, stdout, table
from optpipe.cli.documents import ProblemOfCsv, load_schedule, load_schedule_or
from optpipe.document import read_bounded, read_document
from optpipe.errors import InputError, Issue
from optpipe.export import EXPORTERS, Exported, exporter
from optpipe.export.launch import TRAINERS, launch_files
from optpipe.files import STDOUT, check_writable, make_folder, write_atomically
from optpipe.mode_names import FULL, OFFLOAD
from optpipe.units import bytes_text, change_text, count_text, share_text, time_text

if TYPE_CHECKING:
    from optpipe.document import Document
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from solver.trainer_settings import Setting, Trainer


PLAN_FILE, SCHEDULE_FILE = "plan.json", "schedule.json"
MAX_PLAN_BYTES = 2**26
"""Most that is read of a plan: a strategy takes about 400 bytes, and there are at most some ten thousand."""


def _export_model(stated: Problem | Schedule, form: Literal["lp", "mps"]) -> Exported:
    """The mixed-integer model of a problem, or of a schedule's."""
    from optpipe.schedule import Schedule
    from solver.model_export import export_model

    compile_once()
    statement = export_model(stated.problem if isinstance(stated, Schedule) else stated)
    sizes = {name: getattr(statement, name) for name in ("rows", "columns", "integer_columns", "time_unit_us")}
    size = f"{statement.rows:,} rows, {statement.columns:,} columns"
    return Exported(statement.to_text(form), sizes, f": {size}, {statement.integer_columns:,} of them integer")


def _export_settings(schedule: Schedule, trainer: Trainer) -> Exported:
    """The flags that come nearest to a schedule, and what all that were tried lose against it."""
    from solver.trainer_settings import left_to_the_user, nearest_settings, pipeline_settings

    compile_once()
    found = nearest_settings(schedule, trainer)
    best = found[0]
    flags = [*pipeline_settings(schedule.problem, trainer), *best.settings]
    lost = [*_lost(schedule, best), *left_to_the_user(schedule.problem, trainer)]
    has_full = all(FULL in stage.choice_numbers for stage in schedule.problem.stages)
    if trainer == "megatron" and has_full and all(one.mode != FULL for one in found):
        lost.append(
            "full recomputation is left out: it is set by the number of layers of a stage, and stages have different "
            "numbers, or nothing says them. Maybe add the modes 'blocks', or plan from a layer profile."
        )
    bubble = schedule.bubble_with_recomputation
    peaks = [device.peak_bytes_any_timing for device in schedule.devices]
    plan = {"value_us": schedule.value_us, "bubble": bubble, "peak_bytes": peaks}
    rows = [
        ("activations", "step", "change", "bubble, recomputation", "largest peak", "beyond the budget", "flags"),
        ("the plan", time_text(schedule.value_us), "", share_text(bubble), bytes_text(max(peaks)), "", ""),
    ]
    for one in found:
        change = change_text(one.value_us, schedule.value_us)
        figures = time_text(one.value_us), change, share_text(one.bubble), bytes_text(max(one.peak_bytes))
        rows.append((one.mode, *figures, bytes_text(one.short_bytes), " ".join(one.settings)))
    lacks = f"no setting keeps the budgets: with the nearest one a device lacks {bytes_text(best.short_bytes)}."
    return Exported(
        "".join(f"{line}\n" for line in (*(f"# {line}" for line in lost), *flags)),
        {"plan": plan, "flags": flags, "lost": lost, "settings": [asdict(one) for one in found]},
        f": {' '.join(flags)}",
        rows=rows,
        error=lacks if best.short_bytes else "",
    )


def _lost(schedule: Schedule, best: Setting) -> list[str]:
    """Sentences on what a trainer's settings lose against a schedule: time, memory, activations, order."""
    change = change_text(best.value_us, schedule.value_us)
    lost = [f"step {time_text(best.value_us)}, the plan's {time_text(schedule.value_us)}: {change}"]
    if best.short_bytes:
        lost.append(
            f"DOES NOT FIT: a device lacks {bytes_text(best.short_bytes)} with these settings, the nearest ones"
        )
    if not any("csv" in flag for flag in best.settings):
        lost.append("the trainer runs an order of its own, not the plan's")
    if schedule.orders.blocks and not best.blocks:
        blocks = count_text(len(schedule.orders.blocks), "block")
        lost.append(f"the plan's {blocks} of a forward and a backward: the two run one after the other")
    planned = {name for name in schedule.mode_names if name != best.mode}
    planned |= {OFFLOAD for device in schedule.devices if len(device.offload) and best.mode != OFFLOAD}
    if planned:
        lost.append(f"every activation is {best.mode}: the plan's {', '.join(sorted(planned))} of some is lost")
    return lost


def _export_document(schedule: Schedule, document: Literal["schedule", "problem"]) -> Exported:
    """One of the program's own documents."""
    from optpipe.schedule import schedule_text

    return Exported(schedule_text(schedule) if document == "schedule" else schedule.problem.to_json() + "\n")


for _trainer in ("megatron", "torchtitan"):
    _use = "the settings for activations that come nearest, as flags, and what they lose"
    exporter(_trainer, _use)(partial(_export_settings, trainer=_trainer))
for _form in ("lp", "mps"):
    _use = "the problem as a mixed-integer model, for other solvers"
    exporter(_form, _use, document="problem")(partial(_export_model, form=_form))
for _document in ("schedule", "problem"):
    _use = "the program's own documents, of a schedule CSV of torch"
    exporter(_document, _use)(partial(_export_document, document=_document))

_WRITTEN = {name: one for name, one in EXPORTERS.items() if not one.picture}

if TYPE_CHECKING:
    Format = StrEnum  # type checkers know no enum that is made from data
else:
    Format = StrEnum("Format", [(name, name) for name in dict.fromkeys((*_WRITTEN, *TRAINERS))])
"""Export formats."""


def _launch(folder: Path, trainer: str, output: Path, as_json: bool) -> int:
    """Write the files that start a plan in a trainer."""
    from optpipe.schedule import Schedule, schedule_text

    if trainer not in TRAINERS:
        detail = f"is {trainer}, which takes a schedule, but {folder} is a plan. Maybe {folder / SCHEDULE_FILE}."
        raise InputError([Issue("--to", "other_document", detail)])
    plan = folder / PLAN_FILE
    launched = launch_files(read_document(plan, MAX_PLAN_BYTES, "plan"), trainer, str(plan))
    files = dict(launched.files)
    if launched.runs_schedule:
        files[SCHEDULE_FILE] = schedule_text(Schedule.load(folder / SCHEDULE_FILE))
    make_folder(output)
    for name in files:
        check_writable(output / name)
    for name, text in files.items():
        write_atomically(output / name, text)
    if as_json:
        print_json(
            {
                "output": str(output),
                "to": trainer,
                "files": [*files],
                "lost": [*launched.lost],
                "seconds": launched.seconds,
            }
        )
        return 0
    for sentence in launched.lost:
        stdout().print(f"lost: {sentence}")
    written = ", ".join(str(output / name) for name in files)
    stdout().print(f"predicted {time_text(launched.seconds * 1e6)} a step; wrote {written}")
    return 0


def command(
    document: Annotated[
        Path,
        typer.Argument(
            help="A schedule (optpipe.schedule/1) or a schedule CSV of torch; for chrome-trace also a measured step "
            "(optpipe.trace/1), for lp and mps also a problem (optpipe.problem/1). For launch files the folder of a "
            "plan (`optpipe plan MODEL --gpus N -o DIR`).",
            metavar="FILE.json|DIR",
        ),
    ],
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            help=" ".join(
                f"{', '.join(one.name for one in several)}: {use}."
                for use, several in groupby(_WRITTEN.values(), lambda one: one.use)
            )
            + f" Of a plan, the files that start it: {', '.join(TRAINERS)}.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Output file, - for stdout; the folder of launch files.")
    ],
    drop_offload: Annotated[
        bool,
        typer.Option(
            "--drop-offload",
            help="torch-csv: leave out offloads and reloads, which torch cannot run, and report the memory needed "
            "without them.",
        ),
    ] = False,
    problem: ProblemOfCsv = None,
    as_json: AsJson = False,
) -> int:
    """Export a schedule, a measured step, or the mixed-integer model of a problem to the format of another tool.

    Of a plan, write the files that start it in a trainer.
    """
    from optpipe.problem import Problem
    from optpipe.trace import Trace

    if document.is_dir() or document.name == PLAN_FILE:
        for option, given in (("--drop-offload", drop_offload), ("--problem", problem is not None)):
            if given:
                detail = f"has no meaning with a plan, which {document} is. Maybe leave it out."
                raise InputError([Issue(option, "meaningless", detail)])
        return _launch(document if document.is_dir() else document.parent, to, output, as_json)
    if not document.exists():  # before the output is judged: it may be the folder of launch files
        read_bounded(document, 0)
    if to not in EXPORTERS:
        detail = f"is {to}, which takes the folder of a plan, but {document} is none. Maybe optpipe plan MODEL -o DIR."
        raise InputError([Issue("--to", "other_document", detail)])
    others: dict[str, type[Document]] = {"trace": Trace, "problem": Problem}
    chosen = EXPORTERS[to]
    if drop_offload and "drop_offload" not in chosen.options:
        detail = f"is given with --to {to}, which shows offloads. Maybe leave it out."
        raise InputError([Issue("--drop-offload", "nothing_to_drop", detail)])
    to_stdout = str(output) == STDOUT
    if not to_stdout:
        check_writable(output, document)
    with doing_long(f"reading {document.name}"):
        other = others.get(chosen.document)
        loaded = load_schedule_or(other, document, problem) if other else load_schedule(document, problem)
    with doing_long(f"exporting to {to}"):
        exported = chosen.export(loaded, **({"drop_offload": True} if drop_offload else {}))
    for note in exported.notes:
        stderr().print(note)
    if to_stdout:  # the content and nothing else; text, since pictures are drawn by `optpipe plot`
        print(exported.content, end="")
    else:
        write_atomically(output, exported.content)
    if as_json and not to_stdout:
        print_json({"output": str(output), "to": str(to), **exported.facts})
    elif not to_stdout:
        if exported.rows:
            rows = table(*exported.rows[0], wraps=True)
            for row in exported.rows[1:]:
                rows.add_row(*row)
            stdout().print(rows)
        stdout().print(f"wrote {output}{exported.summary}")
    if exported.error:
        print(f"error: {exported.error}", file=sys.stderr)
    return 1 if exported.error else 0
