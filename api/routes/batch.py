"""Several jobs in one request."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.errors import NotFoundError
from api.middleware import JsonBody, Key, Owner, SmallJsonBody
from api.models import BatchAnswer, BatchBody, CancelledAnswer, JobAnswer, JobIds, read_document
from api.openapi import WITH_BODY, errors, headers, json_request
from api.routes.demo_data import BODIES
from api.routes.jobs import IdempotencyKey, cancel_job, rate_headers
from api.routes.schedules import submit_batch
from api.service import TheService

router = APIRouter(prefix="/v1/batch", tags=["schedules"])


@router.post(
    "/submit",
    response_model=BatchAnswer,
    responses={200: {"headers": headers("RateLimit", "RateLimit-Policy")}, **errors(*WITH_BODY)},
    openapi_extra=json_request(BatchBody, example={"submissions": [BODIES["tiny"], BODIES["tiny"]]}),
)
async def submit_many(
    service: TheService, owner: Owner, body: JsonBody, idempotency_key: IdempotencyKey = None
) -> Response:
    """Submit several jobs: all of them, or none where one is wrong or a cap is reached."""
    submissions = await submit_batch(service, owner, body, idempotency_key)
    answer = BatchAnswer.model_construct(jobs=[JobAnswer.of(submission.job) for submission in submissions])
    rate = rate_headers(submissions[-1].rate)
    return Response(answer.model_dump_json(), headers=rate, media_type="application/json")


@router.post(
    "/cancel",
    response_model=CancelledAnswer,
    responses=errors(*WITH_BODY),
    openapi_extra=json_request(JobIds, example={"ids": ["9d5d1ba0-4ff3-4f6b-95b3-0f3e9b0fd5b1"]}),
)
async def cancel_many(service: TheService, owner: Owner, key: Key, body: SmallJsonBody) -> CancelledAnswer:
    """Cancel several jobs, as one request for each would; those that are not there are named."""
    jobs, not_found = [], []
    for job_id in read_document(JobIds, body).ids:
        try:
            jobs.append(JobAnswer.of(await cancel_job(service, owner, key, job_id)))
        except NotFoundError:
            not_found.append(job_id)
    return CancelledAnswer.model_construct(jobs=jobs, not_found=not_found)
