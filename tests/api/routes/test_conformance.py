"""S1 for the whole interface: schemathesis makes up requests from its description, good ones and bad ones, and no
answer may be a server error or other than described."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from api.settings import Settings
from tests.api.harness import new_key

CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "422"]
"""
"""Statuses of requests that the description allows.

It cannot say that a stage's device must be among the devices, nor that only keys of admins may ask for the jobs of all
keys."""

EXAMPLES = 3
"""Made-up requests a call, besides those that try every single field."""


def test_every_answer_is_as_described(service_url: str, service_settings: Settings, tmp_path: Path) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [Path(sys.executable).with_name("st"), "--config-file", config, "run", f"{service_url}/openapi.json"]
    options = {
        "--header": f"Authorization: Bearer {new_key(service_settings)}",
        "--checks": "all",
        "--max-examples": str(EXAMPLES),
        "--request-timeout": "90",
        "--seed": "1",
        "--exclude-path": "/v1/events",  # its stream has no end; `test_events` has what it answers
    }
    arguments = [*command, "--continue-on-failure", *(part for option in options.items() for part in option)]
    run = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stdout
