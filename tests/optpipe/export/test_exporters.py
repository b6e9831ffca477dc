"""A format that is registered is offered by the command line, the service and the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from instances import uniform
from solver.solve import solve

REGISTERED = """
import sys
from optpipe.export import Exported, exporter

@exporter("words", "for readers", title="Words", ending="txt", media_type="text/plain")
def words(schedule):
    return Exported(schedule.method, {"length": len(schedule.method)})

from api.process_pool_child import TASKS
from api.routes.documents import CONTENT, format_for
from api.web.page import mount_page
from fastapi import FastAPI
from fastapi.testclient import TestClient
from optpipe.cli import main

mount_page(app := FastAPI())
assert 'data-format="words" data-ending="txt"><span>Words</span></button>' in TestClient(app).get("/").text
assert format_for("text/plain") == "words" and CONTENT["text/plain"] == {"schema": {"type": "string"}}
assert TASKS["export"](open(sys.argv[1], "rb").read(), exporter="words") == b"1f1b"
main(["export", sys.argv[1], "--to", "words", "-o", sys.argv[2]])
"""


def test_a_format_is_one_function(tmp_path: Path) -> None:
    path, written = tmp_path / "schedule.json", tmp_path / "a.txt"
    path.write_text(solve(uniform(2, 2), "1f1b").to_json())
    command = [sys.executable, "-c", REGISTERED, str(path), str(written)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, f"wrote {written}\n"), done.stderr
    assert written.read_text() == "1f1b"
