"""Launch files: every trainer gets the plan's own sizes, cut and settings, or says why it cannot run the plan."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import load_model, named_models, read_model
from optpipe.cluster.software import MEGATRON
from optpipe.errors import InputError
from optpipe.export.launch import TRAINERS, LaunchFiles, launch_files
from optpipe.export.launch.megatron import group_size
from optpipe.export.launch.reading import Launch
from optpipe.export.megatron_layout import parse_layout
from optpipe.units import time_text
from solver.layout.cluster_plan import plan_cluster
from solver.layout.fitting import Job
from solver.limits import Limits

Plan = dict[str, Any]


def planned(
    model: str = "llama-3.1-8b", gpus: int = 16, machine: str = "h100", batch: int = 256, **fixed: object
) -> Plan:
    """A plan by closed forms alone."""
    read = load_model(model)
    job = Job(read, named_machines()[machine], min(2048, read.positions or 2048), batch, MEGATRON)
    return plan_cluster(job, gpus, {name: [value] for name, value in fixed.items()}, Limits(0)).document()


def scheduled(plan: Plan, cut: list[int], placement: str = "interleaved-2", **in_1f1b: object) -> Plan:
    """The plan with a schedule of two chunks a device that was searched."""
    best = deepcopy(plan["best"]) | {"schedule": "ada-offload", "schedule_file": "schedule.json", "cut": cut}
    best |= {"placement": placement, "vpp": len(cut) // best["pp"], "seconds": best["published"]["seconds"] * 0.9}
    best["activations"] = {"all": 128, "offloaded": 9, "recomputed": 7}
    fixed = {"activations": "kept", "seconds": best["seconds"] * 1.05, "short_bytes": 0} | in_1f1b
    return plan | {"best": best | {"in_1f1b": None if placement == "v" else fixed}}


UNEVEN = [1, 6, 5, 4, 5, 5, 7, 1]  # the embedding alone, the head alone
LLAMA = planned(pp=4, tp=2, cp=2, dp=1, vpp=2, microbatch_size=2, recompute="full")
SEARCHED = scheduled(LLAMA, UNEVEN)
LEAVING = planned(pp=4, tp=2, cp=2, dp=1, vpp=2, microbatch_size=2, offload="yes")
FEW = LLAMA | {"global_batch": 4}
EXPERTS = planned("deepseek-v3", 256, "b200", pp=8, ep=32, tp=1, cp=1, vpp=1, microbatch_size=1)
ALONE = scheduled(EXPERTS, [10, 10, 10, 10, 11, 11, 1, 1], "linear")
HIDDEN = planned("qwen3-30b-a3b", 32, pp=4, vpp=3, ep=8, tp=1, overlap="yes")
SPREAD = planned("gemma-2-9b", 32, pp=16, vocabulary="spread")
OWN = planned(pp=8, tp=1, cp=1, vocabulary="own")


def arguments(launched: LaunchFiles) -> dict[str, list[str]]:
    """Flags of Megatron-LM with their values."""
    text = launched.files["launch.sh"].partition('pretrain_gpt.py"')[2].replace("\\\n", " ").replace('"$@"', "")
    found: dict[str, list[str]] = {}
    for word in shlex.split(text):
        if word.startswith("--"):
            values = found.setdefault(word, [])
        else:
            values.append(word)
    return found


def test_activations_that_leave_as_rated() -> None:
    assert "--offload-modules" in arguments(launch_files(LEAVING, "megatron"))
    assert "--offload-modules" not in arguments(launch_files(LLAMA, "megatron"))
    assert "fine_grained_activation_offloading" in launch_files(LEAVING, "bridge").files["pretrain.py"]


@pytest.fixture(scope="module")
def layout_class() -> Iterator[Any]:
    """Megatron-Core's own reader of layouts, without the rest of it, which imports torch and much else."""
    root = find_spec("megatron")
    assert root is not None, "megatron-core is not installed. Maybe make setup."
    core = next(Path(path) / "core" for path in root.submodule_search_locations or () if (Path(path) / "core").is_dir())
    names = ["megatron", "megatron.core", "megatron.core.transformer", "megatron.core.parallel_state"]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
    vars(sys.modules["megatron.core"])["parallel_state"] = sys.modules["megatron.core.parallel_state"]

    def load(name: str) -> ModuleType:
        spec = spec_from_file_location(f"megatron.core.transformer.{name}", core / "transformer" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    load("enums")
    yield load("pipeline_parallel_layer_layout").PipelineParallelLayerLayout
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


@pytest.mark.parametrize(
    "plan",
    [LLAMA, SEARCHED, scheduled(LLAMA, [2, 3, 4, 5, 6, 5, 5, 4]), EXPERTS, ALONE],
    ids=["even", "ends alone", "uneven", "with predicted tokens", "which a stage has alone"],
)
def test_megatron_core_reads_the_cut_from_the_layout(layout_class: Any, plan: Plan) -> None:
    best, model = plan["best"], read_model(plan["config"])
    text = arguments(launch_files(plan, "megatron"))["--pipeline-model-parallel-layout"][0]
    layout = layout_class(text, best["pp"])
    layout.validate_layer_layout(len(model.layers), model.predicted_tokens or None)
    stages = [layout.layout[s % best["pp"]][s // best["pp"]] for s in range(len(best["cut"]))]
    assert [len(stage) for stage in stages] == best["cut"]
    predicted = [s for s, stage in enumerate(stages) for layer in stage if layer.name == "mtp"]
    assert Launch.of(plan).stages_of_prediction(best["cut"]) == predicted
    assert layout.virtual_pipeline_model_parallel_size == best["vpp"]
    bridge = launch_files(plan, "bridge").files["pretrain.py"]
    assert f"model.pipeline_model_parallel_layout = {text!r}" in bridge


def test_megatron_gets_all_sizes() -> None:
    flags = arguments(launch_files(SEARCHED, "megatron"))
    expected = {
        "--tensor-model-parallel-size": "2",
        "--context-parallel-size": "2",
        "--pipeline-model-parallel-size": "4",
        "--micro-batch-size": "2",
        "--global-batch-size": "256",
        "--seq-length": "2048",
        "--num-layers": "32",
        "--hidden-size": "4096",
        "--num-query-groups": "8",
        "--vocab-size": "128256",
    }
    assert {name: flags[name][0] for name in expected} == expected
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--bf16", "--swiglu"} <= flags.keys()
    assert not {"--recompute-granularity", "--num-experts", "--expert-model-parallel-size"} & flags.keys()
    full = arguments(launch_files(LLAMA, "megatron"))
    assert (full["--recompute-granularity"], full["--recompute-num-layers"]) == (["full"], ["1"])
    experts = arguments(launch_files(EXPERTS, "megatron"))
    assert (experts["--expert-model-parallel-size"], experts["--mtp-num-layers"]) == (["32"], ["1"])
    assert experts["--moe-layer-freq"] == ["([0]*3+[1]*58)"]


def test_learned_positions_are_those_of_the_model() -> None:
    """However short the sequence, and rotary angles need as many as that."""
    flags = arguments(launch_files(planned("gpt2-xl", 8, pp=1, tp=1) | {"sequence": 512}, "megatron"))
    assert (flags["--seq-length"], flags["--max-position-embeddings"]) == (["512"], ["1024"])
    assert flags["--position-embedding-type"] == ["learned_absolute"]
    flags = arguments(launch_files(LLAMA, "megatron"))
    assert (flags["--max-position-embeddings"], flags["--position-embedding-type"]) == (["2048"], ["rope"])
    with pytest.raises(InputError, match="sequence is 4,096 but gpt2-xl learns 1,024 positions"):
        launch_files(planned("gpt2-xl", 8, pp=1, tp=1) | {"sequence": 4096}, "megatron")


def test_multi_token_prediction_stays_where_the_trainer_has_it() -> None:
    """Megatron-Core has all of it in one stage, AutoModel in the last, and only models that are not read by name."""
    none = "layers of multi-token prediction (1): its class of deepseek_v3 has none"
    assert none in launch_files(EXPERTS, "automodel").lost
    launched = launch_files(ALONE, "automodel")
    assert launched.seconds == ALONE["best"]["published"]["seconds"]
    assert any("since a stage of it has multi-token prediction alone" in sentence for sentence in launched.lost)
    own = EXPERTS["config"] | {"model_type": "ours", "num_nextn_predict_layers": 2}
    twice = EXPERTS | {"model": "ours", "config": own}
    published = twice["best"]["published"] | {"cut": [8, 9, 8, 8, 8, 8, 8, 8]}
    twice["best"] = twice["best"] | {"published": published, "cut": published["cut"]}
    apart = scheduled(twice, [9, 8, 8, 8, 8, 8, 14, 2], "linear")
    moved = "cut: multi-token prediction runs in the last stage, with the head"
    assert moved in launch_files(apart, "automodel").lost
    assert moved not in launch_files(twice, "automodel").lost
    with pytest.raises(InputError, match=r"best\.cp is 2, which excludes multi-token prediction in a pipeline\."):
        launch_files(twice | {"best": twice["best"] | {"cp": 2, "dp": 16}}, "automodel")
    apart["config"] = apart["config"] | {"model_type": "deepseek_v3"}
    launched = launch_files(apart, "megatron")
    assert arguments(launched)["--pipeline-model-parallel-layout"][0].endswith("t*5mmL")
    assert any("its layers of multi-token prediction are in several stages" in sentence for sentence in launched.lost)


def test_blocks_are_set_where_the_trainer_has_them() -> None:
    flag, setting = "--overlap-moe-expert-parallel-comm", "model.overlap_moe_expert_parallel_comm = True"
    for plan, runs in ((HIDDEN, True), (planned("qwen3-30b-a3b", 32, pp=4, vpp=3, ep=8, tp=1, overlap="no"), False)):
        megatron = launch_files(plan, "megatron")
        assert (flag in arguments(megatron)) == runs
        assert f"CUDA_DEVICE_MAX_CONNECTIONS={32 if runs else 1}" in megatron.files["launch.sh"]
        assert (setting in launch_files(plan, "bridge").files["pretrain.py"]) == runs
    searched = scheduled(HIDDEN, [6, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4], "interleaved-3", overlap="no")
    assert flag not in arguments(launch_files(searched, "megatron"))
    in_a_v = planned("qwen3-30b-a3b", 32, pp=4, ep=8, tp=1, overlap="yes", schedule="dualpipe-v")
    program = launch_files(in_a_v, "torchtitan").files["optpipe_plan.py"]
    assert "pipeline_parallel_schedule = 'DualPipeV'" in program


def test_offload_is_set_where_the_trainer_has_it() -> None:
    plan = scheduled(LLAMA, UNEVEN, activations="offload")
    assert arguments(launch_files(plan, "megatron"))["--offload-modules"][0] == "attn_norm"
    lost = " ".join(launch_files(plan, "automodel").lost)
    assert "it needs offload in this order" in lost
    assert "all are recomputed; of 128 the plan offloads 9 and recomputes 7" in lost


def test_what_is_slower_in_1f1b_is_cut_as_published() -> None:
    published_s = LLAMA["best"]["published"]["seconds"]
    launched = launch_files(scheduled(LLAMA, UNEVEN, seconds=1.01 * published_s), "megatron")
    assert launched.seconds == published_s
    assert f"with it a step takes {time_text(1.01e6 * published_s)} in this order" in " ".join(launched.lost)


def test_what_does_not_fit_is_cut_as_published() -> None:
    launched = launch_files(scheduled(LLAMA, UNEVEN, short_bytes=3 * 2**30), "megatron")
    assert arguments(launched)["--pipeline-model-parallel-layout"] == ["Et*4|(t*4|)*6t*4L"]
    why = "a device lacks 3.00 GiB with it in this order"
    assert f"cut: even, since {why}" in launched.lost
    assert launched.seconds == LLAMA["best"]["published"]["seconds"]
    assert launched.lost[-1].startswith("model: flags state its shape")
    header = re.sub(r"\n# +", " ", launched.files["launch.sh"])
    assert all(sentence in header for sentence in launched.lost)


def test_torchtitan_runs_the_schedule() -> None:
    launched = launch_files(scheduled(LLAMA, [5, 5, 4, 4, 4, 4, 4, 4], "v"), "torchtitan")
    assert (launched.runs_schedule, launched.seconds) == (True, LLAMA["best"]["published"]["seconds"] * 0.9)
    program = launched.files["optpipe_plan.py"]
    assert "with_planned_schedule(llama3_8b())" in program
    values = {
        target.attr: node.value
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute)
    }
    parts = ast.literal_eval(values["module_fqns_per_model_part"])
    assert [len(part) for part in parts] == [5, 5, 4, 4, 4, 4, 4, 5]  # and the last norm
    assert [module for part in parts for module in part] == [
        "tok_embeddings",
        *(f"layers.{k}" for k in range(32)),
        "norm",
        "lm_head",
    ]
    assert ast.literal_eval(values["local_batch_size"]) == 256
    assert ast.literal_eval(values["pipeline_parallel_schedule"]) == "ZBVZeroBubble"
    assert ast.literal_eval(values["activation_checkpoint"]) is None
    without = launch_files(LLAMA, "torchtitan")
    assert "config.activation_checkpoint = FullAC.Config()" in without.files["optpipe_plan.py"]
    assert not without.runs_schedule


def test_automodel_gets_yaml() -> None:
    document = yaml.safe_load(launch_files(SEARCHED, "automodel").files["automodel.yaml"])
    distributed = document["distributed"]
    assert {name: distributed[name] for name in ("tp_size", "cp_size", "pp_size", "ep_size")} == {
        "tp_size": 2,
        "cp_size": 2,
        "pp_size": 4,
        "ep_size": 1,
    }
    stages = [[m for m in part if "rotary" not in m] for part in distributed["pipeline"]["module_fqns_per_model_part"]]
    assert [len(stage) for stage in stages] == [1, 6, 5, 4, 5, 5, 7, 2]
    assert (document["step_scheduler"]["local_batch_size"], distributed["activation_checkpointing"]) == (256, False)
    assert document["model"]["config"]["pretrained_model_name_or_path"] == "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize("trainer", ["bridge", "automodel"])
def test_a_model_without_a_name_on_the_hub_takes_its_configuration_along(trainer: str) -> None:
    own = LLAMA | {"model": "ours", "config": LLAMA["config"] | {"rope_theta": 5e5}}
    launched = launch_files(own, trainer)
    assert '"rope_theta": 500000.0' in launched.files["config.json"]
    assert '"source"' not in launched.files["config.json"]
    assert "config.json" not in launch_files(LLAMA, trainer).files


@pytest.mark.parametrize("name", named_models())
def test_every_model_has_a_trainer(name: str) -> None:
    """All that are refused say so of the plan or the model, and name something that can be done."""
    experts = max(layer.feed_forward.experts for layer in load_model(name).layers)
    fixed = {"ep": min(32, experts), "tp": 1} if experts else {}
    plan = planned(name, 512, "b200", pp=8, cp=1, vpp=1, microbatch_size=1, **fixed)
    refused = []
    for trainer in TRAINERS:
        try:
            launched = launch_files(plan, trainer)
        except InputError as error:
            refused.append(error)
            continue
        for file in launched.files:
            if file.endswith(".py"):
                compile(launched.files[file], file, "exec")
    assert all(issue.code == "cannot_run" and "Maybe " in issue.detail for error in refused for issue in error.issues)
    assert len(refused) < len(TRAINERS) or name == "bloom-176b"


def test_an_output_layer_in_a_stage_of_its_own() -> None:
    """The layouts of Megatron-LM end with it, and torchtitan's modules of the last stage are norm and output."""
    [layout] = arguments(launch_files(OWN, "megatron"))["--pipeline-model-parallel-layout"]
    assert parse_layout(layout, "layout")[-1] == "L"
    assert OWN["best"]["published"]["cut"][-1] == 1
    assert Launch.of(OWN).modules(OWN["best"]["cut"], ("e", "l", "n", "o"))[-1] == ["n", "o"]


@pytest.mark.parametrize(
    ("trainer", "plan", "message"),
    [
        ("megatron", planned(pp=4, schedule="zb-v"), "best.published.schedule is zb-v, and this trainer runs 1F1B"),
        (
            "torchtitan",
            planned("llama-2-7b", pp=2),
            "torchtitan has no configuration of this shape: it has llama-3.1-8b",
        ),
        (
            "torchtitan",
            planned(pp=4, schedule="zb-h1"),
            "is zb-h1, which torch has no name for. Maybe plan with a longer",
        ),
        ("bridge", planned("mixtral-8x7b", 64, pp=4), "model is of model_type 'mixtral', which Megatron Bridge has no"),
        (
            "automodel",
            planned("gemma-2-9b", 8, pp=2),
            "best.pp is 2, but tie_word_embeddings is true, and a matrix that embedding and head share is on one stage "
            "there: at most 1. Maybe plan with --pp 1, or --to bridge.",
        ),
        ("automodel", planned("qwen3-30b-a3b", 64, pp=4, tp=2), "best.tp is 2, but models with experts take tensor"),
        *(
            (trainer, SPREAD, "best.vocabulary is spread, but no trainer except optpipe train runs")
            for trainer in TRAINERS
        ),
        ("torchtitan", ALONE, "best.cut gives stage 6 multi-token prediction alone, which this trainer does not cut"),
        ("automodel", HIDDEN, "best.overlap is yes, but its schedules hide no exchange of experts. Maybe plan with"),
        ("torchtitan", HIDDEN, "best.overlap is yes, but interleaved-1f1b hides no exchange of experts there. Maybe"),
        ("bridge", FEW, "best.pp is 4, but a step has 2 microbatches, and interleaved 1F1B needs as many. Maybe plan"),
        ("automodel", LLAMA | {"best": None}, "best is null: no strategy of this plan fits. Maybe plan for more GPUs."),
        ("megatron", LLAMA | {"format": "optpipe.plan/2"}, "format"),
        ("automodel", LEAVING, "best.offload is yes, but this trainer has none. Maybe plan with --offload no, or "),
        (
            "torchtitan",
            LEAVING,
            "best.offload is yes, but torchtitan offloads by a schedule file alone, which the plan",
        ),
        ("megatron", LLAMA | {"gpus": 32}, "dp makes dp x tp x cp x pp = 16 GPUs but there are 32. Maybe dp 2."),
        (
            "megatron",
            scheduled(LLAMA, [4] * 8),
            "best.cut has 32 layers in 8 stages, but pp x vpp = 8 stages divide 34",
        ),
        (
            "megatron",
            scheduled(LLAMA, [0, *UNEVEN[1:-1], 2]),
            "best.cut[0] is 0: input should be greater than or equal to 1",
        ),
    ],
)
def test_what_cannot_run_is_refused(trainer: str, plan: Plan, message: str) -> None:
    with pytest.raises(InputError) as caught:
        launch_files(plan, trainer)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "microbatches", "size"), [(4, 16, None), (4, 11, 6), (4, 23, 6), (4, 7, 7), (8, 9, 9), (8, 20, 10)]
)
def test_groups_leave_enough_microbatches_at_the_end(devices: int, microbatches: int, size: int | None) -> None:
    assert group_size(devices, microbatches) == size


