"""Composition of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette_compress import CompressMiddleware

from api.metrics import Metrics
from api.middleware import (
    AccessLog,
    BodyLimit,
    HeadAsGet,
    InPieces,
    LocalRequestsOnly,
    RequireKey,
    SecurityHeaders,
    refuse_ignored_parameters,
)
from api.openapi import describe
from api.problem_details import answer_errors_as_problems
from api.routes import analysis, batch, demo_data, documents, events, health, plans, schedules, solve
from api.routes.jobs import PREFIXES, ROUTERS
from api.service import running_service
from api.settings import Settings
from api.web import mount_page

NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
"""FastAPI can export all of these if environment variables are set; this service sends nothing (promise S8)."""


def _operation_id(route: APIRoute) -> str:
    """Names of routes, with a prefix where they are those of plans: jobs of every kind have some in common."""
    return f"plan_{route.name}" if route.path.startswith(PREFIXES["plan"]) else route.name


def create_app(settings: Settings) -> FastAPI:
    """The application. Its parts run from startup to shutdown; `settings.database_url` must be given."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_service(settings, metrics) as service:
            app.state.service = service
            yield

    app = FastAPI(
        title="OptPipe",
        summary="Schedules for pipeline-parallel training.",
        version=version("optpipe"),
        lifespan=lifespan,
        openapi_url=None,  # a route of our own, which asks for a key like all others
        docs_url=None,  # it would load its scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        telemetry=NO_TELEMETRY,
        generate_unique_id_function=_operation_id,
    )
    parts = schedules, plans, solve, batch, documents, events, analysis, demo_data, health
    routers = [*ROUTERS, *(part.router for part in parts)]
    for router in routers:
        app.include_router(router, dependencies=[Depends(refuse_ignored_parameters)])
    mount_page(app, settings.docs_folder)
    answer_errors_as_problems(app, [route for router in routers for route in router.routes])
    describe(app, settings.keys_required)
    # The last one added sees a request first.
    app.add_middleware(InPieces)
    app.add_middleware(CompressMiddleware, brotli=False)
    app.add_middleware(HeadAsGet)
    if settings.keys_required:
        app.add_middleware(RequireKey)
    else:
        app.add_middleware(LocalRequestsOnly, host=settings.host)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(AccessLog, metrics=metrics)
    return app
