"""S8: the service sends no requests of its own, whatever it is sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from api.settings import Settings
from tests.api.harness import PROBLEM, api_process, body

ELSEWHERE = "http://optpipe.invalid/x"


def test_nothing_is_asked_of_others(
    settings: Settings, free_tcp_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the framework would send what it measures, if it were let.
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ELSEWHERE)
    problem = PROBLEM.model_copy(update={"name": ELSEWHERE, "source": ELSEWHERE})
    with api_process(settings, free_tcp_port, tmp_path) as api:
        headers = {"Referer": ELSEWHERE, "X-Forwarded-Host": "optpipe.invalid"}
        origin = {"Origin": "http://optpipe.invalid"}
        with httpx.Client(base_url=api.url, headers=headers) as client:
            job = client.post("/v1/schedules", json=body(problem, name=ELSEWHERE)).json()
            client.post("/v1/schedules", json=body() | {"callback": ELSEWHERE})
            assert client.post("/v1/schedules", json=body(), headers=origin).status_code == 403
            client.post("/v1/compare", json={"problem": problem.to_data()}, timeout=90)
            for path in ("/readyz", "/metrics", "/openapi.json", f"/v1/schedules/{job['id']}", "/v1/demo-data"):
                assert client.get(path, timeout=90, headers=origin).status_code == 200
        log = api.log.read_text()
    assert "Application startup complete" in log
    assert [line for line in log.splitlines() if line.startswith(("socket.", "urllib."))] == []


def test_an_attempt_would_be_seen() -> None:
    """The watch of the test above sees what it should."""
    program = (
        "import sys, socket; from tests.api.outgoing import watch; sys.addaudithook(watch)\n"
        "try: socket.create_connection(('optpipe.invalid', 80), timeout=0.1)\n"
        "except OSError: pass"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert "socket.getaddrinfo" in seen.stdout
