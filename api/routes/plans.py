"""Plans for clusters: submission and documents, and the models and machines that are known by name."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Header, Query, Response

from api.errors import unprocessable
from api.jobs.records import BestRevision
from api.jobs.submit import Request, SubmittedPlan
from api.middleware import JsonBody, Key, Owner
from api.models import (
    JobAnswer,
    LaunchAnswer,
    MachinesAnswer,
    ModelsAnswer,
    PlanBody,
    ReadPlan,
    read_document,
    read_plan,
)
from api.openapi import SUBMITTED, WITH_BODY, errors, headers, json_request
from api.routes import documents
from api.routes.documents import CONTENT, DOCUMENT, Format, is_known, validated_by
from api.routes.jobs import VALIDATED, IdempotencyKey, IfNoneMatch, Wait, submitted_response, unless_known
from api.routes.schedules import INLINE_BYTES
from api.service import Service, TheService
from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import load_model, named_models
from optpipe.errors import InputError
from optpipe.export.launch import TRAINERS
from solver.layout.strategies import FIELDS, read_degrees

router = APIRouter(prefix="/v1", tags=["plans"])

EXAMPLE = {
    "model": "llama-3.1-70b",
    "gpus": 64,
    "machine": "h100",
    "sequence": 8192,
    "global_batch": 512,
    "fixed": {"tp": [4, 8]},
    "config": {"time_limit_s": 3},
}

LAUNCH_EXAMPLE = {
    "files": [{"name": "launch.sh", "text": "#!/bin/sh\n..."}],
    "lost": ["model: flags state its shape; base of the rotary angles, epsilon of norms and the like are defaults"],
    "seconds": 56.9,
}


@router.post(
    "/plans",
    status_code=202,
    response_model=JobAnswer,
    responses={
        200: {"model": JobAnswer, "description": "The finished job.", "headers": headers(*SUBMITTED)},
        202: {"description": "The job, queued.", "headers": headers(*SUBMITTED)},
        **errors(*WITH_BODY),
    },
    openapi_extra=json_request(PlanBody, example=EXAMPLE),
)
async def submit(
    service: TheService,
    owner: Owner,
    key: Key,
    body: JsonBody,
    wait: Wait,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Have a training job planned: all strategies rated, the best cut and scheduled. An equal one is answered at once.

    `model` is a name of /v1/models or the object of a config.json, `machine` a name of /v1/machines or a document.
    """
    read = await _read(service, owner, body)
    plan = SubmittedPlan(read.text, read.equality_key, read.name, read.gpus)
    request = Request(plan, read.config, owner, idempotency_key, bytes.fromhex(read.body_hash))
    submission = await service.store.submit_request(request)
    job = submission.job
    if wait and not job.ended:
        job = await service.store.wait_until_ended(job.id, owner, wait, key.id if key else None)
    return submitted_response(job, submission)


async def _read(service: Service, owner: UUID | None, body: bytes) -> ReadPlan:
    """Read what a body asks for, in a process of the pool if it is large or has a model of its own.

    A few words may describe thousands of layers.
    """
    if len(body) <= INLINE_BYTES:
        plan = read_document(PlanBody, body)
        if isinstance(plan.model, str):
            return read_plan(plan, service.caps)
    answer = await service.pool.run("parse_plan", body, owner, caps=asdict(service.caps))
    return ReadPlan.model_validate_json(answer)


_FOUND = {
    304: {"description": "It is still the one that If-None-Match names.", "headers": headers("ETag")},
    **errors(404),
}


@router.get(
    "/plans/{job_id}/plan",
    response_class=Response,
    responses={
        200: {
            "description": "The plan (`optpipe.plan/1`).",
            "content": {"application/json": {"schema": {"type": "object"}}},
            "headers": headers("ETag"),
        },
        **_FOUND,
    },
)
async def document(
    service: TheService, owner: Owner, job_id: UUID, if_none_match: Annotated[str, Header()] = ""
) -> Response:
    """The best plan so far: every strategy with its end, while strategies are rated those that have ended."""
    revision = await service.store.best_revision(job_id, owner)
    if is_known(_tag(revision), if_none_match):
        return Response(status_code=304, headers=validated_by(_tag(revision)))
    best = await service.store.best_plan(job_id, owner)
    return Response(best.text, headers=validated_by(_tag(best.revision)), media_type="application/json")


def _tag(revision: BestRevision) -> str:
    return f'W/"{revision.revision}-plan"'


