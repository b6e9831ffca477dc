"""The OpenAPI document: FastAPI's, with the bodies that are read by our own strict reader, and keys as the security."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.models import EventAnswer
from api.problems import ProblemDetails
from api.submissions import ProblemBody, SubmissionBody
from optpipe.document import Document
from optpipe.schedule import Schedule

_REFERENCE = "#/components/schemas/{model}"
_DOCUMENTS: tuple[type[BaseModel], ...] = (SubmissionBody, ProblemBody, Schedule, ProblemDetails, EventAnswer)


def json_request(model: type[Document]) -> dict[str, Any]:
    """What a route that reads `model` with `api.bodies` says of its body."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, keys_required: bool) -> None:
    """Have `app.openapi()` give the document of all routes that are there by now."""
    document = _document(app, keys_required)
    app.openapi = lambda: document  # type: ignore[method-assign]


def _document(app: FastAPI, keys_required: bool) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes, openapi_version="3.1.0"
    )
    _, definitions = models_json_schema([(model, "validation") for model in _DOCUMENTS], ref_template=_REFERENCE)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    if keys_required:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        document["paths"]["/healthz"]["get"]["security"] = []
    return document
