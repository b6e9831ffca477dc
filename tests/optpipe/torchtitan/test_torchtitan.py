"""torchtitan's own trainer by planned schedules, on the CPU over gloo. Installs torchtitan beside what is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from instances.schedules import one_f_one_b, v_wave
from optpipe.export.launch import launch_files
from optpipe.problem import Problem
from optpipe.profile.from_run import join_records
from optpipe.trace.record import load_records
from solver.solve import solve
from tests.optpipe.export.test_launch import LLAMA, SEARCHED
from tests.recomputing import random_executable

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MICROBATCHES = 8
SHORT = ["--training.seq_len", "128"]
VALIDATED = ["--validator.enable", "--validator.dataloader.dataset", "c4_test", "--validator.freq", "2"]

READ = """
import json
from titan_on_cpu import adapt_torch
adapt_torch()
from torchtitan.config import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims

config = ConfigManager().parse_args(["--module", "optpipe_plan", "--config", "plan"])
parallelism = config.parallelism
ParallelDims.from_config(parallelism, 16)
print(json.dumps({
    "stages": [len(part) for part in parallelism.module_fqns_per_model_part],
    "layers": len(config.model_spec.model.layers),
    "schedule": getattr(parallelism, "planned_schedule", None),
    "checkpoint": type(config.activation_checkpoint).__qualname__,
}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python with our extra for torchtitan, whose dependencies come before ours: it needs an older huggingface_hub."""
    folder = tmp_path_factory.mktemp("titan")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    packages.joinpath("beside.pth").write_text(f"{ROOT}\n" + "\n".join(p for p in sys.path if p.endswith("-packages")))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [name for name in project["optional-dependencies"]["torchtitan"] if not name.startswith("optpipe")]
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *extra]
    subprocess.run(command, check=True, timeout=1500)
    return folder / "bin" / "python"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with a tokenizer and a text, which the wheel of torchtitan does not bring, and with our schedules."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    assets = tmp_path / "tests" / "assets"
    (assets / "tokenizer").mkdir(parents=True)
    (assets / "c4_test").mkdir()
    text = (ROOT / "README.md").read_text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    lines = [json.dumps({"text": part}) for part in text.split("\n\n")] * 8
    (assets / "c4_test" / "data.json").write_text("\n".join(lines))
    moved = [(s, i) for s in range(3) for i in range(MICROBATCHES - 1)]  # nothing of the last stage may leave there
    (tmp_path / "fused.json").write_text(v_wave(2, MICROBATCHES, fused=True).to_json())
    (tmp_path / "offload.json").write_text(v_wave(2, MICROBATCHES, moved=moved).to_json())
    (tmp_path / "recomputed.json").write_text(random_executable([0, 1, 1, 0], MICROBATCHES, seed=0).to_json())
    (tmp_path / "1f1b.json").write_text(one_f_one_b(2, MICROBATCHES, fused=True).to_json())
    return tmp_path


class Run:
    """Log of a training: losses and gradient norms of steps, losses of validations, peaks of the last step."""

    def __init__(self, python: Path, folder: Path, processes: int, schedule: str, *options: str) -> None:
        command = [str(python), "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        command += ["--local-addr=127.0.0.1", f"--nproc-per-node={processes}", str(HERE / "titan_on_cpu.py")]
        command += ["--module", "titan_on_cpu", "--config", "llama3_debugmodel"]
        if schedule:
            options = ("--parallelism.planned_schedule", f"{schedule}.json", *options)
        command += ["--parallelism.pipeline_parallel_degree", "2"]
        command += ["--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble", "--training.disable_cuda_graphs"]
        command += ["--debug.seed", "1", "--dump_folder", f"out-{schedule}", *SHORT, *options]
        quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment = os.environ | quiet | {"PYTHONPATH": str(HERE), "HF_HOME": str(folder / "hf")}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
        log = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
        assert done.returncode == 0, log[-8000:]
        self.steps = re.findall(r" step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", log)
        self.validations = re.findall(r"validate step: +(\d+) +loss: +([\d.]+)", log)
        self.deferred = {int(found) for found in re.findall(r"deferred (\d+) peak", log)}
        self.switched = re.findall(r"the next step runs by (\S+)", log)
        found = re.findall(r"rank (\d+) deferred \d+ peak (\d+)", log)
        self.peaks_bytes = [int(peak) for _, peak in sorted(found[-processes:])]
        self.peak_bytes = max(self.peaks_bytes)


def alike(one: list[tuple[str, ...]], other: list[tuple[str, ...]]) -> bool:
    """True if two logs say the same, up to the last of the digits that are shown."""
    rows = list(zip(one, other, strict=True))
    return len(rows) > 1 and all(abs(float(a) - float(b)) < 3e-4 for row in rows for a, b in zip(*row, strict=True))


def test_it_reads_its_launch_file(python: Path, tmp_path: Path) -> None:
    for plan, schedule in ((SEARCHED, str(tmp_path / "schedule.json")), (LLAMA, None)):
        launched = launch_files(plan, "torchtitan")
        (tmp_path / "optpipe_plan.py").write_text(launched.files["optpipe_plan.py"])
        environment = os.environ | {"PYTHONPATH": f"{HERE}:{tmp_path}"}
        done = subprocess.run([python, "-c", READ], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout.splitlines()[-1]) == {
            "stages": [size + (s == 7) for s, size in enumerate(plan["best"]["cut"])],
            "layers": 32,
            "schedule": schedule,
            "checkpoint": "NoneType" if schedule else "FullAC.Config",
        }


def test_pipeline_with_validation_checkpoint_and_accumulation(python: Path, folder: Path) -> None:
    """Its default debug model: a loss in chunks, selective activation checkpoints, FSDP on one replica."""
    options = [*VALIDATED, "--validator.steps", "1", "--checkpoint.enable", "--checkpoint.interval", "2"]
    options += ["--training.global_batch_size", str(2 * MICROBATCHES)]
    fused = Run(python, folder, 2, "fused", "--training.steps", "10", *options)
    offload = Run(python, folder, 2, "offload", "--training.steps", "10", *options)
    assert alike(fused.steps, offload.steps), (fused.steps, offload.steps)
    assert len(offload.steps) == 10
    assert alike(fused.validations, offload.validations), (fused.validations, offload.validations)
    recomputed = Run(python, folder, 2, "recomputed", "--training.steps", "4", *options)
    assert alike(fused.steps[:4], recomputed.steps), (fused.steps, recomputed.steps)
    assert float(offload.steps[-1][1]) < float(offload.steps[0][1])
    assert min(offload.deferred) > 0, "layers split their backward"
    assert (folder / "out-offload" / "checkpoint" / "step-10").is_dir()


def test_offload_lowers_the_peak(python: Path, folder: Path) -> None:
    """With longer sequences: else gathered parameters and their gradients are most of what a step holds."""
    options = ["--training.seq_len", "512", "--training.steps", "2"]
    options += ["--validator.freq", "100", "--validator.dataloader.dataset", "c4_test"]
    fused, offload = Run(python, folder, 2, "fused", *options), Run(python, folder, 2, "offload", *options)
    assert alike(fused.steps, offload.steps), (fused.steps, offload.steps)
    assert offload.peak_bytes < fused.peak_bytes


@pytest.mark.parametrize("policy", ["default", "always"])
def test_pipeline_times_shards(python: Path, folder: Path, policy: str) -> None:
    """With "always" torch's own runtime loses a share of the last stage's gradients where backwards are split."""
    options = ["--parallelism.data_parallel_shard_degree", "2", "--parallelism.spmd_backend", "partial_dtensor"]
    options += ["--parallelism.fsdp_reshard_after_forward", policy, "--training.steps", "3"]
    options += ["--validator.freq", "100", "--validator.dataloader.dataset", "c4_test"]
    fused, offload = Run(python, folder, 4, "fused", *options), Run(python, folder, 4, "offload", *options)
    assert alike(fused.steps, offload.steps), (fused.steps, offload.steps)
    assert min(offload.deferred) > 0
    recomputed = Run(python, folder, 4, "recomputed", *options)
    assert alike(fused.steps, recomputed.steps), (fused.steps, recomputed.steps)


def test_recorded_solved_and_trained_below_the_peak_of_1f1b(python: Path, folder: Path) -> None:
    """From a run to its own schedule: record, make the problem, solve it with less memory when training starts."""
    options = ["--training.seq_len", "512", "--validator.freq", "100", "--validator.dataloader.dataset", "c4_test"]
    Run(python, folder, 2, "", "--parallelism.record", "records", "--training.steps", "6", *options)
    problem = join_records(load_records(folder / "records")).problem()
    full = solve(problem, "1f1b").figures()["peak_bytes_any_timing"]
    data = problem.to_data() | {"devices": [{"memory_bytes": int(0.75 * full[0])}, {"memory_bytes": full[1]}]}
    (folder / "problem.json").write_text(Problem.from_data(data).to_json())
    options += ["--training.steps", "3"]
    found = Run(
        python, folder, 2, "", "--parallelism.solve", "problem.json", "--parallelism.solve_seconds", "5", *options
    )
    expected = Run(python, folder, 2, "1f1b", *options)
    assert alike(found.steps, expected.steps), (found.steps, expected.steps)
    assert found.peaks_bytes[0] < 0.9 * expected.peaks_bytes[0]


def test_schedules_that_are_found_while_it_trains(python: Path, folder: Path) -> None:
    """From the schedule to record by to a published one, and to what a search has found: losses stay those of 1F1B."""
    options = ["--validator.freq", "100", "--validator.dataloader.dataset", "c4_test", "--training.steps", "30"]
    online = ["--parallelism.online", "--parallelism.record_modes", "full", "--parallelism.solve_seconds", "3"]
    found, expected = Run(python, folder, 2, "", *online, *options), Run(python, folder, 2, "1f1b", *options)
    assert "ada-offload" in found.switched, found.switched
    assert len(found.steps) == len(expected.steps) == 30
    for one, other in zip(found.steps, expected.steps, strict=True):  # roundings add up over 30 steps: 6e-4 measured
        assert all(abs(float(a) - float(b)) < 3e-3 for a, b in zip(one, other, strict=True)), (one, other)


def test_tensor_parallelism(python: Path, folder: Path) -> None:
    options = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.spmd_backend", "partial_dtensor"]
    options += ["--training.steps", "3", "--validator.freq", "100", "--validator.dataloader.dataset", "c4_test"]
    fused, offload = Run(python, folder, 4, "fused", *options), Run(python, folder, 4, "offload", *options)
    assert alike(fused.steps, offload.steps), (fused.steps, offload.steps)
    assert min(offload.deferred) > 0
