"""Routes of the page and the headers it is sent with."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path, PurePosixPath

from fastapi import FastAPI
from fastapi.exceptions import HTTPException
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.types import Scope

from api.web.terms import TERMS
from optpipe.export import EXPORTERS
from optpipe.export.launch import TRAINERS
from optpipe.kinds import PASS_COLOURS, ROWS
from optpipe.plot.style import BUDGET, FAINT_INK, GRID, IDLE, INK, LIGHTEST, MEMORY_EDGE, MEMORY_FILL
from solver.methods import METHODS

STATIC = Path(__file__).parent / "static"
TEMPLATES = Path(__file__).parent / "templates"

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Own files only. The last directive makes the browser refuse any text that would become markup (promise S11)."""

PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of the page; harmless on every other response."""


def is_page_path(path: str) -> bool:
    """True for the page, its files and the documentation, which need no key: they hold no data, and the key is typed
    there."""
    return path == "/" or path.startswith(("/static/", "/docs/"))


def mount_page(app: FastAPI, docs: Path | None = None) -> None:
    """Serve the page at ``/`` and its files under ``/static/DIGEST/``; none of them stands in the OpenAPI document.

    The files are read once: no request leads to a path on disk. The digest lets browsers keep them for good and never
    mix two versions. The site in the folder `docs` is served under ``/docs/`` where it was built.
    """
    has_docs = docs is not None and (docs / "index.html").is_file()
    if docs and has_docs:
        app.mount("/docs", _Site(docs))
    sources = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in STATIC.rglob("*.*")}
    content = sorted(sources.items()), sorted(_palette().items())
    folder = f"/static/{hashlib.sha256(repr(content).encode()).hexdigest()[:16]}"
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    modules = sorted(path for path in sources if path.endswith(".js"))
    formats = [one for one in EXPORTERS.values() if one.media_type]
    page = environment.get_template("index.html").render(
        folder=folder,
        modules=modules,
        methods=METHODS.values(),
        formats=formats,
        kinds=[{"name": row.name, "label": row.label} for row in ROWS]
        + [{"name": name, "label": "spread pass"} for name in _PASS_LOOKS],
        trainers=TRAINERS,
        terms=TERMS,
        has_docs=has_docs,
    )
    palette = environment.get_template("palette.css").render(colours=_palette())
    files = sources | {"palette.css": palette.encode()}

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers={**PAGE_HEADERS, "Cache-Control": "no-cache"})

    @app.get(f"{folder}/{{path:path}}", include_in_schema=False)
    async def file(path: str) -> Response:
        if path not in files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return Response(files[path], media_type=_MEDIA_TYPES[PurePosixPath(path).suffix], headers=_KEPT)


class _Site(StaticFiles):
    """The documentation, whose theme has styles and a line of script within its pages: those of its first page run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(directory=folder, html=True)
        inline = re.findall(r"<script>(.*?)</script>", (folder / "index.html").read_text(), re.DOTALL)
        hashes = (f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inline)
        self._policy = "; ".join(
            (
                "default-src 'none'",
                " ".join(("script-src 'self'", *hashes)),
                "style-src 'self' 'unsafe-inline'",
                "img-src 'self' data:",
                "font-src 'self'",
                "connect-src 'self'",
                "base-uri 'none'",
                "form-action 'self'",
                "frame-ancestors 'none'",
            )
        )

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file of the folder, with the site's own policy."""
        response = await super().get_response(path, scope)
        response.headers.update({**PAGE_HEADERS, "Content-Security-Policy": self._policy, "Cache-Control": "no-cache"})
        return response


_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_KEPT = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}


_PASS_LOOKS = {f"pass{n}": colour for n, colour in enumerate(PASS_COLOURS)}
"""Names of the looks of spread passes, which problems name, with their colours (`optpipe.kinds.look_of`)."""


def _palette() -> dict[str, str]:
    """The colours of `optpipe.plot` as custom properties, so that page and pictures look alike."""
    colours = {
        "idle": IDLE,
        "grid": GRID,
        "ink": INK,
        "faint-ink": FAINT_INK,
        "memory-fill": MEMORY_FILL,
        "memory-edge": MEMORY_EDGE,
        "budget": BUDGET,
        "lightest": f"{LIGHTEST:g}",
    }
    return (
        colours
        | {f"op-{row.name.lower()}": row.colour for row in ROWS}
        | {f"op-{n}": c for n, c in _PASS_LOOKS.items()}
    )
