"""Ends of the alternatives of a plan, and what each loses to the best."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from optpipe.errors import InputError, Issue, shown
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from optpipe.units import change_text

End = Literal["solved", "beaten", "does_not_fit"]
"""Solved: it has a value and a bound. Beaten: its bound is not below the best value. Or it does not fit."""

MOST_NAMED = 3
"""Most losses named in one line."""


def at_least_slower(bound: float, best: float) -> str:
    """Reason of an alternative that is beaten."""
    return f"at least {change_text(bound, best)}" if best else "no faster"


def losses_text(lost: Mapping[str, float], whole: float) -> str:
    """The largest of some losses, as shares of a whole."""
    largest = sorted(lost.items(), key=lambda pair: -pair[1])[:MOST_NAMED]
    return ", ".join(f"{name} {value / whole:.0%}" for name, value in largest if value > 0)


def read_pairs(
    text: str, where: str, names: Collection[str], example: str, lists: Collection[str] = ()
) -> dict[str, str]:
    """Values by name of a text such as ``tp=8,pp=2``; those of `lists` may be lists, as in ``cut=5,3``.

    Raises InputError; `where` names the text in it.
    """
    pairs: dict[str, str] = {}
    name = ""
    for part in map(str.strip, text.split(",")):
        before, equals, value = part.partition("=")
        if equals and before in names:
            name = before
            pairs[name] = value
        elif not equals and name in lists:
            pairs[name] += "," + part
        else:
            detail = f"has {shown(part)} but names are {', '.join(names)}. Maybe {example}."
            raise InputError([Issue(where, "unknown", detail)])
    return pairs


def time_by_kind_us(schedule: Schedule) -> dict[str, float]:
    """Time of a schedule by what it goes to; the parts add up to its value.

    Work is the mean of the devices' own, hidden what blocks spare of it, a negative part, imbalance what the busiest
    has more. Transfers and copies are what the same order gains where they take no time; the bubble is the rest.
    """
    problem, orders = schedule.problem, schedule.orders
    busy_us = [device.busy_us for device in schedule.devices]
    count = len(busy_us)
    sent_us = simulate(without_transfers(problem), orders).value_us
    copied_us = simulate(without_copies(without_transfers(problem)), orders).value_us
    work_us, hidden_us = sum(problem.work_us) / count, sum(problem.hidden_us(orders.blocks)) / count
    return {
        "work": work_us,
        "hidden": -hidden_us,
        "bubble": copied_us - max(busy_us),
        "imbalance": max(busy_us) - sum(busy_us) / count,
        "transfers": schedule.value_us - sent_us,
        "copies": sent_us - copied_us,
        "recomputation": sum(busy_us) / count + hidden_us - work_us,
    }


def without_transfers(problem: Problem) -> Problem:
    """The problem with transfers between stages that take no time."""
    return problem.replaced(transfer_us=0)


def without_copies(problem: Problem) -> Problem:
    """The problem with copies to the host and back that take no time."""
    nothing = {"offload_us": 0, "reload_us": 0}
    stages = []
    for stage in problem.stages:
        modes = [
            mode.replaced(offload=mode.offload.replaced(**nothing)) if mode.offload else mode for mode in stage.modes
        ]
        own = {"offload": stage.offload.replaced(**nothing)} if stage.offload else {}
        stages.append(stage.replaced(**own, **({"modes": modes} if modes else {})))
    return problem.replaced(stages=stages)
