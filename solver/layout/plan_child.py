"""Child process of a plan: reads one request from stdin, writes the plan to stdout as it grows.

Started by `solver.layout.plan_process` as ``python -m solver.layout.plan_child PARENT_PID``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from math import inf
from threading import Thread
from typing import BinaryIO

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from solver.layout.cluster_plan import Plan, Solved, plan_cluster
from solver.layout.request import PlanRequest
from solver.limits import Limits
from solver.process import channel
from solver.process.channel import Message
from solver.process.start import claim_stdout, end_with_parent
from solver.solution import Progress, Solution


def main() -> None:
    """Plan one request, then end at once: `_obey` still reads stdin."""
    end_with_parent(int(sys.argv[1]))
    out = claim_stdout()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    message = json.loads(line)
    limits = Limits(**message["limits"])
    Thread(target=_obey, args=(limits,), name="obey", daemon=True).start()
    try:
        _write(out, _answer(PlanRequest.from_data(message["request"]), limits, message["max_ops"] or inf, out))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _answer(request: PlanRequest, limits: Limits, max_ops: float, out: BinaryIO) -> Message:
    """The last message. Plans so far are written, each with the schedules that none before had."""
    written: list[Solved] = []

    def write(plan: Plan) -> None:
        known = len(written)
        written.extend(one for one in plan.solved if not any(one is other for other in written))
        numbers = {id(one): number for number, one in enumerate(written)}
        _write(
            out,
            {
                "type": "plan",
                "seconds": limits.seconds,
                "document": plan.document(),
                "new": [_schedule_message(one.schedule) for one in written[known:]],
                "schedules": [numbers[id(one)] for one in plan.solved],
            },
        )

    try:
        plan = plan_cluster(request.job(), request.gpus, request.allowed(), limits, write, max_ops=max_ops)
    except OptPipeError as error:
        return channel.error_message(error)
    except MemoryError:
        return channel.OUT_OF_MEMORY
    return {"type": "done", "complete": plan.complete}


def _schedule_message(schedule: Schedule) -> Message:
    solution = Solution(schedule.orders, schedule.value_us, schedule.bound_us, schedule.method)
    message = channel.solution_message("answer", Progress(solution, schedule.solve_seconds))
    return message | {"problem": schedule.problem.to_data()}


def _write(out: BinaryIO, message: Message) -> None:
    out.write(channel.to_line(message))
    out.flush()


def _obey(limits: Limits) -> None:
    """Cancel on request; end at once where the parent has gone."""
    for _ in sys.stdin.buffer:
        limits.cancel.request()
    os._exit(1)


if __name__ == "__main__":
    main()
