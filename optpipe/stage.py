"""A stage of the model: its costs, how it may hold an activation, and its costs for one unit."""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from optpipe.document import Document
from optpipe.fields import Bytes, Factor, Index, TimeUs, at_most, reject
from optpipe.mode_names import KEPT, OFFLOAD

WITHOUT_BACKWARD: dict[str, Any] = {
    "backward": "none",
    "backward_input_us": 0,
    "backward_weight_us": 0,
    "backward_weight_bytes": 0,
    "offload": None,
    "modes": [],
}
"""Fields of a stage before the first one with a parameter to train."""


class Offload(Document):
    """Offloadable part of a stage's activation: `bytes`, and the copy time in each direction."""

    bytes: Bytes
    offload_us: TimeUs
    reload_us: TimeUs


class Workspace(Document):
    """Temporary bytes of each kind of op: taken at its start, freed at its end, on top of what it keeps."""

    F: Bytes = 0
    B: Bytes = 0
    W: Bytes = 0
    BW: Bytes = 0


MAX_MODE_NAME = 100
"""Longest name of an activation mode."""

MAX_MODES = 1000
"""Most activation modes of a stage."""

ModeName = Annotated[str, Field(min_length=1, max_length=MAX_MODE_NAME)]


class ActivationMode(Document):
    """How a microbatch's activation may be held on a stage, as given; `Stage.choices` has it with its defaults.

    `kept_bytes` stay from F until the recomputation, which takes `recompute_us` and makes the whole activation anew.
    `segment_bytes`: the most beyond `kept_bytes` while a backward recomputes segment by segment; None: it cannot.
    """

    name: ModeName
    kept_bytes: Bytes | None = None
    recompute_us: TimeUs | None = None
    forward_workspace_bytes: Bytes | None = None
    workspace_bytes: Bytes = 0
    segment_bytes: Bytes | None = None
    offload: Offload | None = None


class Mode(NamedTuple):
    """A choice for the activation of one microbatch on one stage, with all defaults filled in.

    Between F and its recomputation or backward it holds `kept_bytes`, of which `offload` may send a part to the host.
    `recomputes`: a C, or a backward CB or CBW, has to make `recomputed_bytes` anew in `recompute_us`; both are 0 where
    nothing is recomputed.
    """

    name: str
    kept_bytes: int
    recomputed_bytes: int
    recompute_us: int | float
    forward_workspace_bytes: int
    workspace_bytes: int
    segment_bytes: int | None
    offload: Offload | None
    recomputes: bool


Factors = list[Factor] | None


class SliceFactors(Document):
    """Costs of each slice of a microbatch as multiples of its stage's; None: 1 for every slice.

    `forward`, `backward_input`, `backward_weight` and `recompute` are of times, `bytes` of bytes and copies, `transfer`
    of transfers to other stages.
    """

    forward: Factors = None
    backward_input: Factors = None
    backward_weight: Factors = None
    recompute: Factors = None
    bytes: Factors = None
    transfer: Factors = None

    @cached_property
    def largest(self) -> UnitFactors:
        """The largest factor of each kind."""
        return UnitFactors(*(exact(max(getattr(self, name, None) or [1])) for name in UnitFactors._fields))

    @cached_property
    def earlier_bytes(self) -> Fraction:
        """Sum of the factors of bytes of all slices but the last; 0 where there is no list."""
        return sum(map(exact, (self.bytes or ())[:-1]), Fraction())


class UnitFactors(NamedTuple):
    """Factors of the costs of one unit on a stage. `time` is that of spread passes."""

    forward: Fraction
    backward_input: Fraction
    backward_weight: Fraction
    recompute: Fraction
    time: Fraction
    bytes: Fraction
    transfer: Fraction


