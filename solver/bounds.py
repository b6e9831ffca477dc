"""What no schedule can beat, and why."""

from __future__ import annotations

from collections.abc import Sequence

from optpipe.problem import Problem


def lower_bound_us(problem: Problem) -> float:
    """The best bound known on the problem's objective without search."""
    return max(longest_chain_us(problem), max(window_bounds_us(problem), default=0.0))


def split_backward_suffices(problem: Problem) -> bool:
    """Whether some optimum has no fused backward, so that what is proved of split ones holds for all.

    B with W right behind it does all that BW does, no later, and hands its gradient over earlier. Only where a budget
    counts and BW needs less memory beside the activation than B and W do, fusing can be worth it.
    """
    for stage in problem.stages:
        work, grows = stage.workspace_bytes, stage.backward_weight_bytes - stage.activation_bytes
        split = max(work.B, grows, grows + work.W)
        if split > work.BW and problem.devices[stage.device].memory_bytes is not None:
            return False
    return True


def longest_chain_us(problem: Problem) -> float:
    """One microbatch alone: F through all stages, B back through all, then the W of the first stage.

    A bound on the makespan; on the span of the device of the first stage too, since that chain begins and ends there.
    """
    stages = problem.stages
    there = sum(stage.forward_us for stage in stages) + sum(problem.forward_delay_us)
    back = sum(stage.backward_input_us for stage in stages) + sum(problem.backward_delay_us)
    return there + back + stages[0].backward_weight_us


def window_bounds_us(problem: Problem) -> Sequence[float]:
    """A bound from each device that has stages: its work, and the time it must idle before its first B.

    For linear placement with equal costs and no offload the first device gives the Zero Bubble bound
    ``m (tF + tB + tW) + max(0, (p - 1)(tB + 2 tC) + (p - k) tF)`` with ``k = floor(budget / mF)``.

    Proof. Let device d hold the stages from `low` to `high` (and perhaps others between). Its first op is an F of
    `low`. Any B of d follows, for the same microbatch, F from `low` to the last stage and B from the last stage to
    the one after `high`; so d's first B starts at least that round trip after d's first op. Until then d runs only F,
    and no byte of their activations is freed except by offload. So the F that fit are limited by budget plus what
    the channel can carry in the round trip (`_forward_room_us` bounds their time), and the rest of the round trip is
    idle: span >= work + round trip - forward time that fits. For the makespan add the earliest start of d's first op,
    which is the chain of F from stage 0 to `low`.

    Second, for the makespan: the last of all F and B on d is a B of `low`, and from there the gradient still passes
    B of the stages before `low`, and the W of stage 0 if `low` > 0 (or of `low` itself): the W of d may hide behind
    that chain, its F, B and idle time may not.
    """
    return [_window_bound_us(problem, d) for d, stages in enumerate(problem.stages_of) if stages]


def _window_bound_us(problem: Problem, device: int) -> float:
    here = problem.stages_of[device]
    low, high = here[0], here[-1]
    stages, m = problem.stages, problem.microbatches
    round_trip = (
        sum(stage.forward_us for stage in stages[low:])
        + sum(problem.forward_delay_us[low:])
        + sum(problem.backward_delay_us[high:])
        + sum(stage.backward_input_us for stage in stages[high + 1 :])
    )
    idle = max(0.0, round_trip - _forward_room_us(problem, device, round_trip))
    span = problem.work_us[device] + idle
    if problem.objective == "device_span":
        return span
    head = sum(stage.forward_us for stage in stages[:low]) + sum(problem.forward_delay_us[:low])
    tail = sum(stage.backward_input_us for stage in stages[:low]) + sum(problem.backward_delay_us[:low])
    gradient = m * sum(stages[s].forward_us + stages[s].backward_input_us for s in here)
    return head + max(span, gradient + idle + tail + stages[0].backward_weight_us)


def _forward_room_us(problem: Problem, device: int, window_us: float) -> float:
    """At least as much time as F can take on a device in a window that no B precedes.

    The bytes that are there for activations are filled with the F that take longest per byte (a fractional knapsack,
    which is never less than any choice of whole ones; with a single stage whole ones are counted).
    """
    here = [problem.stages[s] for s in problem.stages_of[device]]
    budget = problem.devices[device].memory_bytes
    if budget is None:
        return window_us
    room = float(budget)
    for stage in here:
        if stage.offload and stage.offload.bytes:
            if not stage.offload.offload_us:
                return window_us
            room = max(room, budget + window_us * stage.offload.bytes / stage.offload.offload_us)
    if len(here) == 1 and here[0].activation_bytes:
        return min(problem.microbatches, room // here[0].activation_bytes) * here[0].forward_us
    time_us = 0.0
    for stage in sorted(here, key=lambda s: s.activation_bytes / s.forward_us if s.forward_us else float("inf")):
        size = stage.activation_bytes
        count = min(float(problem.microbatches), room / size) if size else float(problem.microbatches)
        time_us += count * stage.forward_us
        room -= count * size
    return time_us
