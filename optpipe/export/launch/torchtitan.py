"""torchtitan: a configuration in Python, as 0.3 has them, and a shell script that starts its trainer with it.

Where the plan has a schedule file, `optpipe.torchtitan` runs it as planned: order, placement, offload, recomputation.
Tokenizer and data are those of torchtitan's own configuration of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from optpipe.cluster.model import Model, load_model
from optpipe.cluster.strategy import Precision
from optpipe.errors import InputError, Issue
from optpipe.export.launch import LaunchFiles
from optpipe.export.launch.reading import Launch, Untimed, no_offload
from optpipe.export.launch.text import all_lost, header, script

CONFIGS: Mapping[str, str] = {
    "llama-3.1-8b": "llama3.llama3_8b",
    "llama-3.1-70b": "llama3.llama3_70b",
    "llama-3.1-405b": "llama3.llama3_405b",
    "deepseek-v2-lite": "deepseek_v3.deepseek_v3_16b",
    "deepseek-v3": "deepseek_v3.deepseek_v3_671b",
    "gpt-oss-20b": "gpt_oss.gpt_oss_20b",
    "gpt-oss-120b": "gpt_oss.gpt_oss_120b",
    "qwen3-30b-a3b": "qwen3.qwen3_30b_a3b",
}
"""Models that torchtitan has, by the names of `optpipe models`: its folder and its configuration."""

IN_FP8: Mapping[str, str] = {
    "llama-3.1-405b": "llama3.llama3_405b",
    "deepseek-v3": "deepseek_v3.deepseek_v3_671b_float8",
}
"""Configurations whose products are in FP8, by the names of models."""

SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Names of torch's schedules, by those of published ones."""

CHECKPOINTS = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
MODULES = ("tok_embeddings", "layers", "norm", "lm_head")

PROGRAM = '''\
{header}"""A plan as a configuration of torchtitan: --module optpipe_plan --config plan."""

{imports}


def plan():
    """The configuration of the model, spread and scheduled as planned."""
{body}    return config
'''


def files(launch: Launch) -> LaunchFiles:
    """The script and the configuration."""
    model = _named(launch)
    _refuse(launch)
    best = launch.best
    planned = best.schedule_file is not None and best.pp > 1
    # Without a schedule, or on a pipeline of one device, what was rated in closed form.
    cut, seconds = (best.cut, best.seconds) if planned else (best.published.cut, best.published.seconds)
    checkpoint = CHECKPOINTS["none" if planned else best.published.recompute]
    config = (IN_FP8 if best.precision == "fp8" else CONFIGS).get(model) or CONFIGS[model]
    runs: Precision = "fp8" if config in IN_FP8.values() else "bf16"
    lost = [*_lost(launch, planned)]
    if runs != best.precision:
        seconds, sentence = launch.in_precision(runs, seconds, "torchtitan's configuration of this model")
        lost.append(sentence)
    lost = all_lost(launch, lost)
    folder, _, function = config.partition(".")
    imports, made = [f"from torchtitan.models.{folder}.config_registry import {function}"], f"{function}()"
    if checkpoint != "None":
        imports.insert(0, f"from torchtitan.distributed.activation_checkpoint import {checkpoint.partition('.')[0]}")
    if planned:
        imports[:0] = ["from pathlib import Path", "", "from optpipe.torchtitan import with_planned_schedule"]
        made = f"with_planned_schedule({made})"
    body = [f"config = {made}", *_settings(launch, cut), f"config.activation_checkpoint = {checkpoint}"]
    if planned:
        body.append('config.parallelism.planned_schedule = str(Path(__file__).with_name("schedule.json"))')
    comments = header(launch, cut, lost, seconds)
    program = PROGRAM.format(
        header=comments,
        imports="\n".join(imports),
        body="".join(f"    {line}\n" for line in body),
    )
    before = ['export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"']
    command = ["-m torchtitan.train --module optpipe_plan --config plan", '"$@"']
    made_files = {"launch.sh": script(launch, comments, before, command), "optpipe_plan.py": program}
    return LaunchFiles(made_files, lost, seconds, runs_schedule=planned)