@pytest.mark.parametrize("trainer", TRAINERS)
def test_names_stay_in_comments(trainer: str) -> None:
    """A name of a model or a machine is whatever somebody wrote."""
    plan = LLAMA | {"model": "a\nexit 1\r\n'; exit 1 #", "machine": 'h100"""\nimport os'}
    for name, text in launch_files(plan, trainer).files.items():
        if name != "config.json":
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            assert not any("exit" in line or "import os" in line for line in lines)


def test_hosts_of_a_rack_have_four_gpus() -> None:
    plan = planned("llama-3.1-70b", 128, "gb200", pp=2, dp=8, tp=8)
    assert Launch.of(plan).host_gpus == 4
    assert "--nproc-per-node 4 --nnodes 32" in launch_files(plan, "megatron").files["launch.sh"]


@pytest.mark.parametrize(("gpus", "tp", "hosts", "each"), [(12, 4, 3, 4), (20, 2, 5, 4), (20, 1, 4, 5), (6, 2, 1, 6)])
def test_every_host_starts_as_many_processes(gpus: int, tp: int, hosts: int, each: int) -> None:
    """Together the plan's GPUs, where these are no multiple of a node's eight."""
    plan = planned(gpus=gpus, batch=60, tp=tp, pp=1, cp=1, microbatch_size=1)
    for trainer in TRAINERS:
        launched = launch_files(plan, trainer)
        assert f"--nproc-per-node {each} --nnodes {hosts} " in launched.files["launch.sh"]
        said = any(f"{8 - each} of the 8 GPUs of each are not used" in sentence for sentence in launched.lost)
        assert said == (hosts > 1)


