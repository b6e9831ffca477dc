"""Vocabulary Parallelism (arXiv 2411.05288) with 1F1B: the passes of a vocabulary layer that lies on all devices.

Two passes follow the last stage's forward. The first, S, makes each device's part of the logits; behind a barrier the
second, T, makes gradients from the softmax of all of them. In Algorithm 1 the last stage's backward waits for every T,
in Algorithm 2 for every S, so that T may come as late as a W. Each barrier takes one more microbatch in flight than
1F1B has on a device: one in `vocab-2`, two in `vocab-1`.

T of a microbatch and S of the next one run together, so that a device holds few logits. With f + b the time of a
forward and a backward, a device k places before the last runs its backwards k b later, but a pass at about the same
time as all others. So it runs more of them before its first backward, and every third device has its forward between
its backward and its passes. That is for backwards of two forwards' length, as the paper's own order.
"""

from __future__ import annotations

from itertools import count

from optpipe.errors import MethodError
from optpipe.ops import Op, OpArray, Orders
from optpipe.problem import Problem
from optpipe.spread import AfterPass, two_passes
from solver.published.passes import require_one_stage_a_device


def vocab_1(problem: Problem) -> Orders:
    """The order for two barriers (Algorithm 1). Raises MethodError on placement and on other passes."""
    return _orders(problem, "vocab-1", barriers=2)


def vocab_2(problem: Problem) -> Orders:
    """The order for one barrier (Algorithm 2). Raises MethodError on placement and on other passes or gates."""
    return _orders(problem, "vocab-2", barriers=1)


def _orders(problem: Problem, method: str, *, barriers: int) -> Orders:
    require_one_stage_a_device(problem, method)
    passes = two_passes(problem.spread or (), problem.stages)
    if passes is None or any(gate.op != "B" for gate in problem.gates or ()):
        names = ", ".join(problem.pass_names) or "none"
        raise MethodError(
            f"{method} is for two spread passes, one after F of the last stage and one after that, and the problem's "
            f"are: {names}. Maybe use auto or cp-sat."
        )
    first, second = (one.name for one in passes)
    gated = {one.pass_name for gate in problem.gates or () for one in gate.after if isinstance(one, AfterPass)}
    if barriers == 1 and second in gated:
        raise MethodError(f"{method} runs {second} when it can, but gates let ops wait for it. Maybe use vocab-1.")
    last = len(problem.stages) - 1
    if barriers == 2 and problem.microbatches < 2:
        raise MethodError(f"{method} has two microbatches in flight on the last device, but there is one in all.")
    own = {d: stages[0] for d, stages in enumerate(problem.stages_of)}
    return Orders.of_compute(
        _device_order(problem, d, (first, second), last - own[d], barriers) for d in range(len(problem.devices))
    )


def _device_order(problem: Problem, device: int, passes: tuple[str, str], before_last: int, barriers: int) -> OpArray:
    """The order of a device whose stage is `before_last` stages before the last."""
    stage, units = problem.stages_of[device][0], problem.units
    first, second = passes
    takes_part = {one.name: bool(one.us[device]) for one in problem.spread or ()}
    places = {"F": stage, "BW": stage, first: device, second: device}
    turns = {kind: count() for kind in places}
    ops: list[Op] = []

    def run(*kinds: str) -> None:
        for kind in kinds:
            i = next(turns[kind])
            if i < units and takes_part.get(kind, True):
                ops.append(Op(kind, places[kind], i))

    run(*["F"] * (before_last + 1), first, "F")
    if barriers == 2:
        run(second, first, "F")
    for _ in range(before_last - (before_last - 1) // 3 if before_last else 0):
        run(second, first)
    forward_first = before_last > 0 and before_last % 3 == 0
    for _ in range(units):
        run("BW", *(("F", second, first) if forward_first else (second, first, "F")))
    run(*[second] * units)
    return OpArray.of(ops)
