"""The commands of docs/service.md run as they stand on the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from api.app import create_app
from api.settings import Settings
from optpipe.schedule import Schedule
from optpipe.verify import verify
from tests.api.harness import at_once, listening, working
from tests.postgresql import database_url, postgresql, settings

__all__ = ["database_url", "postgresql", "settings"]

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "service.md").read_text()
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_command_of_the_guide(settings: Settings, tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE)
    assert [language for language, _ in blocks].count("bash") > 6
    with working(settings, at_once), listening(create_app(settings)) as url:
        script = "\n".join(_as_shell(language, text) for language, text in blocks)
        out = _run(script.replace("http://localhost:8000", url), tmp_path)
    schedule = Schedule.load(tmp_path / "schedule.json")
    assert verify(schedule).ok
    assert "<svg" in (tmp_path / "schedule.svg").read_text()
    assert json.loads((tmp_path / "analysis.json").read_text())["valid"] is True
    assert json.loads((tmp_path / "comparison.json").read_text())["methods"][0]["value_us"] == schedule.value_us
    assert '"valid":true' in out
    assert "event: status" in out
    assert "this server allows at most 3600 (max_time_limit_s)" in out


def _as_shell(language: str, text: str) -> str:
    return text if language == "bash" else f"python3 <<'PYTHON'\n{text}PYTHON\n"


def _run(script: str, folder: Path) -> str:
    """Output of a script; every command must succeed, and the server must refuse none of them."""
    own = {"OPTPIPE_KEY": "none-is-asked-for", "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
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
