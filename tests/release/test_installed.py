"""The wheel in clean environments: what works with which extra, and what the rest says.

Each environment is made by the standard library's venv and holds nothing but the wheel and what it asks for. Commands
run in an empty folder with a home of their own and no other variables, so that neither this repository nor the packages
of the tests can stand in for something that is missing.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from instances import uniform
from optpipe.schedule import schedule_text
from solver.limits import Limits
from solver.solve import solve
from tests.postgresql import server_folder
from tests.release.conftest import ROOT, Distributions

pytestmark = pytest.mark.slow

PROBLEM = ROOT / "examples" / "problems" / "offload-p4-m8.json"
INSTALL_S, COMMAND_S, START_S = 1200, 600, 120


class Installed(NamedTuple):
    """An environment with the wheel, an empty folder to work in, and a home."""

    environment: Path
    folder: Path
    home: Path

    @property
    def variables(self) -> dict[str, str]:
        own = {
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home),
        }  # the second, because for root it is no part of home
        return {"PATH": f"{self.environment / 'bin'}:/usr/bin:/bin", **own}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end."""
        program = str(self.environment / "bin" / words[0])
        return subprocess.run(
            [program, *words[1:]],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )

    def has(self, module: str) -> bool:
        said = self.run("python", "-c", f"import importlib.util as u; print(u.find_spec({module!r}) is not None)")
        return said.stdout.strip() == "True"


@contextmanager
def installed(distributions: Distributions, extras: str) -> Iterator[Installed]:
    """The wheel with `extras` such as ``[serve]``, in an environment of its own."""
    # Not in pytest's own folder: for root PostgreSQL runs as another user, who may not enter there.
    with TemporaryDirectory(prefix="optpipe-release-") as name, server_folder() as home:
        folder = Path(name)
        folder.chmod(0o755)
        install(distributions.wheel, extras, folder / "environment")
        empty = folder / "empty"
        empty.mkdir()
        yield Installed(folder / "environment", empty, home)


def install(wheel: Path, extras: str, environment: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=COMMAND_S)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    done = subprocess.run([*pip, f"{wheel}{extras}"], capture_output=True, text=True, timeout=INSTALL_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def plain(distributions: Distributions) -> Iterator[Installed]:
    with installed(distributions, "") as environment:
        simple = solve(uniform(2, 2), "1f1b", Limits(time_limit_s=10.0))
        (environment.folder / "simple.json").write_text(schedule_text(simple))
        yield environment


@pytest.fixture(scope="module")
def serving(distributions: Distributions) -> Iterator[Installed]:
    with installed(distributions, "[serve]") as environment:
        yield environment


def test_the_wheel_alone_solves_verifies_and_draws(plain: Installed) -> None:
    assert not any(plain.has(module) for module in ("torch", "fastapi", "pytest", "hatchling"))
    solved = plain.run("optpipe", "solve", str(PROBLEM), "-o", "schedule.json", "--time-limit", "5", "--json")
    assert solved.returncode == 0, solved.stderr
    assert json.loads(solved.stdout)["value_us"] > 0
    for words in (("verify", "schedule.json"), ("plot", "schedule.json", "-o", "schedule.svg"), ("methods",)):
        done = plain.run("optpipe", *words)
        assert done.returncode == 0, done.stderr
    assert (plain.folder / "schedule.svg").read_text().startswith("<?xml")


def test_the_wheel_alone_runs_a_suite_and_compares_with_its_records(plain: Installed) -> None:
    done = plain.run("optpipe", "bench", "small", "--only", "a-p4*", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert results
    assert all(result["recorded"] for result in results)


def test_the_wheel_says_its_version(plain: Installed, distributions: Distributions) -> None:
    (_, version) = plain.run("optpipe", "--version").stdout.split()
    assert distributions.wheel.name.startswith(f"optpipe-{version}-")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("train", "--schedule", "simple.json"), "train"),
        (("profile", "--model", "gpt", "--devices", "2", "-o", "problem.json"), "train"),
        (("serve",), "serve"),
        (("worker", "--database-url", "postgresql://localhost/optpipe"), "serve"),
        (("keys", "list"), "serve"),
        (("solve", str(PROBLEM), "--server", "http://127.0.0.1:1"), "serve"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_needs_an_extra_names_it(plain: Installed, words: Sequence[str], extra: str) -> None:
    said = plain.run("optpipe", *words)
    assert said.returncode == 2, said.stderr
    (line,) = said.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(f"Maybe pip install 'optpipe[{extra}]'.")


def test_with_its_extra_it_serves_without_torch(serving: Installed) -> None:
    assert not serving.has("torch")
    with service(serving) as url:
        (script,) = re.findall(r'src="(/static/[^"]+/main\.js)"', fetched(url))
        assert "import" in fetched(f"{url}{script}")
        words = ("--server", url, "-o", "schedule.json", "--time-limit", "5")
        solved = serving.run("optpipe", "solve", str(PROBLEM), *words)
        assert solved.returncode == 0, solved.stderr
    assert serving.run("optpipe", "verify", "schedule.json").returncode == 0


def fetched(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        assert answer.status == 200
        found: bytes = answer.read()
        return found.decode()


@contextmanager
def service(environment: Installed) -> Iterator[str]:
    """`optpipe serve` in the environment, until it answers; stopped as a person would, and it has to stop well."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = environment.folder / "serve.log"
    command = [str(environment.environment / "bin" / "optpipe"), "serve", "--port", str(port)]
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, cwd=environment.folder, env=environment.variables, stdout=written, stderr=subprocess.STDOUT
        )
    try:
        wait_until_it_answers(f"http://127.0.0.1:{port}/healthz", process, log)
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urlopen(url, timeout=5):
                return
        except URLError:
            time.sleep(0.2)
    pytest.fail(f"no answer within {START_S} s:\n{log.read_text()}")
