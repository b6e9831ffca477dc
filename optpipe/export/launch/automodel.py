"""NeMo AutoModel: its YAML, and a shell script that starts its recipe with it.

Fields are those of 0.7. It runs torch's 1F1B and interleaved 1F1B on any cut. A schedule as torch's CSV is left out: it
has no offload, and weight gradients apart are lost where FSDP reshards (docs/other-trainers.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from optpipe.cluster.families import FAMILIES
from optpipe.cluster.model import Model
from optpipe.errors import InputError, Issue
from optpipe.export.launch import LaunchFiles
from optpipe.export.launch.reading import Launch, Pipeline, Untimed
from optpipe.export.launch.text import all_lost, config_json, header, script

OTHER_MODULES = ("gpt2", "gpt_neox", "bloom", "falcon", "opt")
"""Families whose layers are not `model.layers`, where it cuts a pipeline."""

SCHEDULES = {"1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}
MODULES = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
ROTARY = "model.rotary_emb"
"""Needed by every stage."""


def files(launch: Launch) -> LaunchFiles:
    """The YAML, the script, and the model's configuration where the hub has none."""
    _refuse(launch)
    best, runs = launch.best, launch.in_loops(offloads=False, cuts_prediction=False)
    seconds, lost = runs.seconds, [*launch.lost_in_loops(runs), *_lost(launch, runs)]
    if best.precision == "fp4":
        seconds, sentence = launch.in_precision("bf16", seconds, "this YAML")
        lost.append(sentence)
    lost = all_lost(launch, lost)
    distributed: dict[str, object] = {
        "strategy": "fsdp2",
        "dp_size": None,
        "dp_replicate_size": best.dp if best.sharding == "none" else 1,
        "tp_size": best.tp,
        "cp_size": best.cp,
        "pp_size": best.pp,
        "ep_size": best.ep,
        "sequence_parallel": best.tp > 1,
        "activation_checkpointing": {"none": False, "selective": "selective", "full": True}[runs.recompute],
        "reshard_after_forward": best.sharding == "fsdp",
    }
    if best.pp > 1:
        distributed["pipeline"] = {
            "pp_schedule": SCHEDULES[runs.order],
            "pp_microbatch_size": best.microbatch_size,
            "scale_grads_in_schedule": False,
            "module_fqns_per_model_part": [[*stage, ROTARY] for stage in launch.modules(runs.cut, MODULES)],
        }
    if best.ep > 1:
        distributed["moe"] = {"reshard_after_forward": best.sharding == "fsdp"}
    local = best.microbatch_size * (launch.microbatches if best.pp > 1 else 1)
    document: dict[str, object] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {
            "global_batch_size": launch.plan.global_batch,
            "local_batch_size": local,
            "max_steps": 20,
            "num_epochs": 1,
            "ckpt_every_steps": 1000,
        },
        "dist_env": {"backend": "nccl", "timeout_minutes": 30},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "config": {
                "_target_": "transformers.AutoConfig.from_pretrained",
                "pretrained_model_name_or_path": launch.hub_name or ".",
            },
            "torch_dtype": "bf16",
            "attn_implementation": "sdpa",
        },
        "distributed": distributed,
        "checkpoint": {"enabled": False},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset",
            "vocab_size": launch.model.vocabulary,
            "seq_len": launch.plan.sequence,
            "num_samples": 1_000_000,
            "batch_size": local,
        },
        "dataloader": {"_target_": "torch.utils.data.DataLoader", "batch_size": None},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    }
    if best.precision == "fp8":
        document["fp8"] = {"enabled": True, "recipe_name": "tensorwise"}
    comments = header(launch, runs.cut, lost, seconds)
    text = comments + "".join(_yaml(document))
    command = ["-m nemo_automodel.cli.app automodel.yaml", '"$@"']
    made = {"launch.sh": script(launch, comments, ['cd "$folder"'], command), "automodel.yaml": text}
    return LaunchFiles(made | config_json(launch), lost, seconds)


def _yaml(fields: Mapping[str, object], indent: str = "") -> Iterator[str]:
    """Lines of a mapping; JSON is YAML, so values are written as JSON, and lists of lists with a line for each."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:\n"
            yield from _yaml(value, f"{indent}  ")
        elif isinstance(value, list) and value and isinstance(value[0], list):
            yield f"{indent}{name}:\n"
            yield from (f"{indent}- {json.dumps(one)}\n" for one in value)
        else:
            yield f"{indent}{name}: {json.dumps(value)}\n"


def _refuse(launch: Launch) -> None:
    """Raise InputError where AutoModel cannot run the strategy."""
    best, model = launch.best, launch.model
    field, detail = "", ""
    if best.etp > 1:
        field, detail = "etp", f"is {best.etp}, but an expert is not divided there. Maybe plan with --etp 1."
    elif launch.has_experts and best.tp > 1:
        detail = f"is {best.tp}, but models with experts take tensor parallelism with pretrained weights alone."
        field, detail = "tp", f"{detail} Maybe plan with --tp 1."
    elif _predicts(model) and best.cp > 1 and best.pp > 1:
        detail = f"is {best.cp}, which excludes multi-token prediction in a pipeline."
        field, detail = "cp", f"{detail} Maybe plan with --cp 1."
    elif best.overlap == "yes":
        detail = "is yes, but its schedules hide no exchange of experts. Maybe plan with --overlap no."
        field = "overlap"
    elif launch.microbatches < best.pp:
        field, detail = (
            "pp",
            f"is {best.pp}, but a step has {launch.microbatches} microbatches, and its recipe needs as",
        )
        detail += " many. Maybe plan with a smaller --pp or --dp."
    elif best.pp > 1 and model.model_type in OTHER_MODULES:
        detail = f"is {best.pp}, but a {model.model_type} is not cut into stages there. Maybe plan with --pp 1."
        field = "pp"
    elif best.pp > 1 and model.tied:
        detail = f"is {best.pp}, but tie_word_embeddings is true, and a matrix that embedding and head share is on one "
        detail += "stage there: at most 1. Maybe plan with --pp 1."
        field = "pp"
    if field:
        raise InputError([Issue(f"best.{field}", "cannot_run", f"{detail}")])


def _predicts(model: Model) -> bool:
    """True if its class may have layers of multi-token prediction. Those of the known families have none."""
    return model.predicted_tokens > 0 and model.model_type not in FAMILIES


def _lost(launch: Launch, runs: Pipeline) -> Iterator[str]:
    model = launch.model
    yield from launch.lost_by_fsdp()
    if _predicts(model) and {*launch.stages_of_prediction(runs.cut)} != {len(runs.cut) - 1}:
        yield Untimed("cut: multi-token prediction runs in the last stage, with the head")
    elif model.predicted_tokens and not _predicts(model):
        yield Untimed(
            f"layers of multi-token prediction ({model.predicted_tokens}): its class of {model.model_type} has none"
        )