@router.get(
    "/plans/{job_id}/schedule",
    response_class=Response,
    responses={
        200: {"description": "The schedule.", "content": CONTENT, "headers": headers("ETag")},
        **_FOUND,
    },
)
async def schedule(
    service: TheService,
    owner: Owner,
    job_id: UUID,
    format: Annotated[Format, Query()] = DOCUMENT,
    drop_offload: Annotated[bool, Query(description="torch-csv: leave out what torch cannot run.")] = False,
    strategy: Annotated[
        str,
        Query(
            max_length=300,
            description="Of the first strategy with these values: what was found for it, else its published one.",
            examples=["tp=8,pp=4,vpp=5"],
        ),
    ] = "",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """The schedule of the best strategy, or of another one: of one pipeline, verified."""
    documents.check_drop_offload(format, drop_offload)
    if not strategy:
        return await documents.best_schedule(service, owner, job_id, format, drop_offload, if_none_match)
    try:
        wanted = read_degrees(strategy, "strategy")
    except InputError as error:  # a parameter stands outside the body: no pointer leads to it
        raise unprocessable("bad_parameter", f"the query parameter {error}") from None
    tag = documents.tag_of(await service.store.best_revision(job_id, owner), format, drop_offload)
    if is_known(tag, if_none_match):
        return Response(status_code=304, headers=validated_by(tag))
    plan = await service.store.best_plan(job_id, owner)
    entries = (await asyncio.to_thread(json.loads, plan.text))["strategies"]
    entry = next((one for one in entries if wanted.items() <= one.items()), None)
    if entry is None:
        raise unprocessable("unknown_strategy", f"no strategy of this plan has {strategy!a}. Maybe see its document.")
    if (number := entry.get("solved")) is not None:
        found = await service.store.best_plan(job_id, owner, number + 1)
    else:
        body = (await service.store.problem_text(job_id, owner, "plan")).encode()
        values = {name: entry[name] for name in FIELDS if name in entry}  # an older version had fewer
        text = await service.pool.run("plan_schedule", body, owner, values=values, max_ops=service.caps.max_ops)
        found = replace(plan, text=text.decode())
    answer = await documents.schedule_response(service, owner, job_id, found, format, drop_offload)
    answer.headers.update(validated_by(documents.tag_of(plan.revision, format, drop_offload)))
    return answer


if TYPE_CHECKING:
    Trainer = str
else:
    Trainer = Literal[*TRAINERS]


@router.get(
    "/plans/{job_id}/export",
    response_model=LaunchAnswer,
    responses={
        200: {
            "description": "The files, or the text of the one that `file` names.",
            "content": {"application/json": {"example": LAUNCH_EXAMPLE}, "text/plain": {"schema": {"type": "string"}}},
            "headers": headers("ETag"),
        },
        **_FOUND,
    },
)
async def export(
    service: TheService,
    owner: Owner,
    job_id: UUID,
    to: Annotated[Trainer, Query(description="The trainer.", examples=["megatron"])],
    file: Annotated[
        str, Query(max_length=100, description="Answer with the text of this file alone.", examples=["launch.sh"])
    ] = "",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """Files that start the strategy to take in a trainer, and what they lose against the plan."""
    tag = _tag(await service.store.best_revision(job_id, owner))
    if is_known(tag, if_none_match):
        return Response(status_code=304, headers=validated_by(tag))
    best = await service.store.best_plan(job_id, owner)
    answer = await service.pool.run("launch", best.text.encode(), owner, trainer=to)
    validated = validated_by(_tag(best.revision))
    if not file:
        return Response(answer, headers=validated, media_type="application/json")
    texts = {one.name: one.text for one in LaunchAnswer.model_validate_json(answer).files}
    if file not in texts:
        raise unprocessable("unknown_file", f"there is no {file!a} for {to}. Maybe {' or '.join(map(repr, texts))}.")
    text = texts[file]
    if text is None:  # the plan's schedule
        plan = await asyncio.to_thread(json.loads, best.text)
        names = FIELDS.keys() - {"schedule"} | {"seconds"}  # `best` has the method that found its schedule
        taken = {name: plan["best"][name] for name in names if name in plan["best"]}
        number = next(one["solved"] for one in plan["strategies"] if "solved" in one and taken.items() <= one.items())
        text = (await service.store.best_plan(job_id, owner, number + 1)).text
    named = {"Content-Disposition": f'inline; filename="{file}"'}
    return Response(text, headers=validated | named, media_type="text/plain")


@router.get(
    "/plans/{job_id}/request",
    response_class=Response,
    responses={
        200: {
            "description": "The request.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/PlanBody"}}},
            "headers": headers("ETag"),
        },
        **_FOUND,
    },
)
async def request(
    service: TheService, owner: Owner, job_id: UUID, if_none_match: Annotated[str, Header()] = ""
) -> Response:
    """The request as it was submitted. The job has the configuration."""
    return await documents.submitted_text(service, owner, job_id, "plan", if_none_match)


@router.get("/models", response_model=ModelsAnswer, responses=errors() | VALIDATED)
async def models(if_none_match: IfNoneMatch = "") -> Response:
    """Language models that are known by name, with their parameters, to the unit."""
    return unless_known(_models(), if_none_match)


@router.get("/machines", response_model=MachinesAnswer, responses=errors() | VALIDATED)
async def machines(if_none_match: IfNoneMatch = "") -> Response:
    """Machines that are known by name: facts of data sheets, and efficiencies of measured steps."""
    return unless_known(_machines(), if_none_match)


@cache
def _models() -> ModelsAnswer:
    return ModelsAnswer(models=[load_model(name).to_data() for name in named_models()])


@cache
def _machines() -> MachinesAnswer:
    return MachinesAnswer(machines=list(named_machines().values()))