class Stage(Document):
    """One stage of the model on its device, with the costs of one microbatch, or of one slice of it.

    F takes `activation_bytes` at its start. The end of B frees `activation_bytes - backward_weight_bytes` (or takes
    memory, if that is negative), the end of W frees the rest. `modes`: what else than keeping may be done with the
    activation. `split_backward`: False if the backward is always one fused op. `backward`: ``none`` if nothing in this
    stage and before it is trained: it has F alone, which frees its activation at its end. `slice_factors` replaces
    those of `Problem.slices`. `slice_gradient_bytes`: gradients of one slice's keys and values, held from the start of
    the backward of its microbatch's last slice to the end of its own.
    """

    device: Index
    forward_us: TimeUs
    backward_input_us: TimeUs
    backward_weight_us: TimeUs
    activation_bytes: Bytes
    backward_weight_bytes: Bytes
    workspace_bytes: Workspace = Workspace()
    offload: Offload | None = None
    modes: Annotated[list[ActivationMode], at_most(MAX_MODES)] = []
    split_backward: bool = True
    backward: Literal["full", "none"] = "full"
    slice_factors: SliceFactors | None = None
    slice_gradient_bytes: Bytes = 0

    @model_validator(mode="after")
    def _offload_fits(self) -> Self:
        if self.offload and self.offload.bytes > self.activation_bytes:
            raise reject(
                "offload_too_large",
                f"has offload.bytes {self.offload.bytes} but activation_bytes is {self.activation_bytes}. "
                "Maybe the sizes are per layer in one and per stage in the other",
            )
        return self

    @model_validator(mode="after")
    def _modes_agree(self) -> Self:
        seen = {KEPT, OFFLOAD}
        for n, mode in enumerate(self.modes):
            where = f"has modes[{n}]"
            if mode.name in seen:
                raise reject(
                    "repeated_mode",
                    f"{where}.name {mode.name!r}, which is taken; '{KEPT}' and '{OFFLOAD}' always are. "
                    "Maybe name it after what is recomputed",
                )
            seen.add(mode.name)
            kept = self.activation_bytes if mode.kept_bytes is None else mode.kept_bytes
            if kept > self.activation_bytes:
                raise reject(
                    "mode_too_large",
                    f"{where}.kept_bytes {kept} but activation_bytes is {self.activation_bytes}. "
                    "Maybe the sizes are per layer in one and per stage in the other",
                )
            if kept < self.activation_bytes and mode.recompute_us is None:
                raise reject(
                    "missing_recompute_us",
                    f"{where}.kept_bytes {kept}, less than activation_bytes {self.activation_bytes}, but no "
                    "recompute_us. Maybe the recomputation takes as long as the forward",
                )
            if kept == self.activation_bytes:
                for name in ("recompute_us", "forward_workspace_bytes", "workspace_bytes", "segment_bytes"):
                    if getattr(mode, name):
                        raise reject(
                            "nothing_recomputed",
                            f"{where}.{name} {getattr(mode, name)}, but keeps all {kept} bytes, so that nothing is "
                            "recomputed. Maybe kept_bytes is missing",
                        )
            if mode.offload and mode.offload.bytes > kept:
                raise reject(
                    "offload_too_large",
                    f"{where}.offload.bytes {mode.offload.bytes} but keeps {kept} bytes. "
                    "Maybe the offload is of the whole activation: what is recomputed cannot leave",
                )
        return self

    @cached_property
    def choices(self) -> tuple[Mode, ...]:
        """The modes among which each microbatch may choose: `kept`, then `offload` if given, then those of `modes`.

        Without a backward there is `kept` alone, of which nothing stays behind F.
        """
        if self.backward == "none":
            return (Mode(KEPT, 0, 0, 0, self.activation_bytes, 0, None, None, False),)

        def choice(mode: ActivationMode) -> Mode:
            kept = self.activation_bytes if mode.kept_bytes is None else mode.kept_bytes
            again = self.activation_bytes - kept
            forward = again if mode.forward_workspace_bytes is None else mode.forward_workspace_bytes
            recomputes = self._recomputes(mode)
            return Mode(
                name=mode.name,
                kept_bytes=kept,
                recomputed_bytes=again,
                recompute_us=mode.recompute_us or 0,
                forward_workspace_bytes=forward,
                workspace_bytes=mode.workspace_bytes,
                segment_bytes=mode.segment_bytes if recomputes else None,
                offload=mode.offload,
                recomputes=recomputes,
            )

        offload = [ActivationMode.model_construct(name=OFFLOAD, offload=self.offload)] if self.offload else []
        return tuple(map(choice, [ActivationMode.model_construct(name=KEPT), *offload, *self.modes]))

    def _recomputes(self, mode: ActivationMode) -> bool:
        return mode.kept_bytes is not None and mode.kept_bytes < self.activation_bytes

    @cached_property
    def choice_numbers(self) -> dict[str, int]:
        """Index in `choices` of each mode by name."""
        return {mode.name: n for n, mode in enumerate(self.choices)}

    def duration_us(self, kind: str) -> int | float:
        """Duration of an op of `kind` (F, B, W, BW, O or R) on this stage, of a microbatch kept or offloaded whole.

        0 of a backward that the stage does not have.
        """
        if self.backward == "none" and kind != "F":
            return 0
        if kind == "BW":
            return self.backward_input_us + self.backward_weight_us
        if kind in "OR":
            assert self.offload is not None, "this stage never offloads"
            return self.offload.offload_us if kind == "O" else self.offload.reload_us
        return {"F": self.forward_us, "B": self.backward_input_us, "W": self.backward_weight_us}[kind]


