"""S1 for the whole interface: schemathesis makes up requests from its description, good ones and bad ones, and no
answer may be a server error or other than described."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

import httpx

from api.settings import Settings
from tests.api.harness import new_key
from tests.sample import SEED, some

CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "304", "401", "403", "404", "409", "422"]
"""
"""Statuses of requests that the description allows.

It cannot say that a stage's device must be among the devices, nor that only keys of admins may ask for the jobs of all
keys. 304 answers an If-None-Match that every answer matches."""

EXAMPLES = 3
"""Made-up requests a call, besides those that try every single field."""

SPARED = "phases.coverage.enabled = false\n"
"""Settings of calls whose single fields this run leaves out: a problem has so many that most requests are theirs."""

ENDLESS = "/v1/events"
"""Its stream has no end; `test_events` has what it answers."""


def test_every_answer_is_as_described(service_url: str, service_settings: Settings, tmp_path: Path) -> None:
    config = tmp_path / "schemathesis.toml"
    description = f"{service_url}/openapi.json"
    command = [Path(sys.executable).with_name("st"), "--config-file", config, "run", description]
    authorization = f"Bearer {new_key(service_settings)}"
    options = {
        "--header": f"Authorization: {authorization}",
        "--checks": "all",
        "--max-examples": str(EXAMPLES),
        "--request-timeout": "90",
        "--seed": str(SEED),
    }
    described = httpx.get(description, headers={"Authorization": authorization}).json()["paths"]
    chosen = some(sorted(described.keys() - {ENDLESS}))
    spared = sorted({*chosen} - {*some(chosen)})
    config.write_text(CONFIG + "".join(f'[[operations]]\ninclude-path = "{path}"\n{SPARED}' for path in spared))
    # Apart: an id names one job under both prefixes, and what is deleted under one is gone under the other.
    for is_plan in (False, True):
        paths = [("--include-path", path) for path in chosen if path.startswith("/v1/plans") is is_plan]
        arguments = [*command, "--continue-on-failure", *chain.from_iterable([*options.items(), *paths])]
        if paths:
            run = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, check=False)
            assert run.returncode == 0, run.stdout
