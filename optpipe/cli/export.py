"""`optpipe export`: writes a schedule, a measured step, or the model of a problem for other tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import AsJson, compile_once, doing_long, print_json, stderr, stdout, table
from optpipe.cli.documents import ProblemOfCsv, load_schedule, load_schedule_or
from optpipe.errors import InputError, Issue
from optpipe.files import check_writable, write_atomically
from optpipe.mode_names import FULL
from optpipe.stage import OFFLOAD
from optpipe.units import share_text, us_text

if TYPE_CHECKING:
    from optpipe.schedule import Schedule
    from solver.trainer_settings import Setting, Trainer


class Format(StrEnum):
    """Export formats."""

    CHROME_TRACE = "chrome-trace"
    TORCH_CSV = "torch-csv"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    LP = "lp"
    MPS = "mps"
    SCHEDULE = "schedule"
    PROBLEM = "problem"


def command(
    document: Annotated[
        Path,
        typer.Argument(
            help="A schedule (optpipe.schedule/1) or a schedule CSV of torch; for chrome-trace also a measured step "
            "(optpipe.trace/1), for lp and mps also a problem (optpipe.problem/1).",
            metavar="FILE.json",
        ),
    ],
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            help="chrome-trace: for Perfetto and chrome://tracing. "
            "torch-csv: for torch's own pipelining runtime, torchtitan and NeMo AutoModel. "
            "megatron, torchtitan: the settings for activations that come nearest, as flags, and what they lose. "
            "lp, mps: the problem as a mixed-integer model, for other solvers. "
            "schedule, problem: the program's own documents, of a schedule CSV of torch.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Output file.")],
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
    """Export a schedule, a measured step, or the mixed-integer model of a problem to the format of another tool."""
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe.trace import Trace

    if drop_offload and to is not Format.TORCH_CSV:
        detail = f"is given with --to {to}, which shows offloads. Maybe leave it out."
        raise InputError([Issue("--drop-offload", "nothing_to_drop", detail)])
    check_writable(output)
    result: dict[str, object] = {"output": str(output), "to": str(to)}
    summary = f"wrote {output}"
    if to is Format.LP or to is Format.MPS:
        from solver.model_export import export_model

        stated = load_schedule_or(Problem, document, problem)
        compile_once()
        with doing_long("stating the model"):
            statement = export_model(stated.problem if isinstance(stated, Schedule) else stated)
        write_atomically(output, statement.to_text("lp" if to is Format.LP else "mps"))
        result |= {name: getattr(statement, name) for name in ("rows", "columns", "integer_columns", "time_unit_us")}
        size = f"{statement.rows:,} rows, {statement.columns:,} columns"
        summary += f": {size}, {statement.integer_columns:,} of them integer"
    elif to is Format.CHROME_TRACE:
        from optpipe.export.chrome_trace import chrome_trace, measured_chrome_trace

        loaded = load_schedule_or(Trace, document, problem)
        events = measured_chrome_trace(loaded) if isinstance(loaded, Trace) else chrome_trace(loaded)
        write_atomically(output, json.dumps(events, allow_nan=False))
    elif to is Format.MEGATRON or to is Format.TORCHTITAN:
        trainer: Trainer = "megatron" if to is Format.MEGATRON else "torchtitan"
        with doing_long(f"reading {document.name}"):
            loaded = load_schedule(document, problem)
        return _export_settings(loaded, trainer, output, as_json)
    elif to is Format.SCHEDULE or to is Format.PROBLEM:
        from optpipe.schedule import schedule_text

        loaded = load_schedule(document, problem)
        text = schedule_text(loaded) if to is Format.SCHEDULE else loaded.problem.to_json() + "\n"
        write_atomically(output, text)
    else:
        from optpipe.export.torch_csv import checkpointed_stages, torch_csv

        loaded = load_schedule(document, problem)
        write_atomically(output, torch_csv(loaded, drop_offload=drop_offload))
        if modes := checkpointed_stages(loaded):
            result["checkpoint"] = [{"stage": s, "mode": mode} for s, mode in modes.items()]
            stages = ", ".join(f"{s} ({mode})" for s, mode in modes.items())
            summary += f"; stages to checkpoint, with their modes: {stages}"
        if drop_offload:
            result["devices"] = _report_memory_without_offload(loaded)
    print_json(result) if as_json else stdout().print(summary)
    return 0


def _export_settings(schedule: Schedule, trainer: Trainer, output: Path, as_json: bool) -> int:
    """Write the flags that come nearest to a schedule, and print what all that were tried lose against it."""
    from solver.trainer_settings import nearest_settings, pipeline_settings

    compile_once()
    with doing_long("simulating settings"):
        found = nearest_settings(schedule, trainer)
    best = found[0]
    flags = [*pipeline_settings(schedule.problem, trainer), *best.settings]
    lost = _lost(schedule, best)
    has_full = all(FULL in stage.choice_numbers for stage in schedule.problem.stages)
    if trainer == "megatron" and has_full and all(one.mode != FULL for one in found):
        lost.append(
            "full recomputation is left out: it is set by the number of layers of a stage, and stages have different "
            "numbers, or nothing says them. Maybe add the modes 'blocks', or plan from a layer profile."
        )
    write_atomically(output, "".join(f"{line}\n" for line in (*(f"# {line}" for line in lost), *flags)))
    bubble = schedule.bubble_with_recomputation
    peaks = [device.peak_bytes_any_timing for device in schedule.devices]
    if as_json:
        plan = {"value_us": schedule.value_us, "bubble": bubble, "peak_bytes": peaks}
        settings = [asdict(one) for one in found]
        print_json(
            {"output": str(output), "to": trainer, "plan": plan, "flags": flags, "lost": lost, "settings": settings}
        )
    else:
        columns = ("step", "against the plan", "bubble", "largest peak bytes", "beyond the budget", "flags")
        rows = table("activations", *columns)
        rows.columns[-1].justify, rows.columns[-1].no_wrap = "left", False
        rows.add_row("the plan", us_text(schedule.value_us), "", share_text(bubble), f"{max(peaks):,}", "", "")
        for one in found:
            slower = f"{one.value_us / schedule.value_us - 1:+.1%}" if schedule.value_us else ""
            figures = [us_text(one.value_us), slower, share_text(one.bubble), f"{max(one.peak_bytes):,}"]
            rows.add_row(one.mode, *figures, f"{one.short_bytes:,}", " ".join(one.settings))
        stdout().print(rows)
        stdout().print(f"wrote {output}: {' '.join(flags)}")
    if best.short_bytes:
        print(
            f"error: no setting keeps the budgets: with the nearest one a device lacks {best.short_bytes:,} bytes.",
            file=sys.stderr,
        )
    return 1 if best.short_bytes else 0


def _lost(schedule: Schedule, best: Setting) -> list[str]:
    """Sentences on what a trainer's settings lose against a schedule: time, memory, activations, order."""
    slower = f", {best.value_us / schedule.value_us - 1:+.1%}" if schedule.value_us else ""
    lost = [f"step {us_text(best.value_us)}, the plan's {us_text(schedule.value_us)}{slower}"]
    if best.short_bytes:
        lost.append(
            f"DOES NOT FIT: a device lacks {best.short_bytes:,} bytes with these settings, the nearest that there are"
        )
    if not any("csv" in flag for flag in best.settings):
        lost.append("the trainer runs an order of its own, not the plan's")
    planned = {name for name in schedule.mode_names if name != best.mode}
    planned |= {OFFLOAD for device in schedule.devices if len(device.offload) and best.mode != OFFLOAD}
    if planned:
        lost.append(f"every activation is {best.mode}: the plan's {', '.join(sorted(planned))} of some is lost")
    return lost


def _report_memory_without_offload(schedule: Schedule) -> Sequence[dict[str, int | None]]:
    """Print on stderr, and return, each device's worst-case peak without offload and its budget, in bytes."""
    from optpipe.export.torch_csv import peak_bytes_without_offload

    needs = peak_bytes_without_offload(schedule)
    budgets = [device.memory_bytes for device in schedule.problem.devices]
    for d, (need, budget) in enumerate(zip(needs, budgets, strict=True)):
        limit = "no limit" if budget is None else f"{budget:,} bytes"
        over = f", {need - budget:,} too few" if budget is not None and need > budget else ""
        stderr().print(f"device {d} needs {need:,} bytes without offload (budget: {limit}{over})")
    return [{"peak_bytes_any_timing": n, "memory_bytes": b} for n, b in zip(needs, budgets, strict=True)]
