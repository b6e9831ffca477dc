"""The commands of docs/service.md run as they stand on the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from api.app import create_app
from api.settings import Settings
from optpipe.schedule import Schedule
from optpipe.verify import verify
from tests.api.harness import at_once, listening, working
from tests.postgresql import database_url, settings

__all__ = ["database_url", "settings"]

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "service.md").read_text()
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

LIMIT = re.compile(r"(time_limit_s\W+|--time-limit )\d+\b(?!\*)")
"""Time limits but for the one that the server refuses: what a longer search finds is not compared with anything."""


def test_every_command_of_the_guide(settings: Settings, tmp_path: Path, forked: Path, forked_pool: None) -> None:
    blocks = BLOCK.findall(PAGE)
    assert [language for language, _ in blocks].count("bash") > 6
    with listening(create_app(settings)) as url, working(settings, at_once):
        script = LIMIT.sub(r"\g<1>6", "\n".join(_as_shell(language, text) for language, text in blocks))
        out = _run(script.replace("http://localhost:8000", url), tmp_path, forked)
    schedule = Schedule.load(tmp_path / "schedule.json")
    assert verify(schedule).ok
    assert "<svg" in (tmp_path / "schedule.svg").read_text()
    assert json.loads((tmp_path / "analysis.json").read_text())["valid"] is True
    assert json.loads((tmp_path / "comparison.json").read_text())["methods"][0]["value_us"] == schedule.value_us
    assert '"valid":true' in out
    assert "event: status" in out
    assert "this server allows at most 3600 (max_time_limit_s)" in out


def _as_shell(language: str, text: str) -> str:
    return text if language == "bash" else f"python3 - <<'PYTHON'\n{text}PYTHON\n"


def _run(script: str, folder: Path, commands: Path) -> str:
    """Output of a script; every command must succeed, and the server must refuse none of them."""
    own = {"OPTPIPE_KEY": "none-is-asked-for", "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    strict = 'set -euo pipefail\ncurl() { command curl --fail-with-body "$@"; }\n'
    run = subprocess.run(
        ["bash", "-c", strict + script],
        cwd=folder,
        env=os.environ | own | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
