"""The service in a process of its own, which a test may kill: ``python -m tests.api.api_process DATABASE_URL PORT``.

Every attempt of Python code to reach another machine is written to stdout, a line each.
"""

from __future__ import annotations

import sys

import uvicorn

from api.app import create_app
from api.logging import configure_logging
from api.settings import Settings
from tests.api.outgoing import watch


def main(database_url: str, port: str) -> None:
    """Serve until the process ends."""
    sys.addaudithook(watch)
    configure_logging(as_json=True)
    settings = Settings.load(database_url=database_url, port=int(port))
    uvicorn.run(create_app(settings), port=settings.port, loop="asyncio", log_config=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
