"""Measurement of a model, and its documents: a Problem or a layer profile."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from math import floor
from statistics import mean
from typing import Any, Self

import torch

from optpipe.errors import InputError, Issue
from optpipe.layers import LayerProfile
from optpipe.mode_names import (
    IN_LOW_PRECISION,
    OFFLOAD,
    SELECTIVE,
    WITH_OFFLOAD,
    is_shorthand,
    without_offload,
    without_shorthand,
)
from optpipe.problem import Problem
from optpipe.profile.ops import (
    BLOCK,
    ClockName,
    OnRound,
    Spread,
    kinds_of_mode,
    measure_op_sizes,
    measure_op_times,
    measure_slice_times,
    stopwatch_for,
)
from optpipe.profile.slices import LengthCosts, Slicing, fit_length_costs, passes_us, relative_to_mean
from optpipe.profile.subject import Chain, Subject
from optpipe.profile.transfers import Contention, Transfers, contention_of_all, measure_transfers
from optpipe.profile.undeferred import Undeferred, measure_undeferred
from optpipe.runtime.messages import Spec, size_bytes
from optpipe.runtime.probe import StageSizes, measure_slices
from optpipe.runtime.recomputation import blocks_of
from optpipe.runtime.slices import sequence_length, takes_slices
from optpipe.runtime.stage import Stage
from optpipe.runtime.vocabulary import holds_other_layers
from optpipe.sequences import SliceBy, slice_lengths
from optpipe.stage import WITHOUT_BACKWARD
from optpipe.units import bytes_text

COPIES_OF_A_PARAMETER = 4
"""Weight, gradient, and the two moments of Adam, all in the parameter's precision."""

BYTES_OF_LOWER_PRECISION = 2 + 4 * 4
"""Bytes of state for an entry of a two-byte parameter: gradient, float32 copy and both moments have four."""


def without_margin(memory_bytes: int, margin: float) -> int:
    """Memory of a device minus the share `margin` that is kept free."""
    return int(memory_bytes * (1 - margin))


Gather = Callable[[Any], list[Any]]
"""All-gather of JSON values: given one value per process, returns those of all processes, in every process."""


