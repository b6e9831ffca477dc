"""`optpipe fits`: memory of each rank of a training job before it is launched, and what would make it fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import AsJson, doing_long, print_json, stdout, table
from optpipe.cli.strategy_options import (
    Degree,
    Degrees,
    ExpertImbalance,
    GlobalBatch,
    Gpus,
    MachineName,
    ModelName,
    PrecisionChoice,
    RecomputeChoice,
    Sequence,
    ShardingChoice,
    SoftwareName,
)
from optpipe.errors import InputError, Issue, MethodError
from optpipe.units import budget_text, bytes_text, change_text, share_text, time_text

if TYPE_CHECKING:
    from solver.layout.fitting import Rank

GIB = 2**30
KINDS = ("weights", "gradients", "optimizer", "activations", "fragments", "context")


def command(
    model: ModelName,
    gpus: Gpus,
    machine: MachineName,
    sequence: Sequence,
    global_batch: GlobalBatch,
    tp: Degree = 1,
    cp: Degree = 1,
    ep: Degree = 1,
    etp: Degree = 1,
    pp: Degree = 1,
    vpp: Degree = 1,
    dp: Annotated[int | None, typer.Option(min=1, max=2**20, help="Replicas; default: what the GPUs leave.")] = None,
    microbatch_size: Annotated[int, typer.Option(min=1, max=10**6, help="Sequences in a microbatch.")] = 1,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="A published schedule (`optpipe methods`), or a file with one; default: 1f1b, or interleaved-1f1b "
            "where a device has several stages, or vocab-2 where all have rows of the output layer.",
            metavar="NAME|FILE",
        ),
    ] = None,
    precision: Annotated[PrecisionChoice, typer.Option(help="Operands of products.")] = PrecisionChoice.BF16,
    sharding: Annotated[ShardingChoice, typer.Option(help="States that replicas divide.")] = ShardingChoice.OPTIMIZER,
    recompute: Annotated[RecomputeChoice, typer.Option(help="What B computes again.")] = RecomputeChoice.NONE,
    vocabulary: Annotated[
        str,
        typer.Option(
            help="Place of the output layer: last (the last stage, with layers), own (a stage of its own), spread (its "
            "rows on all devices of the pipeline, which no trainer but `optpipe train` runs).",
            metavar="NAME",
        ),
    ] = "last",
    expert_imbalance: ExpertImbalance = None,
    software: SoftwareName = "",
    as_json: AsJson = False,
) -> int:
    """Predict the memory of every rank of a job by kind, and say if it fits. Exit code 1 if it does not.

    Ranks of one stage are alike, so there is a row for each device of the pipeline. What does not fit is answered with
    the one change that costs least time.
    """
    from optpipe.cluster.layers import strategy_cut
    from optpipe.cluster.machine import Machine
    from optpipe.cluster.model import load_model
    from optpipe.cluster.software import require_software
    from optpipe.schedule import Schedule
    from solver.layout.asked import as_asked, cheapest_change, longer_pipeline
    from solver.layout.fitting import Job, ranks_of
    from solver.layout.strategies import check_values

    check_values("vocabulary", [vocabulary], "--vocabulary")
    plain = Degrees(gpus, tp, cp, ep, etp, pp, vpp, dp).strategy(
        microbatch_size=microbatch_size,
        precision=precision.value,
        sharding=sharding.value,
        recompute=recompute.value,
        vocabulary=vocabulary,
        expert_imbalance=1.0 if expert_imbalance is None else expert_imbalance,
    )
    is_file = schedule is not None and (Path(schedule).exists() or Path(schedule).suffix == ".json")
    asked = Schedule.load(Path(schedule)) if schedule and is_file else schedule
    known = Machine.load(machine)
    trainer = require_software(software, known.measured_software, "--software")
    job = Job(load_model(model), known, sequence, global_batch, trainer, software)
    job.require_rates([plain.precision])
    strategy = as_asked(job, plain, asked, gpus)
    with doing_long(f"timing {strategy.schedule} of {job.model.name}"):
        try:
            ranks = ranks_of(job, strategy, strategy.schedule if asked is None else asked)
        except MethodError as error:  # its exit code is that of a job that does not fit
            raise InputError([Issue("schedule", "cannot_run", f"cannot run: {error}")]) from None
    capacity = known.facts.memory_bytes
    fits = all(rank.total <= capacity for rank in ranks)
    change = None if fits else cheapest_change(job, plain, asked, fixed_data=dp is not None)
    if as_json:
        document: dict[str, Any] = {
            "fits": fits,
            "memory_bytes": capacity,
            "ranks": [_entry(rank, capacity) for rank in ranks],
            "change": None,
            "cut": strategy_cut(job.model, strategy),
            "seconds": job.seconds(strategy),
            "error": job.error(strategy),
            "assumptions": list(job.model.assumptions),
        }
        if change:
            document["change"] = {"option": change[0], "slower": job.seconds(change[1]) / job.seconds(strategy) - 1}
        print_json(document)
        return 0 if fits else 1
    console = stdout()
    rows = table("pp rank", *KINDS, "total GiB", "left", "at the peak")
    for rank in ranks:
        sizes = [f"{getattr(rank, kind) / GIB:.2f}" for kind in KINDS]
        left = (capacity - rank.total) / GIB
        rows.add_row(str(rank.device), *sizes, f"{rank.total / GIB:.2f}", f"{left:.2f}", rank.op_at_peak)
    console.print(rows)
    if isinstance(asked, Schedule) and strategy.pipeline > 1:
        cut = ",".join(map(str, strategy_cut(job.model, strategy)))
        says = f"{schedule} says it" if strategy.stage_layers else f"as even as can be: {schedule} does not say it"
        console.print(f"cut {cut}, {says}")
    for sentence in job.model.assumptions:
        console.print(sentence)
    fullest = max(ranks, key=lambda rank: rank.total)
    if fits:
        console.print(
            f"fits: {budget_text(fullest.total, capacity)}, on the fullest rank; predicted step "
            f"{time_text(1e6 * job.seconds(strategy))} ({_error_text(job.error(strategy))})"
        )
        return 0
    console.print(f"DOES NOT FIT: {bytes_text(fullest.total - capacity)} too much on pp rank {fullest.device}")
    if change:
        slower = change_text(job.seconds(change[1]), job.seconds(strategy))
        console.print(f"the cheapest change that fits: {change[0]} ({slower} time)")
    else:
        longer = longer_pipeline(job, plain, asked, fixed_data=dp is not None)
        console.print(f"no single change of it fits. Maybe {f'{longer[0]}, or ' if longer else ''}more GPUs.")
    return 1


def _error_text(error: float | None) -> str:
    if error is None:
        return "a guess: nothing was measured on this machine"
    return f"half of the published steps are within {share_text(error)}"


def _entry(rank: Rank, capacity: int) -> dict[str, Any]:
    kinds = {f"{kind}_bytes": round(getattr(rank, kind)) for kind in KINDS}
    return {
        "device": rank.device,
        **kinds,
        "total_bytes": round(rank.total),
        "left_bytes": round(capacity - rank.total),
        "op_at_peak": rank.op_at_peak,
    }
