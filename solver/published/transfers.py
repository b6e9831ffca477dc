"""Transfers for compute orders: what leaves the device, when it comes back, and which copy goes first.

The compute ops of each device run in a given order; copies run at the same time (PipeOffload, arXiv 2503.01328):

- what leaves does so as soon as the channel is free, the longest-lived first;
- it comes back shortly before its B, never into room that ops before that B need, so that no copy can lock the device;
- a channel that serves both directions alternates between them, and one behind a switch between its devices too.

An op starts only where memory has room for it: a slow copy delays compute. This is played event by event. An op that
takes memory then waits for the last releases on the other streams that had ended when it started, which keeps memory
safe under any timing (`optpipe.memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from optpipe.kinds import KINDS, WITHOUT_MODES, codes
from optpipe.ops import DeviceOrders, Ints, Op, OpArray, Orders, WaitArray
from optpipe.problem import Problem
from optpipe.simulate import simulate
from optpipe.task_graph import lower
from solver.published.transfer_kernel import (
    DEVICE,
    FIRST,
    FIRST_MEMBER,
    FIRST_STAGE,
    GROUP,
    HOST,
    MEMBER,
    NEXT,
    RELEASED,
    ROOM,
    STAYS,
    WAITED,
    Course,
    State,
    play,
)
from solver.timeline import NO_LIMIT, NONE, B, F, O, R

Activation = tuple[int, int]
"""Stage and microbatch."""


@dataclass(frozen=True)
class TransferRequest:
    """Transfers to plan: at most those of `leaving`, each back `lead` reload times before its B at the earliest."""

    leaving: set[Activation]
    lead: float


class TransferPlanner:
    """Plans transfers for one set of compute orders (of F, B and W), for any number of requests."""

    def __init__(self, problem: Problem, compute: Sequence[Sequence[Op]]) -> None:
        self.problem = problem
        self.compute = [OpArray.of(ops) for ops in compute]
        joined = OpArray.joined(self.compute)
        self.at = np.full((len(KINDS), len(problem.stages), problem.units), NONE, np.int64)
        self.at[joined.kind, joined.stage, joined.microbatch] = np.arange(len(joined))
        kind, stage, microbatch = np.indices(
            (2, *self.at.shape[1:])
        )  # every offload, stage by stage, then every reload
        copies = OpArray((kind + O).ravel(), stage.ravel(), microbatch.ravel())
        self.ops = OpArray.joined([joined, copies])
        self.undisturbed = simulate(problem, Orders.of_compute(self.compute))
        self.course = self._course()

    def plan(self, request: TransferRequest, budgets: Sequence[int | None]) -> Orders | None:
        """Orders with the compute orders given and the transfers requested, within `budgets` (bytes a device).

        An activation that lives shorter than its round trip stays. Returns None where a device has no room for its next
        op and nothing left to offload.
        """
        state = self._begin(self._due(request), budgets)
        copies = play(self.course, state)
        finished = np.array_equal(state.device[NEXT], self.course.device[FIRST, 1:])
        return self._orders(state.copies[:copies], state.waits) if finished else None

    def _course(self) -> Course:
        problem, stages, devices = self.problem, self.problem.stages, len(self.compute)
        graph = lower(problem.with_equal_units())
        types = graph.plain_types[[*codes(WITHOUT_MODES)]]
        listed, first_stage = _flat(problem.stages_of)
        member, first_member = _flat(problem.channel_groups)
        device = np.zeros((5, devices + 1), np.int64)
        device[FIRST] = np.cumsum([0, *map(len, self.compute)])
        device[FIRST_STAGE] = first_stage
        device[FIRST_MEMBER, : len(first_member)] = first_member
        device[MEMBER, :devices] = member
        device[GROUP, member] = np.repeat(np.arange(len(first_member) - 1), np.diff(first_member))
        durations = np.nan_to_num(graph.duration_us[types], nan=inf)
        return Course(
            op=np.array([self.ops.kind, self.ops.stage, self.ops.microbatch]),
            backward=self.at[B],
            device=device,
            stage=np.array([[stage.device for stage in stages], listed]),
            us=np.array([*durations, [*problem.forward_delay_us, 0], [0, *problem.backward_delay_us]], np.float64),
            bytes=np.concatenate([graph.change_bytes[types], graph.needed_bytes[types], graph.device_bytes[types, 1]]),
            duplex=problem.copy_channels.duplex,
            host_limited=problem.host_memory_bytes is not None,
        )

    def _begin(self, due: Ints, budgets: Sequence[int | None]) -> State:
        host, count = self.problem.host_memory_bytes, len(budgets)
        device = np.zeros((WAITED + 9, count), np.int64)
        device[ROOM] = [NO_LIMIT if budget is None else budget for budget in budgets]
        # A share of the host each, since no wait reaches across devices.
        device[HOST] = NO_LIMIT if host is None else host // count
        device[NEXT] = self.course.device[FIRST, :-1]
        device[RELEASED:] = NONE
        return State(
            device=device,
            activation=np.stack([due, np.zeros_like(due), np.zeros_like(due)]),
            tally=np.zeros((4, len(due)), np.int64),
            input_us=np.full((2, *due.shape), np.inf),
            channel=np.full((3, 2 * len(self.problem.channel_groups)), NONE),
            copies=np.empty(2 * due.size, np.int64),
            waits=np.full((len(self.ops), 2), NONE),
        )

    def _due(self, request: TransferRequest) -> Ints:
        """By stage and microbatch the place in the compute orders from which on a reload is due, or STAYS.

        The place is where the times without transfers reach the lead before the B; as a place rather than a time it
        stays right when transfers delay the ops before it.
        """
        forward, backward = self.at[F], self.at[B]
        start_us, end_us = self.undisturbed.start_us, self.undisturbed.end_us
        us, first, home = self.course.us, self.course.device[FIRST], self.course.stage[DEVICE]
        leaving = np.zeros(backward.shape, np.bool_)
        leaving[tuple(np.array(list(request.leaving), np.int64).reshape(-1, 2).T)] = True
        leaving &= start_us[backward] - end_us[forward] >= (us[O] + us[R])[:, None]  # else it is back too late
        due = np.full(backward.shape, STAYS, np.int64)
        for s in np.flatnonzero(leaving.any(axis=1)):
            d = home[s]
            due_us = start_us[backward[s, leaving[s]]] - request.lead * us[R, s]
            due[s, leaving[s]] = first[d] + np.searchsorted(start_us[first[d] : first[d + 1]], due_us)
        return due

    def _orders(self, copies: Ints, waits: Ints) -> Orders:
        """Orders from the copies in the order in which they started, and what each op waits for."""
        ops = self.ops[copies]
        device, reloads, duplex = self.course.stage[DEVICE, ops.stage], ops.kind == R, self.course.duplex
        streams = _split(ops, 2 * device + reloads, 2 * len(self.compute))
        devices = [DeviceOrders(*of) for of in zip(self.compute, streams[::2], streams[1::2], strict=True)]
        groups = self.problem.channel_groups
        served = _split(ops, 2 * self.course.device[GROUP, device] + (reloads & duplex), 2 * len(groups))
        several = [not duplex or len(group) > 1 for group in groups for _ in range(2)]
        channels = [channel for channel, shared in zip(served, several, strict=True) if shared and channel]
        waiting = [np.flatnonzero(column != NONE) for column in waits.T]
        before = [column[numbers] for column, numbers in zip(waits.T, waiting, strict=True)]
        wait_array = WaitArray(self.ops[np.concatenate(waiting)], self.ops[np.concatenate(before)])
        return Orders(devices, wait_array, channels)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """The entries of all lists, and where each list begins and the last ends."""
    entries = np.array([entry for one in lists for entry in one], np.int64)
    return entries, np.cumsum([0, *map(len, lists)])


def _split(ops: OpArray, part: Ints, parts: int) -> list[OpArray]:
    """The ops of each part, in their order."""
    order = np.argsort(part, kind="stable")
    return [ops[places] for places in np.split(order, np.cumsum(np.bincount(part, minlength=parts))[:-1])]
