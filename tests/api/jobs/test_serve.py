"""`optpipe serve` alone: its PostgreSQL, its worker, and what is left when parts of it are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

from instances import uniform
from tests.postgresql import server_folder

PATIENCE_S = 120.0


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    root = os.getcwd()
    (tmp_path / "structlog.py").write_text("raise ImportError('a file in the folder that somebody happens to be in')")
    monkeypatch.chdir(tmp_path)
    with server_folder() as folder:
        yield os.environ | {"OPTPIPE_DATA_FOLDER": str(folder), "OPTPIPE_HEARTBEAT_S": "1", "PYTHONPATH": root}


def test_it_stands_up_again(environment: dict[str, str], free_tcp_port: int, forked_services: Path) -> None:
    with _serving(environment, free_tcp_port) as (service, client):
        first = _solved(client, microbatches=3)
        made = json.loads(_command(forked_services, environment, "keys", "create", "ci", "--json").stdout)
        assert made["secret"].startswith("optpipe_")

        worker = _worker_of(service)
        worker.kill()
        _solved(client, microbatches=4)  # by the next one

        worker, database = _worker_of(service), _database_of(environment)
        service.kill()
        worker.wait(PATIENCE_S)  # without its parent it ends by itself
    assert database.is_running()
    with _serving(environment, free_tcp_port, python=forked_services / "python") as (service, client):
        assert _database_of(environment) == database  # taken over
        assert client.get(first).json()["status"] == "succeeded"
        _solved(client, microbatches=5)
        (worker,) = _workers_of(_listening_pid(free_tcp_port))
        service.send_signal(signal.SIGTERM)
        assert service.wait(PATIENCE_S) == 0
        worker.wait(1)
        assert _has_ended(database)
    listed = _command(forked_services, environment, "keys", "list", "--json")  # starts the database for itself
    assert [key["name"] for key in json.loads(listed.stdout)] == ["ci"]
    folder = Path(environment["OPTPIPE_DATA_FOLDER"]) / "postgresql"
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(f"postgresql://postgres:@/postgres?host={folder}")


def test_no_worker_where_none_is_asked_for(
    environment: dict[str, str], free_tcp_port: int, forked_services: Path
) -> None:
    with _serving(environment, free_tcp_port, "--no-worker", python=forked_services / "python") as (_, client):
        assert _workers_of(_listening_pid(free_tcp_port)) == []
        answer = client.post("/v1/schedules", json={"problem": uniform(2, 3).to_data()})
        assert answer.json()["status"] == "queued"


def test_a_taken_port_is_refused_before_anything_is_started(environment: dict[str, str], forked_services: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = _command(forked_services, environment, "serve", "--port", str(port))
    assert refused.returncode == 2
    assert f"port is {port}, which another process uses on 127.0.0.1" in refused.stderr
    assert not (Path(environment["OPTPIPE_DATA_FOLDER"]) / "postgresql").exists()
    assert len(refused.stderr.splitlines()) == 1  # nothing is logged of what would have been started


@pytest.mark.parametrize(("host", "error"), [("no.such.host.invalid", "host is"), ("192.0.2.1", "host is")])
def test_a_host_that_is_not_here_is_refused(
    environment: dict[str, str], forked_services: Path, host: str, error: str
) -> None:
    refused = _command(forked_services, environment, "serve", "--host", host)
    assert refused.returncode == 2
    assert error in refused.stderr
    assert "Maybe" in refused.stderr


def _has_ended(process: psutil.Process) -> bool:
    """Also where nobody has asked for its exit code yet."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@contextmanager
def _serving(
    environment: dict[str, str], port: int, *options: str, python: str | Path = sys.executable
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A service that answers, and a client of it."""
    with (
        subprocess.Popen(
            [python, "-P", "-m", "optpipe", "serve", "--port", str(port), *options],
            env=environment,
        ) as service,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=90) as client,
    ):
        try:
            _until(lambda: _answers(client))
            yield service, client
        finally:
            service.terminate()
            service.wait(PATIENCE_S)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").is_success
    except httpx.TransportError:
        return False


def _solved(client: httpx.Client, microbatches: int) -> str:
    """Post a problem and wait for its schedule; where the job is."""
    body = {"problem": uniform(2, microbatches).to_data(), "config": {"method": "zb-h1"}}
    answer = client.post("/v1/schedules", json=body)
    assert answer.status_code == 202
    path = answer.headers["location"]
    _until(lambda: client.get(path).json()["status"] == "succeeded")
    return str(path)


def _database_of(environment: dict[str, str]) -> psutil.Process:
    """The embedded PostgreSQL."""
    file = Path(environment["OPTPIPE_DATA_FOLDER"]) / "postgresql" / "postmaster.pid"
    return psutil.Process(int(file.read_text().split()[0]))


def _worker_of(service: subprocess.Popen[bytes]) -> psutil.Process:
    (worker,) = _workers_of(service.pid)
    return worker


def _listening_pid(port: int) -> int:
    (found,) = (one for one in psutil.net_connections("tcp") if one.laddr[1:] == (port,) and one.status == "LISTEN")
    assert found.pid is not None
    return found.pid


def _workers_of(service_pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(service_pid).children() if "worker" in child.cmdline()]


def _command(forked: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(forked / "python"), "-P", "-m", "optpipe", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def _until(state: Callable[[], bool]) -> None:
    patience_s = time.monotonic() + PATIENCE_S
    while not state():
        assert time.monotonic() < patience_s
        time.sleep(0.1)
