"""`optpipe plan`: chooses how to cut, place and batch a model, and writes the schedule of the best layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import (
    AsJson,
    compile_once,
    ctrl_c_cancels,
    doing_long,
    names_in,
    parse_share,
    parse_size,
    print_json,
    stdout,
    table,
)
from optpipe.cli.plan_cluster import DEFAULT_SEQUENCE, Question, plan_model
from optpipe.cli.plan_layouts import SHOWN, layout_document, print_layouts, progress_printer
from optpipe.cli.plan_why import AskedLayout
from optpipe.cli.solve import TimeLimit
from optpipe.errors import InputError, Issue, NoSolutionError, shown
from optpipe.files import check_writable, write_atomically
from optpipe.mode_names import OFFLOAD, WITH_OFFLOAD, parse_modes
from optpipe.placement import DEFAULT_PLACEMENTS, parse_placement
from optpipe.units import share_text, times_text

if TYPE_CHECKING:
    from optpipe.layers import LayerProfile
    from optpipe.problem import Objective
    from optpipe.schedule import Schedule
    from optpipe.sequences import Lengths, SliceBy
    from solver.layout.candidates import Search
    from solver.layout.imbalance import InOrder

MOST_ORDER = 64
"""Most microbatches whose order is printed; the schedule has all."""

DEFAULT_MACHINE = "h100"
"""GPUs of a cluster plan that names none."""

MAX_DIGITS = 7
"""Digits of the largest global batch."""


class SliceChoice(StrEnum):
    """The quantity that slices of one sequence share equally."""

    COMPUTE = "compute"
    LENGTH = "length"


class Tried(StrEnum):
    """Values tried of a choice: only with it, only without, or both."""

    BOTH = "both"
    YES = "yes"
    NO = "no"


CLUSTER = "A model on a cluster"

Allowed = Annotated[
    str | None,
    typer.Option(help="Allowed values; default: all.", metavar="A,B", rich_help_panel=CLUSTER),
]
"""An option that fixes a part of the strategy."""


def _refuse(given: Mapping[str, object], why: str) -> None:
    """Raise InputError for the first option that is given and has no meaning."""
    for option, value in given.items():
        if value is not None:
            raise InputError([Issue(option, "meaningless", f"has no meaning {why}")])


def command(
    layers: Annotated[
        str,
        typer.Argument(
            help="A layer profile (optpipe.layers/1), with --devices; or a model, with --gpus: a name of `optpipe "
            "models`, a config.json or the folder of one.",
            metavar="LAYERS.json|MODEL",
        ),
    ],
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Devices of the pipeline, without the tensor-parallel ones and replicas that the profile's parallel "
            "has.",
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**6,
            help="Sequences in one training step of the whole job, shared by the replicas that the profile's parallel "
            "has; needed without --lengths.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Output file for the best schedule; the folder of a plan with --gpus."),
    ] = None,
    microbatch_sizes: Annotated[
        str | None, typer.Option(help="Microbatch sizes to try, in sequences; default: 1, 2, 4, ...", metavar="1,2,4")
    ] = None,
    placements: Annotated[
        str | None,
        typer.Option(
            help=f"Placements to try: linear, interleaved-N, v, v-N; default: {', '.join(DEFAULT_PLACEMENTS)}.",
            metavar="a,b",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="A cut that you have, as Megatron-LM writes it, such as Et|(tt|)*30L: it is costed, solved and "
            "compared with the best.",
            metavar="STRING",
        ),
    ] = None,
    offload: Annotated[Tried, typer.Option(help="Try layouts with offload, without, or both.")] = (Tried.BOTH),
    modes: Annotated[
        str | None,
        typer.Option(
            help="Activation modes that recompute, for every layout, by commas: full (a stage from its input), "
            "selective (each layer from its own), selective-2 (the first two), blocks (selective with each number), "
            "selective-groups-2 (two layers at a time), groups (each useful size), "
            "and +offload behind these. Default: none.",
            metavar="a,b",
        ),
    ] = None,
    slices: Annotated[
        str | None,
        typer.Option(
            help="Numbers of slices to try, into which each sequence is cut; default: 1. Needs a profile that says "
            "what attention costs: one of a table, or measured with --slices.",
            metavar="1,2,4",
        ),
    ] = None,
    slice_by: Annotated[
        SliceChoice | None,
        typer.Option(help="Slices of a sequence have equal compute or equal length; default: compute."),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="The microbatches of one step, instead of --global-batch: a JSON list or a line for each, with the "
            "tokens of its sequence, or of each document packed into it. Their order is chosen too.",
            metavar="FILE",
        ),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Memory of a device, parameters included; default: the profile's.",
        ),
    ] = None,
    memory_margin: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            metavar="10%",
            help="Share of the device memory to keep free, for sizes that depend on the data; default: 0%.",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="makespan or device_span, default: makespan; with --gpus time, or memory: the least on the fullest "
            "rank, default: time."
        ),
    ] = None,
    time_limit: TimeLimit = 60.0,
    workers: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads; default: all cores.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="GPUs of the whole job.", rich_help_panel=CLUSTER)
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help=f"A name of `optpipe machines`, or a file; default: {DEFAULT_MACHINE}.", rich_help_panel=CLUSTER
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**24,
            help=f"Tokens; default: {DEFAULT_SEQUENCE}, or fewer where the model learns fewer positions.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    tp: Allowed = None,
    cp: Allowed = None,
    ep: Allowed = None,
    etp: Allowed = None,
    pp: Allowed = None,
    vpp: Allowed = None,
    dp: Allowed = None,
    microbatch_size: Allowed = None,
    precision: Allowed = None,
    sharding: Allowed = None,
    recompute: Allowed = None,
    schedule: Allowed = None,
    overlap: Annotated[
        Tried,
        typer.Option(
            help="Try strategies whose exchanges of experts hide in blocks of a forward and a backward, others, or "
            "both.",
            rich_help_panel=CLUSTER,
        ),
    ] = Tried.BOTH,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            help="Allowed places of the output layer: last (the last stage, with layers), own (a stage of its own), "
            "spread (its rows on all devices of the pipeline, which no trainer but `optpipe train` runs); default: "
            "last,own.",
            metavar="A,B",
        ),
    ] = None,
    expert_imbalance: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=1000,
            help="Tokens of the busiest rank's experts over the mean; default: 1.",
            metavar="1.25",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    software: Annotated[
        str | None, typer.Option(help="Trainer whose kernels are assumed; default: any.", rich_help_panel=CLUSTER)
    ] = None,
    why: Annotated[
        str | None,
        typer.Option(
            help="Say what the best alternative with these choices loses, and to what: a strategy (tp=8,pp=2), or with "
            "--devices a layout (placement=v,cut=5,3; also microbatch_size, offload, slices).",
            metavar="A=B,C=D",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw the plan: time by kind of each strategy, memory of ranks, bubble (png, svg, html).",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Choose how to cut, place and batch a model: every layout is rated, the promising ones are solved.

    With --devices the costs are a profile's: the table shows the best layout and what the others lose, and the
    schedule of the best is ready for `optpipe train`. With --gpus they are computed from a model's name and a
    machine's: every legal strategy has a schedule, is beaten by its bound, or does not fit. Options such as --tp fix
    what may be chosen.
    """
    fixed = {
        "tp": tp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "pp": pp,
        "vpp": vpp,
        "dp": dp,
        "microbatch_size": microbatch_size,
        "precision": precision,
        "sharding": sharding,
        "recompute": recompute,
        "schedule": schedule,
        "overlap": None if overlap is Tried.BOTH else overlap.value,
    }
    if gpus is not None:
        of_layers = {
            "--devices": devices,
            "--microbatch-sizes": microbatch_sizes,
            "--placements": placements,
            "--layout": layout,
            "--modes": modes,
            "--slices": slices,
            "--slice-by": slice_by,
            "--lengths": lengths,
            "--memory": memory,
        }
        _refuse(of_layers, "with --gpus: the model's layers are costed by formula. Maybe leave it out.")
        fixed |= {"offload": None if offload is Tried.BOTH else offload.value, "vocabulary": vocabulary}
        if global_batch is None:
            raise InputError([Issue("--global-batch", "missing", "is missing. Maybe --global-batch 512.")])
        question = Question(
            layers,
            gpus,
            machine or DEFAULT_MACHINE,
            sequence,
            global_batch,
            software or "",
            fixed,
            expert_imbalance,
            memory_margin or 0.0,
            objective,
            why,
            plot,
        )
        return plan_model(question, time_limit, workers, output, as_json)
    of_cluster: dict[str, object] = {f"--{name.replace('_', '-')}": value for name, value in fixed.items()}
    of_cluster |= {"--plot": plot, "--expert-imbalance": expert_imbalance, "--machine": machine}
    of_cluster |= {"--sequence": sequence, "--software": software}
    _refuse(of_cluster, "without --gpus: a profile has costs under one strategy. Maybe add --gpus, or leave it out.")
    if devices is None:
        detail = "is missing. Maybe --devices 4 for a layer profile, or --gpus 64 for a model."
        raise InputError([Issue("--devices", "missing", detail)])
    from optpipe.cluster.model import model_name
    from optpipe.export.megatron_layout import partition_of_layout
    from optpipe.layers import LayerProfile
    from optpipe.sequences import load_lengths
    from solver.layout.candidates import candidates
    from solver.layout.given import ASKED, GIVEN, given_candidates
    from solver.layout.ranking import rank
    from solver.limits import Limits, available_cores

    if output:
        check_writable(output, Path(layers))
    if not Path(layers).exists() and model_name(layers) is not None:
        detail = f"is of a layer profile, but {layers} is the name of a model. Maybe --gpus {devices} in its place."
        raise InputError([Issue("--devices", "of_layers", detail)])
    profile = LayerProfile.load(Path(layers))
    given_cut = None if layout is None else partition_of_layout(layout, profile, devices, "--layout")
    if memory is not None:
        profile = profile.model_copy(update={"memory_bytes": memory})
    if memory_margin is not None:
        if profile.memory_bytes is None:
            detail = (
                "has no meaning here: neither --memory nor the profile gives a device's memory. Maybe give --memory."
            )
            raise InputError([Issue("--memory-margin", "meaningless", detail)])
        profile = profile.model_copy(update={"memory_bytes": int(profile.memory_bytes * (1 - memory_margin))})
    given = None if lengths is None else load_lengths(lengths)
    if given is not None:
        meaningless: dict[str, object] = {
            "--global-batch": global_batch,
            "--microbatch-sizes": microbatch_sizes,
            "--slices": slices,
        }
        _refuse(meaningless, "here: --lengths gives the microbatches, which stay whole. Maybe leave it out.")
        global_batch, microbatch_sizes = len(given) * profile.microbatch_size, str(profile.microbatch_size)
    elif global_batch is None:
        detail = "is missing. Maybe --global-batch 64, or --lengths with a file."
        raise InputError([Issue("--global-batch", "missing", detail)])
    else:
        global_batch = _share_of_replica(global_batch, profile)
    if layout is not None and slices is not None:
        detail = "has no meaning here: --layout is run by Megatron-LM, with whole sequences. Maybe leave it out."
        raise InputError([Issue("--slices", "meaningless", detail)])
    if slices is None and slice_by is not None:
        detail = "has no meaning here: --slices is not given. Maybe --slices 1,2,4."
        raise InputError([Issue("--slice-by", "meaningless", detail)])
    search = _search(
        profile, devices, global_batch, microbatch_sizes, placements, offload, objective or "makespan", modes
    )
    search = _of_unequal(profile, search, slices, slice_by, given)
    if vocabulary is not None:
        search = replace(search, vocabulary=_places(profile, vocabulary))
    search = replace(search, documents=(search.documents or global_batch) * profile.parallel.data)
    named = {} if given_cut is None else {given_cut: GIVEN}
    asked = None
    if why is not None:
        asked = AskedLayout.read(why, profile, search, ["even", "searched", *named.values()])
        named = dict.fromkeys(asked.layouts(search), ASKED) | named
    compile_once()
    limits = Limits(time_limit, workers=workers or available_cores())
    layouts = candidates(profile, search, limits)
    if named:
        searched = (one for one in layouts if one.layout not in named)
        known = (given_candidates(profile, search, layout, cut) for layout, cut in named.items())
        layouts = chain(*known, searched)
    what = f"judging layouts of {profile.name or Path(layers).name} for up to {time_limit:g} s"
    with doing_long(what), ctrl_c_cancels(limits.cancel):
        judged = rank(layouts, limits, progress_printer(limits))
    best = judged[0].schedule
    if best is None:
        if limits.cancel.requested:
            raise KeyboardInterrupt
        reasons = list(dict.fromkeys(f"{one.candidate.name}: {one.why_not}" for one in judged))
        raise NoSolutionError("no layout has a schedule:\n" + "\n".join(reasons[:SHOWN]))
    if output:
        from optpipe.schedule import schedule_text

        write_atomically(output, schedule_text(best))
    imbalance = None if given is None else _Imbalance.of(profile, best, given)
    if as_json:
        document: dict[str, Any] = {"layouts": [layout_document(one) for one in judged]}
        document |= {"gpus": _gpus(profile, devices), "global_batch": global_batch * profile.parallel.data}
        document |= {"output": str(output) if output else None}
        print_json(document | ({"lengths": imbalance.document()} if imbalance else {}))
    elif asked is not None:
        asked.print(judged)
    else:
        print_layouts(judged, output)
        _print_job(profile, devices, global_batch)
        if imbalance:
            imbalance.print()
    return 130 if limits.cancel.requested else 0


