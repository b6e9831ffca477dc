"""NeMo AutoModel's pipeline by a planned schedule, on the CPU over gloo. Installs it in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from optpipe.export.launch import launch_files
from tests.optpipe.export.test_launch import LLAMA, SEARCHED
from tests.optpipe.pipelining.test_same_program import planned
from tests.torchrun import LOOPBACK

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGES = ["nemo-automodel==0.7.0", "transformers==5.18.0", "huggingface_hub", "tokenizers", "safetensors", "regex"]
"""Without what they need beyond this: CUDA, which its own dependencies bring, has no use here."""

READ = """
import json, sys
from nemo_automodel.cli.utils import resolve_recipe_name
from nemo_automodel.components.config.loader import load_yaml_config
from nemo_automodel.recipes._dist_utils import parse_distributed_section
from torch.distributed.pipelining.schedules import get_schedule_class

config = load_yaml_config(sys.argv[1])
read = parse_distributed_section(config.distributed.to_dict())
pipeline = read["pipeline_config"]
print(json.dumps({
    "recipe": resolve_recipe_name(config.recipe),
    "schedule": get_schedule_class(pipeline.pp_schedule).__name__,
    "stages": [len(part) for part in pipeline.module_fqns_per_model_part],
    "sizes": [read[name] for name in ("tp_size", "cp_size", "pp_size", "ep_size")],
    "checkpointing": read["activation_checkpointing"],
}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python of an environment that has it."""
    folder = tmp_path_factory.mktemp("nemo")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    packages.joinpath("beside.pth").write_text(f"{ROOT}\n" + "\n".join(p for p in sys.path if p.endswith("-packages")))
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES, "tqdm", "typer-slim", "torchao"]
    subprocess.run(install, check=True, timeout=1500)
    return python


def test_it_reads_its_launch_file(python: str, tmp_path: Path) -> None:
    path = tmp_path / "automodel.yaml"
    for plan, checkpointing in ((SEARCHED, False), (LLAMA, True)):
        path.write_text(launch_files(plan, "automodel").files[path.name])
        done = subprocess.run([python, "-c", READ, str(path)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout.splitlines()[-1]) == {
            "recipe": "nemo_automodel.recipes.llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction",
            "schedule": "ScheduleInterleaved1F1B",
            "stages": [size + 1 + (s == 7) for s, size in enumerate(plan["best"]["cut"])],
            "sizes": [2, 2, 4, 1],
            "checkpointing": checkpointing,
        }


def test_gradients_are_those_of_its_own_1f1b(python: str, tmp_path: Path) -> None:
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