class UnitStage(Stage):
    """A stage with the costs of one unit: the stage's times the unit's factors, each size rounded up by itself.

    `gradients_taken_bytes`: what the backward of a microbatch's last slice takes at its start, for the slices before
    it. `gradients_freed_bytes`: what the backward of one of these frees at its end.
    """

    gradients_taken_bytes: Bytes = 0
    gradients_freed_bytes: Bytes = 0

    @classmethod
    def of(cls, stage: Stage, factors: UnitFactors, taken_bytes: int, freed_bytes: int) -> Self:
        """The stage with its costs times `factors`; its two fields of gradients are these bytes."""

        def size(value: int) -> int:
            return scaled_bytes(value, factors.bytes)

        def copy(offload: Offload | None) -> Offload | None:
            return offload and Offload.model_construct(
                bytes=size(offload.bytes),
                offload_us=scaled_us(offload.offload_us, factors.bytes),
                reload_us=scaled_us(offload.reload_us, factors.bytes),
            )

        def mode(entry: ActivationMode) -> ActivationMode:
            again = entry.recompute_us if stage._recomputes(entry) else None
            return ActivationMode.model_construct(
                name=entry.name,
                kept_bytes=None if entry.kept_bytes is None else size(entry.kept_bytes),
                recompute_us=None if again is None else scaled_us(again, factors.recompute),
                forward_workspace_bytes=(
                    None if entry.forward_workspace_bytes is None else size(entry.forward_workspace_bytes)
                ),
                workspace_bytes=size(entry.workspace_bytes),
                segment_bytes=None if entry.segment_bytes is None else size(entry.segment_bytes),
                offload=copy(entry.offload),
            )

        work = stage.workspace_bytes
        return cls.model_construct(
            device=stage.device,
            forward_us=scaled_us(stage.forward_us, factors.forward),
            backward_input_us=scaled_us(stage.backward_input_us, factors.backward_input),
            backward_weight_us=scaled_us(stage.backward_weight_us, factors.backward_weight),
            activation_bytes=size(stage.activation_bytes),
            backward_weight_bytes=size(stage.backward_weight_bytes),
            workspace_bytes=Workspace.model_construct(F=size(work.F), B=size(work.B), W=size(work.W), BW=size(work.BW)),
            offload=copy(stage.offload),
            modes=[mode(entry) for entry in stage.modes],
            split_backward=stage.split_backward,
            backward=stage.backward,
            gradients_taken_bytes=taken_bytes,
            gradients_freed_bytes=freed_bytes,
        )

    def _recomputes(self, mode: ActivationMode) -> bool:
        return mode.recompute_us is not None  # of few bytes, rounding up may leave nothing to be made anew


@lru_cache(2**16)
def exact(value: float) -> Fraction:
    """The exact value of a number's decimal text: of 0.1 one tenth."""
    return Fraction(str(value))


@lru_cache(2**16)
def scaled_us(time_us: int | float, factor: Fraction) -> int | float:
    """A time multiplied in decimals, so that three times 0.1 is 0.3."""
    if factor == 1:
        return time_us
    product = exact(time_us) * factor
    return int(product) if product.denominator == 1 else float(product)


@lru_cache(2**16)
def scaled_bytes(size: int, factor: Fraction) -> int:
    """Bytes multiplied and rounded up."""
    return -(-size * factor.numerator // factor.denominator)