def _search(
    profile: LayerProfile,
    devices: int,
    global_batch: int,
    sizes: str | None,
    placements: str | None,
    offload: Tried,
    objective: str,
    modes: str | None,
) -> Search:
    """Build the search space from the options. Raises InputError with every issue found."""
    from optpipe.partition import check_layer_modes
    from solver.layout.candidates import Search

    issues: list[Issue] = []
    if objective not in ("makespan", "device_span"):
        issues.append(Issue("--objective", "unknown", f"is {objective!r} but must be makespan or device_span."))
    names = list(DEFAULT_PLACEMENTS) if placements is None else list(dict.fromkeys(names_in(placements)))
    for name in names:
        try:
            parse_placement(name)
        except ValueError as error:
            issues.append(Issue("--placements", "unknown", f"is wrong: {error}"))
    microbatch_sizes = _microbatch_sizes(sizes, devices, global_batch, profile.parallel.data, issues)
    if offload is Tried.YES and not (profile.copies and any(layer.offload_bytes for layer in profile.layers)):
        detail = "is yes, but the profile lacks offload_bytes of its layers or the rate of copies. Maybe add them."
        issues.append(Issue("--offload", "impossible", detail))
    recomputing = [] if modes is None else parse_modes(modes, "--modes")
    if OFFLOAD in recomputing:
        detail = "has 'offload', which --offload decides here. Maybe leave it out of the modes."
        issues.append(Issue("--modes", "unknown_mode", detail))
    leaving = [name for name in recomputing if name.endswith(WITH_OFFLOAD)]
    if leaving and offload is Tried.NO:
        detail = f"has {leaving[0]!r}, but --offload is no. Maybe leave one of them out."
        issues.append(Issue("--modes", "conflict", detail))
    if issues:
        raise InputError(issues)
    check_layer_modes(profile, recomputing, "--modes")
    choices = {Tried.BOTH: (False, True), Tried.YES: (True,), Tried.NO: (False,)}[offload]
    aim: Objective = "makespan" if objective == "makespan" else "device_span"
    return Search(devices, global_batch, microbatch_sizes, names, choices, aim, recomputing)