def _settings(launch: Launch, cut: Sequence[int]) -> Iterator[str]:
    """Assignments of the fields that the plan decides."""
    best = launch.best
    settings: dict[str, object] = {
        "training.local_batch_size": best.microbatch_size * (launch.microbatches if best.pp > 1 else 1),
        "training.global_batch_size": launch.plan.global_batch,
        "training.seq_len": launch.plan.sequence,
        "training.steps": 20,
        "training.disable_cuda_graphs": best.pp > 1 or best.ep > 1,
        "validator.enable": False,
        "parallelism.data_parallel_replicate_degree": best.dp if best.sharding == "none" else 1,
        "parallelism.data_parallel_shard_degree": 1 if best.sharding == "none" else best.dp,
        "parallelism.fsdp_reshard_after_forward": "always" if best.sharding == "fsdp" else "never",
        "parallelism.tensor_parallel_degree": best.tp,
        "parallelism.context_parallel_degree": best.cp,
        "parallelism.expert_parallel_degree": best.ep,
        "parallelism.spmd_backend": "partial_dtensor",
        "parallelism.pipeline_parallel_degree": best.pp,
    }
    if best.pp > 1:
        in_a_v = "dualpipe-v" if best.overlap == "yes" else "zb-v"
        name = in_a_v if best.placement == "v" else "interleaved-1f1b" if len(cut) > best.pp else "1f1b"
        settings |= {
            "parallelism.pipeline_parallel_microbatch_size": best.microbatch_size,
            "parallelism.pipeline_parallel_schedule": SCHEDULES[name],
        }
    yield from (f"config.{name} = {value!r}" for name, value in settings.items())
    if best.pp > 1:
        yield "config.parallelism.module_fqns_per_model_part = ["
        yield from (f"    {names!r}," for names in launch.modules(cut, MODULES))
        yield "]"


def _shape(model: Model) -> Model:
    return replace(model, name="", assumptions=())


def _named(launch: Launch) -> str:
    """The model of `CONFIGS` that has the plan's shape."""
    shape = _shape(launch.model)
    found = next((name for name in CONFIGS if _shape(load_model(name)) == shape), None)
    if found is None:
        detail = (
            f"is {launch.plan.model}, and torchtitan has no configuration of this shape: it has {', '.join(CONFIGS)}."
        )
        raise InputError([Issue("model", "cannot_run", detail)])
    return found


def _refuse(launch: Launch) -> None:
    """Raise InputError where torchtitan cannot run the strategy."""
    best, groups = launch.best, launch.model.layers[0].attention.key_value_heads
    field, detail = "", ""
    if best.etp > 1:
        field, detail = "etp", f"is {best.etp}, but an expert is not divided there. Maybe plan with --etp 1."
    elif best.overlap == "yes" and best.schedule_file is None and best.published.schedule != "dualpipe-v":
        detail = f"is yes, but {best.published.schedule} hides no exchange of experts there. Maybe plan with --schedule"
        field, detail = "overlap", f"{detail} dualpipe-v, or with --overlap no."
    elif groups % best.tp:
        detail = f"is {best.tp}, which does not divide the {groups} key and value heads. Maybe plan with --tp {groups}."
        field = "tp"
    elif best.offload == "yes" and best.schedule_file is None:
        raise InputError([no_offload("torchtitan offloads by a schedule file alone, which the plan has not")])
    elif best.schedule_file is None and best.pp > 1 and best.published.schedule not in SCHEDULES:
        field, detail = "published.schedule", f"is {best.published.schedule}, which torch has no name for. Maybe plan "
        detail += "with a longer --time-limit, so that there is a schedule file, which optpipe.torchtitan runs."
    if field:
        raise InputError([Issue(f"best.{field}", "cannot_run", detail)])


def _lost(launch: Launch, planned: bool) -> Iterator[str]:
    best = launch.best
    yield from launch.lost_by_fsdp()
    if launch.model.predicted_tokens:
        yield Untimed(
            f"layers of multi-token prediction ({launch.model.predicted_tokens}): this configuration has none"
        )
    if not planned and best.schedule_file is not None:
        yield "schedule: a pipeline of one device has none here: activations are treated alike"
    if not planned and best.pp > 1:
        yield "schedule: those of torch need a torch newer than 2.13 in torchtitan 0.3 (its step takes other arguments)"
    if planned and best.overlap == "yes":
        yield Untimed(
            "overlap: the planned schedule runs the two ops of a block one after the other, so nothing is hidden"
        )
    if launch.has_experts and planned:
        yield "experts: nobody has run a planned schedule with experts in torchtitan yet"
