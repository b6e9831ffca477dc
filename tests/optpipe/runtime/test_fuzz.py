"""Random schedules equal the plain step and leave nothing behind; the check of a program agrees with running it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor

from optpipe.compile import Action, Program, check_program, compile_schedule
from optpipe.compile.events import Rules, local_needs
from optpipe.errors import DeadlockError, OrderError, TrainingError
from optpipe.ops import Op
from optpipe.runtime import Mailbox, MemoryMeter, Pipeline
from optpipe.train.check import gradient_error
from solver.build import build_schedule
from tests.optpipe.runtime.chains import M, batch, chain, gradients, plain_gradients, specs, stages_of
from tests.optpipe.runtime.rendezvous import Rendezvous
from tests.optpipe.runtime.schedules import random_placement, random_schedule
from tests.recomputing import random_recomputing
from tests.sample import some

MAX_ERROR = 1e-12
DTYPE = torch.float64
GROUPS, A_GROUP = 10, 20
CORRUPTED = 12
"""In each group."""


@cache
def program_of(seed: int) -> Program:
    """A random placement, order, mix of BW and B + W, set of offloads and waits."""
    return compile_schedule(random_schedule(random_placement(Random(seed), microbatches=M), seed))


def programs(group: int, count: int) -> Iterator[Program]:
    return map(program_of, range(group * count, (group + 1) * count))


def error(found: list[Tensor], plain: list[Tensor]) -> float:
    return max(gradient_error(ours, theirs) for ours, theirs in zip(found, plain, strict=True))


@pytest.mark.parametrize("group", some(range(GROUPS)))
def test_random_schedules_equal_the_plain_step_and_leave_nothing(group: int) -> None:
    for program in programs(group, A_GROUP):
        assert_equals_the_plain_step_and_leaves_nothing(program)


@pytest.mark.parametrize("group", some(range(GROUPS)))
def test_random_schedules_with_recomputation_equal_the_plain_step_and_leave_nothing(group: int) -> None:
    for seed in range(group * A_GROUP, (group + 1) * A_GROUP):
        problem, orders = random_recomputing(Random(seed))
        program = compile_schedule(build_schedule(problem, orders, 0.0, "random", 0.0))
        # The chain's stages leave as a whole or recompute as a whole, whatever part the modes speak of.
        program = replace(program, modes=dict.fromkeys(program.recomputed, "full"))
        assert_equals_the_plain_step_and_leaves_nothing(program)


def assert_equals_the_plain_step_and_leaves_nothing(program: Program) -> None:
    stages, m = len(program.placement), program.microbatches
    inputs, targets = (part[:m] for part in batch(stages, DTYPE))
    modules = chain(stages, DTYPE)
    plain = plain_gradients(modules, inputs, targets)
    own, devices = stages_of(modules, gradient_scale=1 / m), range(len(program.devices))
    pipeline = Pipeline(program, own, devices, Mailbox(), specs(stages, DTYPE))
    for _ in range(2):
        meter = MemoryMeter()
        pipeline.run(inputs, targets, meter)
        assert error(gradients(modules), plain) <= MAX_ERROR
        assert not any(meter.live_bytes.values())
        assert not any(slabs.in_use_bytes for slabs in pipeline.host_slabs.values())


@pytest.mark.parametrize("group", some(range(GROUPS)))
def test_what_the_check_accepts_runs_and_what_it_refuses_does_not(group: int) -> None:
    """On threads that wait for one another at every message."""
    rng = Random(group)
    for program in programs(group, CORRUPTED):
        corrupted = corrupt(program, rng)
        assert is_accepted(corrupted) == runs_right(corrupted), f"{program.devices}\n{corrupted.devices}"


def test_corrupted_programs_are_of_every_kind() -> None:
    """The programs of the test above: some are still right, some break a rule, some deadlock."""
    verdicts = [
        verdict(corrupt(program, rng))
        for group in range(GROUPS)
        for rng in [Random(group)]
        for program in programs(group, CORRUPTED)
    ]
    assert min(verdicts.count(kind) for kind in (None, OrderError, DeadlockError)) >= 3, verdicts


def corrupt(program: Program, rng: Random) -> Program:
    """One action of one device moved past some others, or a message past some messages; the waits of the new order."""
    lists = [list(actions) for actions in program.devices]
    actions = rng.choice([actions for actions in lists if actions])
    places = list(range(len(actions)))
    messages = [k for k in places if actions[k].peer is not None]
    if messages and rng.random() < 0.7:
        places = messages
    at = rng.randrange(len(places))
    to = min(max(0, at + rng.choice((-3, -2, -1, 1, 2, 3))), len(places) - 1)
    actions.insert(places[to], actions.pop(places[at]))
    changed = replace(program, devices=tuple(map(tuple, lists)))
    return replace(changed, devices=tuple(tuple(_with_waits(changed, actions)) for actions in changed.devices))


def _with_waits(program: Program, actions: tuple[Action, ...]) -> Iterator[Action]:
    """All that the rules ask for: only the order can be wrong."""
    rules = Rules(program.placement, {action[:3] for action in program.actions()})
    users: dict[int | None, Action] = {}
    for action, needs in zip(actions, local_needs(actions, rules), strict=True):
        waits = [Op(*need) for need in needs]
        if action.kind == "O":
            if before := users.get(action.slab):
                waits.append(Op("R", before.stage, before.microbatch))
            users[action.slab] = action
        yield action._replace(waits=tuple(waits))


def is_accepted(program: Program) -> bool:
    return verdict(program) is None


def verdict(program: Program) -> type[Exception] | None:
    try:
        check_program(program)
    except (OrderError, DeadlockError) as error:
        return type(error)
    return None


def runs_right(program: Program) -> bool:
    """True if every device, in a thread of its own, ends with the gradients of the plain step."""
    count = len(program.placement)
    modules, (inputs, targets) = chain(count, DTYPE), batch(count, DTYPE)
    plain = plain_gradients(modules, inputs, targets)
    stages, rendezvous = stages_of(modules), Rendezvous(len(program.devices))

    def run(device: int) -> bool:
        mine = {s: stages[s] for s, home in enumerate(program.placement) if home == device}
        try:
            Pipeline(program, mine, [device], rendezvous, specs(count, DTYPE)).run(inputs, targets)
        except TrainingError:
            return False
        finally:
            rendezvous.leave(device)
        return True

    with ThreadPoolExecutor(len(program.devices)) as threads:
        finished = list(threads.map(run, range(len(program.devices))))
    return all(finished) and error(gradients(modules), plain) <= MAX_ERROR