def _places(profile: LayerProfile, text: str) -> list[str]:
    """Places of the last layer from the option. Raises InputError."""
    from solver.layout.strategies import check_values

    places = names_in(text)
    check_values("vocabulary", places, "--vocabulary")
    if profile.spread is not None:
        detail = "has no meaning here: the profile has its head on all devices. Maybe leave it out."
        raise InputError([Issue("--vocabulary", "meaningless", detail)])
    return places


def _of_unequal(
    profile: LayerProfile, search: Search, slices: str | None, slice_by: SliceChoice | None, lengths: Lengths | None
) -> Search:
    """Add slices, or microbatches of unequal lengths, to the search space. Raises InputError."""
    from optpipe.sequences import microbatch_factors, require_attention

    if lengths is not None:
        require_attention(profile, "--lengths")
        factors = microbatch_factors(profile, lengths)
        return replace(search, factors=factors, documents=sum(map(len, lengths)))
    if slices is None:
        return search
    counts = []
    for part in names_in(slices):
        count = int(part) if part.isdecimal() and len(part) <= MAX_DIGITS else 0
        sequence = profile.sequence or 10**MAX_DIGITS
        if not 1 <= count <= sequence:
            detail = (
                f"holds {shown(part)}, but a sequence of {sequence:,} tokens has from 1 to as many slices. Maybe 1,2,4."
            )
            raise InputError([Issue("--slices", "out_of_range", detail)])
        counts.append(count)
    if max(counts) > 1:
        require_attention(profile, "--slices")
    by: SliceBy = "length" if slice_by is SliceChoice.LENGTH else "compute"
    return replace(search, slices=list(dict.fromkeys(counts)), slice_by=by)


