"""PlannedSchedule under other versions of torch, each in an environment of its own: several GB from PyPI a version."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TESTS = ["test_planned_schedule.py", "test_wrapped.py", "test_recorder.py"]
NOT_OURS = "not replicate and not torchs_schedule"
"""Functions of torch 2.13: replicate with a mesh, and metadata between stages of a subgroup over gloo."""


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0", "2.11.0", "2.12.1"])
def test_another_version_of_torch(version: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    packages.joinpath("beside.pth").write_text(f"{ROOT}\n" + "\n".join(p for p in sys.path if p.endswith("-packages")))
    python = str(tmp_path / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--ignore-installed", f"torch=={version}"]
    subprocess.run(install, check=True, timeout=3000)
    found = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    assert found.stdout.startswith(version), found.stdout + found.stderr
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", NOT_OURS]
    done = subprocess.run([*command, *(str(HERE / name) for name in TESTS)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
