"""NeMo AutoModel's pipeline by a planned schedule, on the CPU over gloo. Installs it in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.optpipe.pipelining.test_same_program import planned
from tests.torchrun import LOOPBACK

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGES = ["nemo-automodel==0.7.0", "transformers==5.18.0", "huggingface_hub", "tokenizers", "safetensors", "regex"]
"""Without what they need beyond this: CUDA, which its own dependencies bring, has no use here."""


def test_gradients_are_those_of_its_own_1f1b(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    packages.joinpath("beside.pth").write_text(f"{ROOT}\n" + "\n".join(p for p in sys.path if p.endswith("-packages")))
    python = str(tmp_path / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES, "tqdm", "typer-slim"]
    subprocess.run(install, check=True, timeout=1500)
    (tmp_path / "schedule.json").write_text(planned([0, 1], 4, seed=1).to_json())
    command = [python, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += ["--local-addr=127.0.0.1", "--nproc-per-node=2", str(HERE / "nemo_worker.py")]
    command += [str(tmp_path / "schedule.json"), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | LOOPBACK, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["compared"] > 15
        assert found["error"] < 1e-6
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)