@dataclass(frozen=True)
class _Imbalance:
    """The cost of unequal lengths: the plan, and published schedules of each order and of equal microbatches."""

    schedule: Schedule
    orders: Sequence[InOrder]
    equal: Sequence[InOrder]

    @classmethod
    def of(cls, profile: LayerProfile, schedule: Schedule, lengths: Lengths) -> _Imbalance:
        """Time the published schedules of the best layout."""
        from optpipe.sequences import evened, microbatch_factors
        from solver.layout.imbalance import best_published, published_in_orders, without_imbalance

        problem = schedule.problem
        count = range(problem.microbatches)
        equal = {
            "equal, the same work": None,
            "equal lengths, the same tokens": microbatch_factors(profile, evened(lengths)),
        }
        found = [best_published(without_imbalance(problem, own), name, count) for name, own in equal.items()]
        return cls(schedule, published_in_orders(problem), [one for one in found if one])

    def document(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        schedule = self.schedule
        return {
            "microbatch_factors": schedule.problem.to_data()["microbatch_factors"],
            "microbatch_order": schedule.microbatch_order,
            "published": [asdict(one) for one in self.orders],
            "equal": [asdict(one) for one in self.equal],
        }

    def print(self) -> None:
        """Print the table of orders and the order of the plan."""
        schedule, console = self.schedule, stdout()
        rows = table("order of the microbatches", "schedule", "step", "bubble", left=(0, 1))
        published = [*sorted(self.orders, key=lambda one: (one.name != "given", one.value_us)), *self.equal]
        steps = times_text([*(one.value_us for one in published), schedule.value_us])
        for one, step in zip(published, steps, strict=False):
            rows.add_row(one.name, one.method, step, share_text(one.bubble))
        bubble = share_text(schedule.bubble_with_recomputation)
        rows.add_row("this plan", schedule.method, steps[-1], bubble)
        console.print()
        console.print(rows)
        order = schedule.microbatch_order or range(schedule.problem.microbatches)
        text = " ".join(map(str, order[:MOST_ORDER]))
        console.print(f"microbatches in the order {text}{' ...' if len(order) > MOST_ORDER else ''}")


def _share_of_replica(global_batch: int, profile: LayerProfile) -> int:
    """Sequences of a step for each of the profile's replicas. Raises InputError where they do not divide it."""
    share, rest = divmod(global_batch, profile.parallel.data)
    if rest:
        nearest = (share + 1) * profile.parallel.data
        detail = (
            f"is {global_batch}, which the profile's {profile.parallel.data} replicas (parallel.data) do not divide. "
            f"Maybe {nearest}."
        )
        raise InputError([Issue("--global-batch", "no_multiple", detail)])
    return share


def _gpus(profile: LayerProfile, devices: int) -> int:
    """GPUs of the whole job."""
    return devices * profile.parallel.tensor * profile.parallel.data


def _print_job(profile: LayerProfile, devices: int, share: int) -> None:
    """Print how GPUs and sequences are divided, where the profile is of more than a pipeline."""
    parallel = profile.parallel
    if parallel.tensor * parallel.data > 1:
        stdout().print(
            f"the job: {devices} devices of the pipeline x {parallel.tensor} (parallel.tensor) x {parallel.data} "
            f"(parallel.data) = {_gpus(profile, devices):,} GPUs; a replica runs {share:,} of "
            f"{share * parallel.data:,} sequences a step"
        )


def _microbatch_sizes(
    text: str | None, devices: int, global_batch: int, replicas: int, issues: list[Issue]
) -> list[int]:
    """Parse the sizes, or default to powers of two that leave a microbatch per device; all divide a replica's share."""
    if text is None:
        powers = [2**k for k in range(20) if global_batch % 2**k == 0 and 2**k * devices <= global_batch]
        return powers or [1]
    sizes = []
    for part in names_in(text):
        size = int(part) if part.isdecimal() and len(part) <= MAX_DIGITS else 0
        if size < 1 or global_batch % size:
            share = f" over parallel.data {replicas}, {global_batch}" if replicas > 1 else ""
            whole = f"--global-batch {global_batch * replicas}{share}"
            detail = f"holds {shown(part)}, which does not divide {whole}. Maybe 1."
            issues.append(Issue("--microbatch-sizes", "no_divisor", detail))
        sizes.append(size)
    return list(dict.fromkeys(sizes))
