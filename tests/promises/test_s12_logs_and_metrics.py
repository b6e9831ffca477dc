"""S12: logs and metrics hold no keys and no bodies, and labels take few values whatever clients send."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import structlog

from api.app import create_app
from api.jobs.store import Store
from api.logging import configure_logging
from api.settings import Settings
from tests.api.harness import PROBLEM, body, client_of, listening, log_through_pytest, new_key

SECRET_WORD = "zanzibar"
"""Stands in every place where a client can write something."""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Log of a test, as a process of the service writes it."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    loggers = [logging.getLogger(name) for name in ("", "optpipe", "uvicorn.error")]
    handlers, levels = loggers[0].handlers, [logger.level for logger in loggers]
    configure_logging(as_json=True)
    yield stream
    log_through_pytest()
    loggers[0].handlers = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_nothing_that_clients_wrote(log: io.StringIO, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings.model_copy(update={"require_keys": True})
    secret = new_key(asked)
    with listening(create_app(asked)) as url, client_of(url, secret) as client:
        _call_everything(client)
        monkeypatch.setattr(Store, "get", _break)
        assert client.get(f"/v1/schedules/{uuid4()}").status_code == 500
        metrics = client.get("/metrics").text
    lines = log.getvalue().splitlines()
    assert len([line for line in lines if json.loads(line)["event"] == "request"]) > 10
    assert any(json.loads(line)["event"] == "unexpected" for line in lines)
    for text in (log.getvalue(), metrics):
        assert SECRET_WORD not in text
        assert secret not in text
        assert secret.split("_", 2)[2] not in text
        assert "forward_us" not in text
    _check_labels(metrics)


async def _break(*_: object) -> None:
    raise RuntimeError(SECRET_WORD)


def _call_everything(client: httpx.Client) -> None:
    problem = PROBLEM.model_copy(update={"name": SECRET_WORD, "source": SECRET_WORD})
    client.post("/v1/schedules", json=body(problem, name=SECRET_WORD, tags=[SECRET_WORD]))
    client.post("/v1/schedules", json={SECRET_WORD: 1})
    client.post("/v1/schedules", content=SECRET_WORD, headers={"Content-Type": "application/json"})
    client.post("/v1/schedules", json=body(), headers={"Idempotency-Key": SECRET_WORD})
    client.get("/v1/schedules", params={"tag": SECRET_WORD})
    client.get("/v1/schedules", params={"cursor": SECRET_WORD})
    client.get("/v1/schedules", headers={"Authorization": f"Bearer {SECRET_WORD}"})
    client.get("/v1/schedules", headers={"User-Agent": SECRET_WORD, "Cookie": SECRET_WORD})
    for k in range(30):
        client.get(f"/v1/schedules/{uuid4()}")
        client.get(f"/{SECRET_WORD}/{k}")
        client.get(f"/v1/demo-data/{SECRET_WORD}{k}")
    client.request(SECRET_WORD.upper(), "/v1/schedules")
    client.request("GET", f"/static/{SECRET_WORD}")


def _check_labels(metrics: str) -> None:
    """Each label has the values that the program knows, however many paths were asked for."""
    values: dict[str, set[str]] = {}
    for name, value in re.findall(r'(\w+)="([^"]*)"', metrics):
        values.setdefault(name, set()).add(value)
    assert set(values) == {"method", "route", "status", "le", "limit", "kind"}
    assert values["kind"] == {"gone", "full"}
    assert values["method"] <= {"GET", "POST", "DELETE", "other"}
    assert {"unknown", "/v1/schedules", "/v1/schedules/{job_id}"} <= values["route"]
    assert len(values["route"]) < 10
    assert len(metrics.splitlines()) < 500


@pytest.mark.parametrize("as_json", [True, False])
def test_a_traceback_has_no_values(log: io.StringIO, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", log)  # that of the set-up is pytest's again
    configure_logging(as_json)

    def fail(key: str) -> None:
        raise RuntimeError(f"of {len(key)} letters")

    try:
        fail(SECRET_WORD)
    except RuntimeError as error:
        structlog.get_logger("optpipe.test").error("a bug", exc_info=error)
        logging.getLogger("elsewhere").exception("of a library")
    assert log.getvalue().count("RuntimeError: of 8 letters") == 2
    assert SECRET_WORD not in log.getvalue()


def test_every_line_is_json(log: io.StringIO) -> None:
    structlog.get_logger("optpipe.test").info("text with\nnewline", value=1.5)
    logging.getLogger("elsewhere").warning("of a library: %s", "x")
    entries: list[dict[str, Any]] = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [entry["event"] for entry in entries] == ["text with\nnewline", "of a library: x"]
    assert all({"timestamp", "level", "logger"} <= set(entry) for entry in entries)