def test_ranks_that_no_host_has_room_for_are_not_in_the_prediction() -> None:
    plan = planned(gpus=12, tp=4, cp=1, pp=3, vpp=1)
    launched = launch_files(plan, "megatron")
    assert "--nproc-per-node 4 --nnodes 3" in launched.files["launch.sh"]
    assert launched.lost[-1] == "time: predicted with hosts as planned"
    assert "Predicted with hosts as planned" in launched.files["launch.sh"]


def test_the_prediction_is_of_the_products_that_run() -> None:
    """The step is that of the precision in which torchtitan runs, unless nobody knows the machine."""
    fixed: dict[str, Any] = {"tp": 8, "pp": 1, "microbatch_size": 2, "sharding": "fsdp"}
    for model, other in (("llama-3.1-70b", "fp8"), ("llama-3.1-405b", "bf16")):
        both = {one: planned(model, 64 if other == "fp8" else 512, precision=one, **fixed) for one in ("bf16", "fp8")}
        seconds = {one: both[one]["best"]["seconds"] for one in both}
        runs = "bf16" if other == "fp8" else "fp8"
        launched = launch_files(both[other], "torchtitan")
        assert launched.seconds == pytest.approx(seconds[runs], rel=1e-9)
        assert launched.seconds != pytest.approx(seconds[other], rel=0.01)
        assert "Predicted for what this file starts" in launched.files["launch.sh"]
        own = launch_files(both[other] | {"machine": "ours"}, "torchtitan")
        assert own.seconds == seconds[other]
        assert own.lost[-1] == "time: predicted with precision as planned"
        assert "for what this file starts" not in own.files["launch.sh"]


def test_advice_names_trainers_that_take_the_plan() -> None:
    own = LLAMA | {"model": "ours", "config": LLAMA["config"] | {"model_type": "llama4_text"}}
    for plan, takers in ((own, ["automodel"]), (own | {"config": own["config"] | {"tie_word_embeddings": True}}, [])):
        for trainer in TRAINERS:
            if trainer in takers:
                assert launch_files(plan, trainer).files
                continue
            with pytest.raises(InputError) as caught:
                launch_files(plan, trainer)
            advice = caught.value.issues[0].detail.partition(" Maybe ")[2]
            named = re.findall(r"--to (\w+)", advice)
            assert advice
            assert named == takers if takers or trainer == "automodel" else "another plan for --to automodel" in advice
