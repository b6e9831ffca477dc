"""Which strategies are legal: rules of one degree and of several together, each with the nearest legal values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from optpipe.cluster.model import Model
from optpipe.cluster.strategy import Strategy
from optpipe.errors import InputError, Issue

MOST_DEGREE = 2**20
DEGREES: Mapping[str, str] = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "dp": "data",
    "pp": "pipeline",
    "vpp": "virtual",
    "microbatch_size": "microbatch_size",
}
"""Fields of a strategy by the names of its degrees."""


@dataclass(frozen=True)
class _Degree:
    """Rules of a degree whatever the others are."""

    divides: Mapping[str, int]
    """Numbers that it must divide, by what they are."""
    most: int = MOST_DEGREE
    room: str = ""
    """The reason for `most`."""

    @cached_property
    def legal(self) -> list[int]:
        """All legal values, in order."""
        if not self.divides:
            return list(range(1, self.most + 1))
        number = gcd(*self.divides.values())
        small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
        return [k for k in sorted({*small, *(number // k for k in small)}) if k <= self.most]

    def broken(self, value: int) -> list[str]:
        """Rules that a value breaks."""
        wrong = [f"the {number:,} {what}" for what, number in self.divides.items() if number % value]
        texts = [f"must divide {' and '.join(wrong)}"] if wrong else []
        return texts + ([self.room] if value > self.most else [])


def nearest(value: int, legal: Sequence[int]) -> str:
    """The next legal values below and above, in order."""
    k = bisect_left(legal, value)
    return " or ".join(f"{one:,}" for one in legal[max(0, k - 1) : k + 1])


@dataclass(frozen=True)
class Rules:
    """Rules of strategies for a model on GPUs, for sequences of `sequence` tokens."""

    model: Model
    gpus: int
    gpus_per_node: int
    sequence: int
    global_batch: int

    @cached_property
    def experts(self) -> int:
        """Experts of a layer that has some."""
        return max(layer.feed_forward.experts for layer in self.model.layers)

    @property
    def _layers(self) -> str:
        """Number of layers between embedding and head."""
        layers, predicted = f"{len(self.model.stack):,} layers", self.model.predicted_tokens
        return f"{layers} ({predicted:,} of multi-token prediction)" if predicted else layers

    @cached_property
    def _degrees(self) -> Mapping[str, _Degree]:
        heads = min(layer.attention.heads for layer in self.model.layers)
        stages = self.model.most_stages
        filled = f"{self._layers}, embedding and head fill {stages:,} stages"
        gpus = {"GPUs": self.gpus}
        return {
            "tp": _Degree({"heads": heads} | gpus, self.gpus_per_node, f"a node has {self.gpus_per_node:,} GPUs"),
            "cp": _Degree(gpus),
            "ep": _Degree({"experts": self.experts} | gpus),
            "etp": _Degree(gpus),
            "dp": _Degree(gpus),
            "pp": _Degree(gpus, stages, filled),
            "vpp": _Degree({}, stages, filled),
            "microbatch_size": _Degree({"sequences of the global batch": self.global_batch}),
        }

    def of_degree(self, name: str, value: int) -> Iterator[Issue]:
        """Rules that a degree breaks whatever the others are."""
        if name in ("ep", "etp") and not self.experts:
            if value > 1:
                detail = f"is {value:,} but {self.model.name} has no experts. Maybe leave it out."
                yield Issue(name, "meaningless", detail)
        elif broken := self._degrees[name].broken(value):
            legal = nearest(value, self._degrees[name].legal)
            yield Issue(name, "illegal", f"is {value:,} but {' and '.join(broken)}. Maybe {legal}.")

    def of_sequence(self) -> Iterator[Issue]:
        """The rule that a sequence breaks whatever the strategy is."""
        if 0 < self.model.positions < self.sequence:
            detail = f"is {self.sequence:,} but {self.model.name} learns {self.model.positions:,} positions."
            yield Issue(
                "sequence", "too_long", f"{detail} Maybe {self.model.positions:,}, or a model with rotary ones."
            )

    def require(self, one: Strategy) -> None:
        """Raise InputError with every rule that a strategy breaks, and the nearest legal values."""
        if faults := list(self.faults(one)):
            raise InputError(faults)

    def faults(self, one: Strategy) -> Iterator[Issue]:
        """Every rule that a strategy breaks. What has a degree that is illegal by itself is not judged further."""
        yield from self.of_sequence()
        wrong: set[str] = set()
        shared = one.gpus_of_replica
        derived = shared * one.data != self.gpus
        for name, field in DEGREES.items():
            if name == "dp" and derived:
                continue  # the product says it
            found = list(self.of_degree(name, getattr(one, field)))
            wrong |= {name} if found else set()
            yield from found
        if derived and wrong.isdisjoint(("tp", "cp", "pp")):
            yield self._product(one, shared)
        if wrong.isdisjoint(("tp", "cp")):
            yield from self._sequence(one)
        if wrong.isdisjoint(("ep", "etp", "pp")):
            yield from self._experts(one)
        if not derived and "microbatch_size" not in wrong:
            yield from self._batch(one)
        if wrong.isdisjoint(("pp", "vpp")):
            yield from self._stages(one)
        yield from self._choices(one)

    def _instead(self, one: Strategy, names: Sequence[str], holds: Callable[[Strategy], bool]) -> list[str]:
        """The nearest values of each degree, one changed at a time, with which a rule holds."""
        texts = []
        for name in names:
            legal = [
                value
                for value in self._degrees[name].legal
                if holds(replace(one, **{DEGREES[name]: value}))  # type: ignore[arg-type]
            ]
            if legal:
                texts.append(f"{name} {nearest(getattr(one, DEGREES[name]), legal)}")
        return texts

    def _product(self, one: Strategy, shared: int) -> Issue:
        if self.gpus % shared == 0:
            detail = f"makes dp x tp x cp x pp = {shared * one.data:,} GPUs but there are {self.gpus:,}."
            return Issue("dp", "wrong_product", f"{detail} Maybe dp {self.gpus // shared:,}.")
        fewer = [
            *self._instead(one, ("pp", "cp", "tp"), lambda it: self.gpus % it.gpus_of_replica == 0),
            f"{_multiples(self.gpus, shared)} GPUs",
        ]
        detail = f"is {self.gpus:,} but tp x cp x pp = {shared:,} must divide it. Maybe {', or '.join(fewer)}."
        return Issue("gpus", "does_not_divide", detail)

    def _sequence(self, one: Strategy) -> Iterator[Issue]:
        if self.sequence % _parts(one):
            name, rule = ("cp", "2 x tp x cp") if one.context > 1 else ("tp", "tp")
            value = one.context if one.context > 1 else one.tensor
            detail = f"is {value:,}: {rule} = {_parts(one):,} must divide the sequence of {self.sequence:,} tokens."
            instead = [
                *self._instead(
                    one, ("cp", "tp"), lambda it: not (self.sequence % _parts(it) or self.gpus % it.gpus_of_replica)
                ),
                f"a sequence of {_multiples(self.sequence, _parts(one))}",
            ]
            yield Issue(name, "does_not_divide", f"{detail} Maybe {', or '.join(instead)}.")

    def _experts(self, one: Strategy) -> Iterator[Issue]:
        needed = one.pipeline * one.expert * one.expert_tensor
        if self.experts and self.gpus % needed:
            instead = self._instead(
                one, ("ep", "etp", "pp"), lambda it: self.gpus % (it.pipeline * it.expert * it.expert_tensor) == 0
            )
            detail = f"is {one.expert:,}: pp x ep x etp = {needed:,} must divide the {self.gpus:,} GPUs."
            maybe = f" Maybe {', or '.join(instead)}." if instead else ""
            yield Issue("ep", "too_large", detail + maybe)

    def _batch(self, one: Strategy) -> Iterator[Issue]:
        each = one.data * one.microbatch_size
        if self.global_batch % each:
            instead = [
                *self._instead(
                    one, ("microbatch_size",), lambda it: self.global_batch % (it.data * it.microbatch_size) == 0
                ),
                f"a global batch of {_multiples(self.global_batch, each)}",
            ]
            detail = f"is {self.global_batch:,} but dp x microbatch size = {each:,} must divide it."
            yield Issue("global_batch", "does_not_divide", f"{detail} Maybe {', or '.join(instead)}.")

    def _stages(self, one: Strategy) -> Iterator[Issue]:
        layers, count = one.stage_layers, len(self.model.stack)
        spread = one.vocabulary == "spread"
        ends, most = " and embedding" if spread else ", embedding and head", self.model.most_stages - spread
        if one.stages > most:
            instead = self._instead(one, ("vpp", "pp"), lambda it: it.stages <= most)
            detail = f"is {one.pipeline:,}, with {one.virtual:,} stages a device, but {self._layers}{ends}"
            maybe = f" Maybe {', or '.join(instead)}." if instead else ""
            yield Issue("pp", "too_many_stages", f"{detail} fill {most:,} stages.{maybe}")
        elif one.stage_layers and (sum(layers) != count or len(layers) != one.stages):
            detail = f"have {sum(layers)} layers in {len(layers)} stages but {count} in {one.stages} are needed."
            yield Issue("stage_layers", "wrong_sum", detail)

    def _choices(self, one: Strategy) -> Iterator[Issue]:
        if one.expert_imbalance != 1 and not self.experts:
            detail = f"is {one.expert_imbalance:g} but {self.model.name} has no experts. Maybe leave it out."
            yield Issue("expert_imbalance", "meaningless", detail)
        if one.offload == "yes" and one.pipeline == 1:
            detail = "is yes but pp is 1: the backward follows at once, and nothing can leave before it. Maybe pp 2."
            yield Issue("offload", "meaningless", detail)
        if one.virtual > 1 and one.pipeline == 1:
            detail = f"is {one.virtual:,} but pp is 1: one device has all layers. Maybe 1."
            yield Issue("vpp", "meaningless", detail)
        if one.overlap == "yes" and one.expert == 1:
            detail = "is yes but ep is 1: no exchange of experts is to be hidden. Maybe no."
            yield Issue("overlap", "meaningless", detail)
        if one.overlap == "yes" and one.recompute == "full":
            detail = (
                "is yes but all layers are recomputed, within which trainers run no blocks. Maybe --recompute none."
            )
            yield Issue("overlap", "cannot_run", detail)
        if one.vocabulary != "last" and one.pipeline == 1:
            detail = f"is {one.vocabulary} but pp is 1: one device has all layers. Maybe last."
            yield Issue("vocabulary", "meaningless", detail)
        if one.vocabulary == "spread" and self.model.predicted_tokens:
            detail = f"is spread but {self.model.name} predicts further tokens by the same rows. Maybe own."
            yield Issue("vocabulary", "cannot_run", detail)
        if one.vocabulary == "spread" and one.overlap == "yes":
            detail = "is spread but overlap is yes: a stage whose backward waits for all devices is in no block."
            yield Issue("vocabulary", "cannot_run", f"{detail} Maybe own.")
        if one.vocabulary == "spread" and one.offload == "yes":
            detail = "is spread but offload is yes: no schedule with passes on all devices offloads. Maybe own."
            yield Issue("vocabulary", "cannot_run", detail)


def _parts(one: Strategy) -> int:
    """Parts of a sequence: with context parallelism a rank has a pair, one from either end."""
    return (2 if one.context > 1 else 1) * one.tensor * one.context


def _multiples(value: int, of: int) -> str:
    """The nearest multiples of a number."""
    below = value // of * of
    return " or ".join(f"{one:,}" for one in (below, below + of) if one)
