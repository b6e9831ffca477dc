"""Child of the process pool: reads tasks from stdin, writes answers to stdout.

A task is one line of JSON and as many bytes as it names; so is an answer. The first answer belongs to no task: it means
that the process is ready. Started by `api.process_pool.HeavyProcess` as
``python -m api.process_pool_child PARENT_PID``.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, BinaryIO

from api.analysis import FileBody, analysis, comparison, recognition
from api.errors import HttpError, input_error, unprocessable
from api.models import (
    Caps,
    CheckedAnswer,
    LaunchAnswer,
    LaunchFile,
    PlanBody,
    ProblemBody,
    ReadSubmission,
    SubmissionBody,
    hash_submission,
    read_batch,
    read_document,
    read_plan,
    read_submission,
)
from optpipe.errors import InputError, OptPipeError
from optpipe.export import EXPORTERS
from optpipe.export.launch import launch_files
from optpipe.problem import Problem
from optpipe.schedule import Schedule, schedule_text
from solver.cache import canonical_form, rebuild_schedule, text_digest
from solver.layout.fitting import published_schedule
from solver.layout.request import PlanRequest
from solver.layout.strategies import strategy_of
from solver.process import claim_stdout, end_with_parent
from solver.process.parent import load_verifier


def check_submission(body: bytes, caps: Mapping[str, Any]) -> bytes:
    """The figures of a submission within the caps."""
    return CheckedAnswer.of(read_submission(body, Caps(**caps)).problem).model_dump_json().encode()


def parse_submission(body: bytes, caps: Mapping[str, Any], problem_alone: bool) -> bytes:
    """A line with the `ReadSubmission` of a submission within the caps, and the text of its problem."""
    return _parsed(read_submission(body, Caps(**caps), problem_alone))


def parse_batch(body: bytes, caps: Mapping[str, Any]) -> bytes:
    """Results of `parse_submission` for each submission of a batch, with a line break between them."""
    return b"\n".join(map(_parsed, read_batch(body, Caps(**caps))))


def parse_plan(body: bytes, caps: Mapping[str, Any]) -> bytes:
    """The `ReadPlan` of a request within the caps."""
    return read_plan(read_document(PlanBody, body), Caps(**caps)).model_dump_json().encode()


def plan_schedule(body: bytes, values: Mapping[str, Any], max_ops: int) -> bytes:
    """The published schedule of the strategy with these values by option, for the request of a plan in the body."""
    schedule = published_schedule(PlanRequest.from_json(body).job(), strategy_of(values), max_ops)
    return schedule_text(schedule).encode()


def _parsed(submission: SubmissionBody) -> bytes:
    text = submission.problem.to_json().encode()
    form = canonical_form(submission.problem)
    read = ReadSubmission(
        name=submission.problem.name,
        objective=submission.problem.objective,
        devices=len(submission.problem.devices),
        stages=len(submission.problem.stages),
        microbatches=submission.problem.microbatches,
        config=submission.config,
        body_hash=hash_submission(submission).hex(),
        digest=text_digest(text).hex(),
        equality_key=form.key,
        time_us=float(form.time_us),
    )
    return read.model_dump_json().encode() + b"\n" + text


def build_equal(body: bytes, orders: str, bound_us: float, method: str, solve_seconds: float) -> bytes:
    """A line with value, bound and bubble, and the document of the schedule of stored orders for the body's problem.

    Nothing where they make none.
    """
    schedule = rebuild_schedule(Problem.from_json(body), orders, bound_us, method, solve_seconds)
    if schedule is None:
        return b""
    head = [schedule.value_us, schedule.bound_us, schedule.bubble]
    return _json(head) + b"\n" + schedule_text(schedule).encode()


def analyze(body: bytes, max_ops: int) -> bytes:
    """The analysis of a schedule."""
    return _json(analysis(read_document(Schedule, body), max_ops))


def compare(body: bytes, caps: Mapping[str, Any], schedules: bool) -> bytes:
    """The published schedules of a problem, side by side; whole where `schedules`."""
    problem = read_document(ProblemBody, body).problem
    Caps(**caps).check_problem(problem)
    return _json(comparison(problem, schedules))


def recognize(body: bytes, max_ops: int) -> bytes:
    """The kind of a file, and the schedules in it."""
    return _json(recognition(read_document(FileBody, body), max_ops))


def export(body: bytes, exporter: str, **options: Any) -> bytes:
    """A schedule in the format of another tool."""
    content = EXPORTERS[exporter].export(Schedule.from_json(body), **options).content
    return content if isinstance(content, bytes) else content.encode()


def launch(body: bytes, trainer: str) -> bytes:
    """The `LaunchAnswer` of a plan."""
    try:
        launched = launch_files(json.loads(body), trainer)
    except InputError as error:  # a plan stands outside the request: no pointer leads to it
        raise unprocessable(error.issues[0].code, f"of the plan, {error}") from None
    files = [LaunchFile(name=name, text=text) for name, text in launched.files.items()]
    if launched.runs_schedule:
        files.append(LaunchFile(name="schedule.json", text=None))
    return LaunchAnswer(files=files, lost=[*launched.lost], seconds=launched.seconds).model_dump_json().encode()


def _json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


TASKS: Mapping[str, Callable[..., bytes]] = {
    task.__name__: task
    for task in (
        check_submission,
        parse_submission,
        parse_batch,
        parse_plan,
        plan_schedule,
        build_equal,
        analyze,
        compare,
        recognize,
        export,
        launch,
    )
}


MOST_MEMORY_BYTES = 2 * 2**30
"""Memory limit of one process: beyond it a task fails, not the machine."""


def main() -> None:
    """Run tasks until stdin ends."""
    end_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    out = claim_stdout()
    load_verifier()
    _send(out, HTTPStatus.OK, b"")  # ready
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        body = sys.stdin.buffer.read(request["bytes"])
        _send(out, *_answer(request["task"], request["options"], body))


def _send(out: BinaryIO, status: HTTPStatus, content: bytes) -> None:
    out.write(json.dumps({"status": status, "bytes": len(content)}).encode() + b"\n")
    out.write(content)
    out.flush()


def _answer(task: str, options: dict[str, Any], body: bytes) -> tuple[HTTPStatus, bytes]:
    try:
        return HTTPStatus.OK, TASKS[task](body, **options)
    except HttpError as error:
        raised = error
    except InputError as error:
        raised = input_error(error)
    except OptPipeError as error:
        raised = unprocessable("cannot_be_done", str(error))
    except MemoryError:
        raised = unprocessable("too_large", f"this takes more than {MOST_MEMORY_BYTES:,} bytes of memory.")
    return raised.status, json.dumps([fault.model_dump() for fault in raised.faults]).encode()


if __name__ == "__main__":
    main()
