"""Lower bounds on every schedule of a cut, in closed form for thousands of cuts at once.

They are the simplest of `solver.bounds`: head, work and tail of a device (Carlier 1982), the idle time of its warm-up
(Zero Bubble, section 2), and the time for which activations take its memory. `lower_bound_us` knows more of one cut,
and takes milliseconds for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, inf

import numpy as np

from optpipe.layers import Layer, LayerProfile
from optpipe.ops import Floats, Ints
from optpipe.partition import parts_us, scaled_us
from optpipe.problem import Objective

MOST_TABLE = 4_000_000
"""Stages times pairs of layers for which `CutBounds.least` makes tables: a second."""

UNLIMITED = 1e30
"""Bytes of a device without a limit."""

STEEP = 16
"""Power at which bounds of devices are added: nearly their maximum, but it also falls with the other devices."""


@dataclass(frozen=True)
class _Stages:
    """Costs of stages of one device, one microbatch: arrays whose last axis counts the stages of the device.

    `hold_us`: from the start of F to the end of B of one microbatch, at least. `warm_up_us`: from the start of the
    first F to the start of the first backward of the device; `head_us` and `tail_us`: F of earlier stages, and B of
    these, with delays; `parameter_bytes` of the device.
    """

    forward_us: Floats
    backward_us: Floats
    weight_us: Floats
    held_bytes: Floats
    weight_bytes: Floats
    hold_us: Floats
    warm_up_us: Floats
    head_us: Floats
    tail_us: Floats
    parameter_bytes: Floats


class CutBounds:
    """Bounds on the step for cuts of a profile's layers in one placement, which has as many stages on every device.

    A cut is the numbers of layers before each stage, and all of them: ``0 < ... < layers``. `scale` is the microbatch
    size relative to the profile's, of which there are `microbatches`; with `parts` each is cut into as many equal
    slices. Activations that may leave or be made anew (`offload`, `recomputes`) count with what stays for certain.
    `alone`: whether the last layer has a stage of its own; None: either.
    """

    def __init__(
        self,
        profile: LayerProfile,
        placement: Sequence[int],
        scale: float,
        microbatches: int,
        *,
        offload: bool = False,
        recomputes: bool = False,
        objective: Objective = "makespan",
        parts: int = 1,
        alone: bool | None = None,
    ) -> None:
        layers, head = profile.each_layer, profile.spread
        self.layers, self.stages, self.units = len(layers), len(placement), microbatches * parts
        self.alone = alone
        self._memory, self._objective = profile.memory_bytes, objective
        if head is not None and self._memory is not None:
            self._memory -= head.parameter_bytes
        self._passes_us = 0.0
        if head is not None:
            self._passes_us = self.units * sum(scaled_us(head, us, scale) for us in (head.logits_us, head.weights_us))
        self._first_weight_us = scaled_us(layers[0], layers[0].backward_weight_us, scale) / parts

        def sums(cost: Callable[[Layer], float]) -> Floats:
            return np.concatenate([[0.0], np.cumsum([cost(layer) for layer in layers])])

        def time_us(name: str) -> Floats:
            return sums(lambda layer: least_us(layer, name) / parts)

        def least_us(layer: Layer, name: str) -> float:
            """Time without its exchanges: a block is at least as long as its two passes without these."""
            time_us = scaled_us(layer, getattr(layer, name), scale)
            if name == "backward_weight_us" or parts > 1:  # slices have no blocks
                return time_us
            _, dispatch_us, _, combine_us = parts_us(layer, scale)[name == "backward_input_us"]
            return max(0.0, time_us - dispatch_us - combine_us)

        def held_bytes(layer: Layer) -> float:
            if recomputes:
                return 0.0  # a mode may keep next to nothing
            leaves = layer.offload_bytes if offload and profile.copies else 0
            return max(0, floor(layer.activation_bytes * scale) - floor(leaves * scale) - (leaves > 0)) / parts

        def weight_bytes(layer: Layer) -> float:  # a fused backward holds the activation meanwhile
            return (
                0.0 if recomputes else floor(min(layer.backward_weight_bytes, layer.activation_bytes) * scale) / parts
            )

        self._times_us = [time_us(f"{kind}_us") for kind in ("forward", "backward_input", "backward_weight")]
        self._held_bytes = sums(held_bytes)
        self._weight_bytes = sums(weight_bytes)
        self._parameter_bytes = sums(lambda layer: layer.parameter_bytes)
        link = profile.link
        sent_us = [
            layer.output_bytes * scale / parts / link.bytes_per_us if link.bytes_per_us else 0 for layer in layers
        ]
        self._delay_us = link.latency_us + np.array([0.0, *sent_us])
        places = np.array(placement)
        self._apart = places[1:] != places[:-1]
        self._stages_of = np.array([np.flatnonzero(places == d) for d in range(places.max() + 1)])
        self.placement = tuple(placement)

    @property
    def has_cuts(self) -> bool:
        """True if the layers are enough for the stages."""
        return self.layers >= self.stages + (self.alone is False)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self._stages_of)

    def work_before(self) -> Floats:
        """Time of F, B and W of the layers before each one, and of all."""
        total: Floats = np.sum(self._times_us, axis=0)
        return total

    def parameters_before(self) -> Floats:
        """Parameter bytes of the layers before each one, and of all."""
        return self._parameter_bytes

    def of(self, cuts: Ints) -> Floats:
        """For each cut the bounds from each device; infinite where its parameters or one microbatch do not fit."""
        forward, backward, weight, held, weights, parameters = (
            np.diff(before[cuts], axis=1)
            for before in (*self._times_us, self._held_bytes, self._weight_bytes, self._parameter_bytes)
        )
        delay = np.zeros_like(forward)
        delay[:, :-1] = self._delay_us[cuts[:, 1:-1]] * self._apart
        behind_f, behind_b, behind_delay = (_sums_from(cost) for cost in (forward, backward, delay))
        turnaround = behind_f - forward + behind_b - backward + 2 * behind_delay
        at = self._stages_of
        low, high = at[:, 0], at[:, -1]
        head_us = (np.cumsum(forward + delay, axis=1) - forward - delay)[:, low]
        tail_us = (np.cumsum(backward + delay, axis=1) - backward - delay)[:, low]
        to_backward = (behind_f + behind_delay)[:, low] + (behind_b - backward + behind_delay)[:, high]
        bounds_us = self._device_us(
            _Stages(
                forward_us=forward[:, at],
                backward_us=backward[:, at],
                weight_us=weight[:, at],
                held_bytes=held[:, at],
                weight_bytes=weights[:, at],
                hold_us=(forward + turnaround + backward)[:, at],
                warm_up_us=to_backward,
                head_us=head_us,
                tail_us=tail_us,
                parameter_bytes=parameters[:, at].sum(axis=2),
            )
        )
        chain_us = (forward + backward + 2 * delay).sum(axis=1) + weight[:, 0]
        bounds_us[:, 0] = np.maximum(bounds_us[:, 0], chain_us)
        if self.alone is not None:
            bounds_us[(cuts[:, -1] - cuts[:, -2] == 1) != self.alone] = inf
        return bounds_us

    def least(self) -> tuple[float, Ints] | None:
        """The least bound of all cuts, and a cut that has nearly that; None where it is not found by tables.

        With one stage on each device its bound follows from the layers before it and those in it, but for the delays of
        other boundaries, which count with the shortest. So the least maximum is found stage by stage.
        """
        count, stages = self.layers, self.stages
        if stages != self.devices or stages * count**2 > MOST_TABLE or not self.has_cuts:
            return None
        begin, end = np.meshgrid(np.arange(count), np.arange(1, count + 1), indexing="ij")
        delay_us = float(self._delay_us[1:-1].min()) if count > 1 else 0.0
        tables = [self._table_us(s, begin, end, delay_us) for s in range(stages)]
        least_us = float(_paths(tables, np.maximum, count)[-1][count])
        if least_us == inf:
            return inf, np.zeros(0, np.int64)
        steep = [
            np.where(table <= least_us * (1 + 1e-12), (table / max(least_us, 1e-9)) ** STEEP, inf) for table in tables
        ]
        values = _paths(steep, np.add, count)
        cut = [count]
        for s in range(stages - 1, 0, -1):
            cut.append(int(np.argmin(values[s][:count] + steep[s][:, cut[-1] - 1])))
        return least_us, np.array([0, *reversed(cut)])

    def floor_us(self) -> float:
        """A bound on every schedule of every cut: mean work of a device, longest layer, one microbatch alone."""
        work = self.work_before()
        one_us = self._times_us[0][-1] + self._times_us[1][-1] + self._first_weight_us
        busiest_us = self.units * max(work[-1] / self.devices, np.diff(work).max()) + self._passes_us
        return float(max(busiest_us, one_us))

    def _table_us(self, s: int, begin: Ints, end: Ints, delay_us: float) -> Floats:
        """Bounds of stage s for each begin and end of its layers; infinite where these are no stage."""
        stages, count = self.stages, self.layers
        forward, backward, weight, held, weights, parameters = (
            (before[end] - before[begin])
            for before in (*self._times_us, self._held_bytes, self._weight_bytes, self._parameter_bytes)
        )
        before_f, before_b = self._times_us[0][begin], self._times_us[1][begin]
        behind_us = sum(before[-1] - before[end] for before in self._times_us[:2])
        turnaround = behind_us + 2 * delay_us * (stages - 1 - s)
        bounds_us = self._device_us(
            _Stages(
                forward_us=forward[..., None],
                backward_us=backward[..., None],
                weight_us=weight[..., None],
                held_bytes=held[..., None],
                weight_bytes=weights[..., None],
                hold_us=(forward + turnaround + backward)[..., None],
                warm_up_us=forward + turnaround,
                head_us=before_f + s * delay_us,
                tail_us=before_b + s * delay_us,
                parameter_bytes=parameters,
            )
        )
        possible = (begin >= s) & (end > begin) & (end <= count - (stages - 1 - s))
        possible &= (begin == 0) if s == 0 else (begin > 0)
        possible &= (end == count) if s == stages - 1 else (end < count)
        if s == stages - 1 and self.alone is not None:
            possible &= (end - begin == 1) == self.alone
        return np.where(possible, bounds_us, inf)

    def _device_us(self, one: _Stages) -> Floats:
        """The bound of a device. Proofs: docs/math/bounds.md; here each counts with the memory that F alone needs."""
        m = self.units
        room = (UNLIMITED if self._memory is None else self._memory) - one.parameter_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            forward_rate = np.where(one.held_bytes > 0, one.forward_us / one.held_bytes, inf).max(axis=-1)
            weight_rate = np.where(one.weight_bytes > 0, one.weight_us / one.weight_bytes, inf).max(axis=-1)
            low_held, low_weight = one.held_bytes[..., 0], one.weight_us[..., 0]
            forwards_us = m * one.forward_us.sum(axis=-1)
            fit_us = np.minimum(forwards_us, np.where(forward_rate == inf, inf, room * forward_rate))
            weights_us = m * one.weight_us.sum(axis=-1)
            room_left = np.maximum(room - low_held, 0)
            late_us = np.minimum(weights_us, np.where(weight_rate == inf, inf, room_left * weight_rate))
            bytes_us = (one.held_bytes * one.hold_us + one.weight_bytes * one.weight_us).sum(axis=-1)
            area_us = np.where(room > 0, m * bytes_us / room, 0)
            if one.held_bytes.shape[-1] == 1:
                most = np.where(low_held > 0, np.clip(room // np.where(low_held > 0, low_held, 1), 1, m), m)
                fit_us = np.minimum(fit_us, most * one.forward_us[..., 0])
                # A microbatch begins when the one `most` before it has ended its B, or its W if both do not fit.
                hold_us = one.hold_us[..., 0]
                alone = (most == 1) & (low_held + one.weight_bytes[..., 0] > room)
                rounds_us = ((m - 1) // most) * (hold_us + alone * low_weight) + hold_us + low_weight
                area_us = np.maximum(area_us, rounds_us)
        idle_us = np.maximum(0, one.warm_up_us - fit_us)
        backwards_us = m * one.backward_us.sum(axis=-1)
        work_us = forwards_us + backwards_us + weights_us
        span_us = np.maximum(work_us + np.maximum(idle_us, self._passes_us), area_us)  # passes may fill the idle time
        before_us = np.maximum(0, weights_us - low_weight - late_us)
        to_last_us = forwards_us + backwards_us + idle_us + before_us
        through_us = one.head_us + to_last_us + one.tail_us + self._first_weight_us
        if self._objective == "makespan":
            span_us = span_us + one.head_us
        fits = (room >= 0) & (one.held_bytes.sum(axis=-1) <= room)
        return np.where(fits, np.maximum(span_us, through_us), inf)


def _sums_from(costs: Floats) -> Floats:
    """For each stage the sum over it and those behind it."""
    sums: Floats = np.cumsum(costs[:, ::-1], axis=1)[:, ::-1]
    return sums


def _paths(tables: Sequence[Floats], join: np.ufunc, count: int) -> list[Floats]:
    """The least `join` of what the tables say of earlier stages, by stage and number of layers before it."""
    values = [np.full(count + 1, inf)]
    values[0][0] = 0.0
    for table in tables:
        reached = np.full(count + 1, inf)
        reached[1:] = join(values[-1][:count, None], table).min(axis=0)
        values.append(reached)
    return values