@dataclass(frozen=True)
class StageFigures:
    """Measured stage: times of its ops by kind (F, B, W, BW, O, R), sizes of a microbatch, and bytes of parameters.

    Where recomputation was measured, there are also times of C, O and R in each mode (`kinds_of_mode`). `blocks`: how
    many blocks there are to recompute.

    A compiled stage has no B and W. `sizes` are the largest of `samples` microbatches, each figure by itself;
    `smallest` are the smallest, None if they are equal. `undeferred`: layers whose weight gradients stay in B.
    `frozen`: nothing in this stage and before it is trained. `other_layers`: it has the output layer, and matrices of
    other layers.
    """

    times: Mapping[str, Spread]
    sizes: StageSizes
    parameter_bytes: int
    smallest: StageSizes | None = None
    samples: int = 1
    undeferred: Sequence[Undeferred] = ()
    blocks: int = 0
    slicings: Sequence[Slicing] = ()
    frozen: bool = False
    other_layers: bool = False

    @property
    def splits(self) -> bool:
        """True if B and W can run separately."""
        return "B" in self.times

    @property
    def length_costs(self) -> dict[str, LengthCosts]:
        """Parts of the times of F, B and W that are not in proportion to the tokens, by the names that documents have.

        They are fitted to the times of all slicings.
        """
        return {
            name: fit_length_costs(
                time_us, [(one.lengths, [passes_us(times)[name] for times in one.times]) for one in self.slicings]
            )
            for name, time_us in passes_us(self.times).items()
        }

    @property
    def attention_us(self) -> float:
        """Time of causal attention in F, B and W of whole sequences."""
        return sum(costs.attention_us for costs in self.length_costs.values())

    def of_mean_slice(self) -> StageFigures:
        """Figures of a mean slice in place of a whole microbatch, where sequences were cut."""
        if not self.slicings:
            return self
        return replace(self, times=self.slicings[-1].mean_times(), sizes=self.slicings[-1].mean_sizes(), smallest=None)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`."""
        times = {kind: Spread(**spread) for kind, spread in data["times"].items()}
        smallest = StageSizes.from_data(data["smallest"]) if data["smallest"] else None
        undeferred = tuple(Undeferred(**one | {"layers": tuple(one["layers"])}) for one in data["undeferred"])
        read = {"times": times, "sizes": StageSizes.from_data(data["sizes"])}
        read["slicings"] = tuple(map(Slicing.from_data, data["slicings"]))
        return cls(**{**data, **read, "smallest": smallest, "undeferred": undeferred})


@dataclass(frozen=True)
class Measured:
    """Measured model. `message_bytes[b]` crosses the boundary between stages b and b + 1.

    `modes` are those that a problem is to allow (`parse_modes`), `splits`: B and W too, where a stage has them.
    `slice_transfers` are the transfers of each slice, if sequences were cut. `compared`: on how many
    microbatches the stages were found to compute what the uncut model does.
    """

    name: str
    microbatch_size: int
    placement: Sequence[int]
    stages: Sequence[StageFigures]
    message_bytes: Sequence[int]
    transfers: Transfers
    contention: Contention
    hardware: str
    clock: ClockName
    modes: Sequence[str] = (OFFLOAD,)
    splits: bool = True
    slice_transfers: Sequence[Transfers] = ()
    compared: int = 0

    @property
    def slice_lengths(self) -> Sequence[int]:
        """Tokens of each slice of a sequence; empty where sequences are whole."""
        return self.stages[0].slicings[-1].lengths if self.stages[0].slicings else ()

    @property
    def source(self) -> str:
        """Origin of the numbers, for documents."""
        compiled = [s for s, stage in enumerate(self.stages) if not stage.splits]
        times = f"medians of {min(stage.times['BW'].count for stage in self.stages)} rounds ({self.clock} clock)"
        parts = [f"measured on {self.hardware}", times, f"transfers: {self.transfers.transport}", self.contention.how]
        if self.compared:
            parts.append(f"the cut model computes what the uncut one does on {self.compared} microbatch(es)")
        if compiled:
            parts.append(f"stages {compiled} are compiled, so their backwards are whole: B has all of BW's time")
        if self.varying:
            parts.append(f"sizes of stages {self.varying} depend on the data: the largest of several microbatches")
        if self.slice_lengths:
            cuts = [one.lengths for one in self.stages[0].slicings]
            of_cuts = " and ".join(f"{len(lengths)} ({' '.join(map(str, lengths))})" for lengths in cuts)
            parts.append(f"with sequences of {sum(self.slice_lengths)} tokens in slices: {of_cuts}")
        return "; ".join(parts)[:2000]

    @property
    def varying(self) -> Sequence[int]:
        """Stages whose sizes differed between microbatches."""
        return [s for s, stage in enumerate(self.stages) if stage.smallest is not None]

    @property
    def copy_to_compute_ratio(self) -> float:
        """k of PipeOffload (section 3): offload and reload over F, B and W, over all stages."""
        compute = sum(
            f.times[kind].median_us for f in self.stages for kind in (("F", "B", "W") if f.splits else ("F", "BW"))
        )
        copies = sum(f.times[kind].median_us for f in self.stages for kind in "OR")
        return copies / compute if compute else 0.0

    @property
    def fused_over_split(self) -> float | None:
        """Ratio of BW to B + W over the stages that have both; None if none has."""
        both = [f.times for f in self.stages if f.splits]
        split = sum(times[kind].median_us for times in both for kind in "BW")
        return sum(times["BW"].median_us for times in both) / split if split else None

    def problem(self, microbatches: int, memory_bytes: int | None = None, margin: float = 0.0) -> Problem:
        """Build the scheduling problem. `memory_bytes` is the memory of a device for the model; None: no limit.

        Where sequences were cut, it is one of slices, with the costs of a mean slice and factors. `margin` is the share
        of the memory to keep free, for sizes that depend on the data. Raises InputError if the parameters alone exceed
        the rest.
        """
        stages = [
            {"device": d} | _stage(f, self.modes) | ({} if self.splits and f.splits else {"split_backward": False})
            for d, f in zip(self.placement, map(StageFigures.of_mean_slice, self.stages), strict=True)
        ]
        data = {
            "format": "optpipe.problem/1",
            "name": self.name[:200],
            "microbatches": microbatches,
            "transfer_us": [_us(spread) if spread else 0 for spread in self.transfers.spreads] or 0,
            "devices": [{"memory_bytes": budget} for budget in self._budgets_bytes(memory_bytes, margin)],
            "stages": stages,
            "copy_channels": self.contention.channels.to_data(),
            "source": self.source,
        }
        if overlaps := _overlaps(self.stages, stages):
            data["overlaps"] = overlaps
        if self.slice_lengths:
            of_slices = [
                [spread.median_us if spread else 0.0 for spread in one.spreads] for one in self.slice_transfers
            ]
            data["transfer_us"] = [round(mean(times_us), 1) for times_us in zip(*of_slices, strict=True)] or 0
            transfer = relative_to_mean([sum(times_us) for times_us in of_slices])
            for stage, f in zip(stages, self.stages, strict=True):
                factors = f.slicings[-1].factors() | {"transfer": transfer}
                stage["slice_factors"] = {name: values for name, values in factors.items() if set(values) != {1.0}}
                stage["slice_gradient_bytes"] = f.slicings[-1].gradient_bytes
            # The runtime cuts sequences by these sizes, whatever stages have beside.
            sizes = stages[0]["slice_factors"].get("bytes")
            data["slices"] = {"count": len(self.slice_lengths), "factors": {"bytes": sizes}}
        return Problem.from_data(data)

    def layers(
        self,
        memory_bytes: int | None = None,
        margin: float = 0.0,
        each: Sequence[tuple[str, int]] | None = None,
    ) -> LayerProfile:
        """Build the layer profile, with each stage as a layer.

        `each` names all layers, each with the stage that was measured for it, where one stands for several.
        """
        if each is None:
            each = [(f"layer {s}", s) for s in range(len(self.stages))]
        copies = None
        moved_bytes = sum(f.sizes.offload_bytes for f in self.stages)
        offload_us, reload_us = (sum(f.times[kind].median_us for f in self.stages) for kind in "OR")
        if moved_bytes and offload_us and reload_us:
            copies = {
                "offload_bytes_per_us": moved_bytes / offload_us,
                "reload_bytes_per_us": moved_bytes / reload_us,
                "channels": self.contention.channels.to_data(),
            }
        return LayerProfile.from_data(
            {
                "format": "optpipe.layers/1",
                "name": self.name[:200],
                "microbatch_size": self.microbatch_size,
                "layers": layer_entries(each, dict(enumerate(self.stages)), self.message_bytes),
                "memory_bytes": None if memory_bytes is None else without_margin(memory_bytes, margin),
                "link": {"latency_us": 0, "bytes_per_us": self.transfers.bytes_per_us(self.message_bytes)},
                "copies": copies,
                "source": self.source,
                "sequence": sum(self.slice_lengths) or None,
                "output_layer_alone": not self.stages[each[-1][1]].other_layers,
            }
        )

    def _budgets_bytes(self, memory_bytes: int | None, margin: float) -> list[int | None]:
        budgets: list[int | None] = []
        left_bytes = None if memory_bytes is None else without_margin(memory_bytes, margin)
        for device in range(max(self.placement) + 1):
            held = sum(f.parameter_bytes for d, f in zip(self.placement, self.stages, strict=True) if d == device)
            if memory_bytes is not None and left_bytes is not None and held > left_bytes:
                free = f" of which a margin of {margin:.0%} is kept free," if margin else ""
                detail = (
                    f"is {bytes_text(memory_bytes)},{free} but parameters, gradients and Adam's moments alone take "
                    f"{bytes_text(held)} on device {device}, {bytes_text(held - left_bytes)} too few. Maybe spread the "
                    "model over more devices."
                )
                raise InputError([Issue("--memory", "too_small", detail)])
            budgets.append(None if left_bytes is None else left_bytes - held)
        return budgets


def measure(
    subject: Subject,
    chain: Chain,
    placement: Sequence[int],
    device: torch.device,
    rounds: int,
    *,
    clock: ClockName = "wall",
    gather: Gather = lambda value: [value],
    on_round: OnRound = lambda _round, _rounds: None,
    modes: Sequence[str] = (OFFLOAD,),
    splits: bool = True,
    slices: Sequence[int] = (),
    slice_by: SliceBy = "length",
) -> Measured:
    """Measure the stages of `chain`. Collective under torchrun: all processes call it and get the same result.

    `modes` are those to be measured (`parse_modes`), on each stage that has them; recomputation cannot be measured on a
    GPU yet. With `splits` false the problem is to have fused backwards alone, and its segments are those of CBW.
    `slices`: numbers of slices of equal length in which each stage is measured as well; by compute, the last number
    also in slices that then take the same time in the whole model. Stages of `chain` cannot run any more after that.
    Raises InputError for a mode that no stage has, and for slices that a stage does not take.
    """
    blocks = {s: len(blocks_of(stage.module)) for s, stage in chain.stages.items()}
    recomputing = {
        s: dict.fromkeys(_modes_of(stage, blocks[s], modes), ("CB", "CBW") if splits and stage.splits else ("CBW",))
        for s, stage in chain.stages.items()
    }
    own_names = [[*names] for names in recomputing.values()]
    if unknown := _of_no_stage(modes, [names for process in gather(own_names) for names in process]):
        detail = f"has {unknown!r}, which no stage of {subject.name} has. Maybe other blocks or parts of them."
        raise InputError([Issue("--modes", "not_there", detail)])
    _check_slices(subject, chain, slices, gather)
    sizes = measure_op_sizes(chain, device, recomputing)
    lossy = [name for name in modes if name in IN_LOW_PRECISION]
    timed = {s: [*names, *lossy] for s, names in recomputing.items()}
    pairs = [] if slices else _pairs(chain, placement)
    times = measure_op_times(chain, device, rounds, stopwatch_for(device, clock), on_round, timed, pairs)
    held = held_bytes(chain, placement)
    own = {}
    for s, stage in chain.stages.items():
        received, gradient = chain.received(s, device), chain.gradient(s, device)
        undeferred = measure_undeferred(s, stage, received, chain.target(s), gradient, clock)
        smallest = None if sizes[s].smallest == sizes[s].largest else sizes[s].smallest
        layers = tuple(undeferred)
        frozen = s < chain.first_trained
        own[s] = StageFigures(
            times[s],
            sizes[s].largest,
            held[s],
            smallest,
            sizes[s].samples,
            layers,
            blocks[s],
            frozen=frozen,
            other_layers=holds_other_layers(stage.module),
        )
    cut = [chain]

    def add_slicing(lengths: Sequence[int]) -> None:
        nonlocal cut
        cut = chain.in_slices(lengths)
        times = measure_slice_times(cut, device, rounds, stopwatch_for(device, clock), on_round, timed)
        for s, stage in cut[0].stages.items():
            samples, around = [one.samples[s][0] for one in cut], [(one.before(s), one.after(s)) for one in cut]
            sizes = measure_slices(stage, samples, around, modes=recomputing[s])
            own[s] = replace(own[s], slicings=[*own[s].slicings, Slicing(tuple(lengths), times[s], sizes)])

    for count in slices:
        add_slicing(slice_lengths(sequence_length(chain.inputs), count))
    if slices and slice_by == "compute":
        parts = [(sum(passes_us(f.times).values()), f.attention_us) for f in own.values()]
        total_us, attention_us = map(sum, zip(*(part for process in gather(parts) for part in process), strict=True))
        share = attention_us / total_us if total_us else 0.0
        add_slicing(slice_lengths(sequence_length(chain.inputs), slices[-1], "compute", share))
    gathered = gather({str(s): asdict(figures) for s, figures in own.items()})
    figures = {int(s): StageFigures.from_data(data) for part in gathered for s, data in part.items()}
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    load = f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""
    return Measured(
        name=subject.name,
        microbatch_size=subject.microbatch_size,
        placement=placement,
        stages=[figures[s] for s in range(chain.count)],
        message_bytes=[size_bytes(spec) for spec in chain.messages],
        transfers=measure_transfers(placement, chain.messages, device, clock, gather),
        contention=contention_of_all(device, max(placement) + 1, gather),
        hardware=f"{kind}, torch {torch.__version__}, {torch.get_num_threads()} thread(s){load}",
        clock=clock,
        modes=modes,
        splits=splits,
        slice_transfers=_slice_transfers(cut, placement, device, clock, gather) if slices else (),
        compared=subject.compared,
    )


def _check_slices(subject: Subject, chain: Chain, slices: Sequence[int], gather: Gather) -> None:
    """Raise InputError, in every process, if a stage does not take slices, or if a sequence has not as many."""
    if not slices:
        return
    whole = {s: type(stage.module).__name__ for s, stage in chain.stages.items() if not takes_slices(stage.module)}
    for s, kind in sorted((s, kind) for process in gather([*whole.items()]) for s, kind in process):
        detail = (
            f"is given, but stages[{s}] of {subject.name} ({kind}) does not take slices. Maybe let its attention "
            "extend keys and values by 'slice_context' and set takes_slices = True."
        )
        raise InputError([Issue("--slices", "not_taken", detail)])
    sequence = sequence_length(chain.inputs)
    if max(slices) > sequence:
        detail = f"holds {max(slices)}, but a sequence of {subject.name} has {sequence} tokens. Maybe fewer slices."
        raise InputError([Issue("--slices", "out_of_range", detail)])


def _slice_transfers(
    cut: Sequence[Chain], placement: Sequence[int], device: torch.device, clock: ClockName, gather: Gather
) -> list[Transfers]:
    """Transfers of each slice; slices with the same messages are measured once."""
    known: list[tuple[list[Spec], Transfers]] = []
    transfers = []
    for chain in cut:
        found = next((one for messages, one in known if messages == chain.messages), None)
        if found is None:
            found = measure_transfers(placement, chain.messages, device, clock, gather)
            known.append((chain.messages, found))
        transfers.append(found)
    return transfers


def _pairs(chain: Chain, placement: Sequence[int]) -> list[tuple[int, int]]:
    """Stages of this process that may run a forward and a backward as a block: of one device, with parts."""
    able = [s for s, stage in chain.stages.items() if stage.parts and s >= chain.first_trained]
    return [(f, b) for f, b in product(able, repeat=2) if placement[f] == placement[b]]


def _overlaps(figures: Sequence[StageFigures], stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Blocks that were measured to be shorter than their two ops, for the field `overlaps` of a problem."""
    overlaps = []
    for b, one in enumerate(figures):
        backward_us = stages[b]["backward_input_us"] + stages[b]["backward_weight_us"]
        for kind, spread in one.times.items():
            if kind.startswith(BLOCK):
                f = int(kind.removeprefix(BLOCK))
                forward_us = stages[f]["forward_us"]
                us = max(_us(spread), forward_us, backward_us)
                if us < forward_us + backward_us:
                    overlaps.append({"forward_stage": f, "backward_stage": b, "us": us})
    return overlaps


def _modes_of(stage: Stage, blocks: int, modes: Sequence[str]) -> list[str]:
    """Names, without "+offload", of those modes that recompute which a stage has."""
    names = [without_offload(name) for name in without_shorthand(modes, blocks)]
    again = [name for name in dict.fromkeys(names) if name not in (OFFLOAD, *IN_LOW_PRECISION)]
    return [name for name in again if stage.has_mode(name)]


def _of_no_stage(modes: Sequence[str], of_stages: Sequence[Sequence[str]]) -> str | None:
    """The first of the modes asked for that none of the stages has; None also if there are no stages."""
    found = {name for names in of_stages for name in names}
    wanted = [name for name in modes if name not in (OFFLOAD, *IN_LOW_PRECISION) and not is_shorthand(name)]
    return next((name for name in wanted if of_stages and without_offload(name) not in found), None)


def held_bytes(chain: Chain, placement: Sequence[int]) -> dict[int, int]:
    """Bytes that each stage holds throughout; frozen parameters and buffers count once, trained ones with their copies.

    A tensor shared by stages of one device counts for the first of them.
    """
    held, seen = {}, set()
    for s, stage in chain.stages.items():
        tensors = [*stage.module.parameters(), *stage.module.buffers()]
        new = [tensor for tensor in tensors if (placement[s], id(tensor)) not in seen]
        seen |= {(placement[s], id(tensor)) for tensor in new}
        held[s] = sum(t.numel() * _bytes_of_entry(t) for t in new)
    return held


def _bytes_of_entry(tensor: torch.Tensor) -> int:
    if not tensor.requires_grad:
        return tensor.itemsize
    lower = tensor.is_floating_point() and tensor.itemsize == 2
    return BYTES_OF_LOWER_PRECISION if lower else tensor.itemsize * COPIES_OF_A_PARAMETER


def _us(spread: Spread) -> float:
    """Median in tenths of a microsecond, which is finer than the noise."""
    return round(spread.median_us, 1)


def _memory_bytes(figures: StageFigures) -> dict[str, Any]:
    sizes = figures.sizes
    return {
        "activation_bytes": sizes.activation_bytes,
        "backward_weight_bytes": sizes.backward_weight_bytes,
        "workspace_bytes": {"B": sizes.workspace_bytes["BW"]} | sizes.workspace_bytes,
    }


def _stage(figures: StageFigures, modes: Sequence[str]) -> dict[str, Any]:
    if figures.frozen:
        return passes_us(figures.times) | _memory_bytes(figures) | WITHOUT_BACKWARD
    offload = _copies(figures, ("O", "R"), figures.sizes.offload_bytes) if OFFLOAD in modes else None
    stage = passes_us(figures.times) | _memory_bytes(figures) | {"offload": offload}
    lossy = {name: kinds_of_mode(name)[1:] for name in modes if name in IN_LOW_PRECISION}
    entries: list[dict[str, Any]] = [
        {"name": name, "offload": copies}
        for name, kinds in lossy.items()
        if (copies := _copies(figures, kinds, figures.sizes.offload_bytes))
    ]
    for name in without_shorthand(modes, figures.blocks):
        again = figures.sizes.recomputed.get(without_offload(name))
        if again is None or again.kept_bytes >= figures.sizes.activation_bytes:
            continue  # the stage does not have it, or saves nothing by it
        recomputation, *copying = kinds_of_mode(without_offload(name))
        copies = _copies(figures, copying, again.offload_bytes) if name.endswith(WITH_OFFLOAD) else None
        if copies or not name.endswith(WITH_OFFLOAD):
            sizes = {field: size for field, size in asdict(again).items() if field != "offload_bytes"}
            entry = sizes | {"name": name, "recompute_us": _us(figures.times[recomputation])}
            entries.append(entry | ({"offload": copies} if copies else {}))
    return stage | ({"modes": entries} if entries else {})


def _copies(figures: StageFigures, kinds: Sequence[str], moved_bytes: int) -> dict[str, Any] | None:
    """An `Offload`; None where nothing can leave."""
    if not moved_bytes:
        return None
    out, back = (_us(figures.times[kind]) for kind in kinds)
    return {"bytes": moved_bytes, "offload_us": out, "reload_us": back}


def layer_entries(
    each: Sequence[tuple[str, int]], figures: Mapping[int, StageFigures], message_bytes: Sequence[int]
) -> list[dict[str, Any]]:
    """The layers of a layer profile: their names, each with the stage whose figures it has, equal neighbours as one."""
    outputs = [*message_bytes, 0]
    alike = [list(group) for _, group in groupby(each, lambda layer: layer[1])]
    return [_layer(of[0][0], figures[of[0][1]], outputs[of[0][1]]) | {"repeat": len(of)} for of in alike]


def _layer(name: str, figures: StageFigures, output_bytes: int) -> dict[str, Any]:
    kept = {"offload_bytes": figures.sizes.offload_bytes, "parameter_bytes": figures.parameter_bytes}
    named = {"name": name[:200], "output_bytes": output_bytes}
    again = figures.sizes.recomputed.get(SELECTIVE)
    recomputation: dict[str, Any] = {}
    if again is not None and again.kept_bytes < figures.sizes.activation_bytes:
        copied = {"kept_bytes": again.kept_bytes, "offload_bytes": again.offload_bytes}
        recompute_us = _us(figures.times[kinds_of_mode(SELECTIVE)[0]])
        recomputation = {"recomputation": copied | {"recompute_us": recompute_us}}
    return named | passes_us(figures.times) | _memory_bytes(figures) | kept | recomputation | _attention(figures)


def _attention(figures: StageFigures) -> dict[str, Any]:
    """Times of causal attention in a layer, and what slices take beyond it, where slices were measured."""
    if not figures.slicings:
        return {}
    parts: dict[str, float] = {}
    for name, costs in figures.length_costs.items():
        parts[name] = floor(10 * costs.attention_us) / 10  # no more than the time, which is rounded
        parts[f"{name.removesuffix('_us')}_slice_us"] = round(costs.slice_us, 1)
    key_value_bytes = min(figures.slicings[-1].key_value_bytes, figures.sizes.activation_bytes)
    return {"attention": parts | {"key_value_bytes": key_value_bytes}}
