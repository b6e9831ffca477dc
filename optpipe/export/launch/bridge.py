"""Megatron Bridge: a program that builds the model from its config.json and trains it, with its whole configuration.

Names are those of Megatron Bridge 0.3 (2026-03) to 0.7. What the trainer runs is Megatron-Core, as of `megatron`.
"""

from __future__ import annotations

from collections.abc import Mapping

from optpipe.errors import InputError, Issue
from optpipe.export.launch import LaunchFiles
from optpipe.export.launch.megatron import OFFLOAD_MODULES, group_size, lost_of_core
from optpipe.export.launch.reading import Launch
from optpipe.export.launch.text import all_lost, config_json, header, script

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "nemotron": "NemotronForCausalLM",
}
"""Architectures that it has a bridge for, by `model_type`."""

PRECISION: Mapping[str, str] = {
    "bf16": "bf16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "fp4": "bf16_with_nvfp4_mixed",
}

PROGRAM = '''\
{header}"""A plan for Megatron Bridge: launch.sh starts it by torchrun."""

from pathlib import Path

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from transformers import AutoConfig


def plan() -> ConfigContainer:
    """The configuration: model, parallel sizes, batch, and made-up data."""
    config = AutoConfig.from_pretrained({source})
    model = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
{model}
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(lr_warmup_iters=2, max_lr=1e-4, min_lr=1e-5)
    optimizer.use_distributed_optimizer = {distributed}
    return ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=20, global_batch_size={global_batch}, micro_batch_size={micro_batch}),
        optimizer=optimizer,
        scheduler=scheduler,
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer={distributed},
            overlap_grad_reduce=True,
            overlap_param_gather={distributed},
            grad_reduce_in_fp32=True,
            use_megatron_fsdp={fsdp},
            data_parallel_sharding_strategy={strategy!r},
        ),
        dataset=GPTDatasetConfig(
            seq_length={sequence},
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            blend=None,
            split="9999,8,2",
            dataloader_type="single",
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size={vocabulary}),
        checkpoint=CheckpointConfig(save=None, load=None),
        mixed_precision={precision!r},
    )


if __name__ == "__main__":
    pretrain(config=plan(), forward_step_func=forward_step)
'''


def files(launch: Launch) -> LaunchFiles:
    """The program, the script that starts it, and the model's configuration where the hub has none."""
    plan, best, runs = launch.plan, launch.best, launch.in_loops()
    architecture = ARCHITECTURES.get(launch.model.model_type)
    if architecture is None:
        detail = (
            f"is of model_type {launch.model.model_type!r}, which Megatron Bridge has no bridge for; it has "
            f"{', '.join(ARCHITECTURES)}."
        )
        raise InputError([Issue("model", "cannot_run", detail)])
    lost = all_lost(launch, [*launch.lost_in_loops(runs), *lost_of_core(launch)])
    settings: dict[str, object] = {
        "seq_length": plan.sequence,
        "tensor_model_parallel_size": best.tp,
        "sequence_parallel": best.tp > 1,
        "context_parallel_size": best.cp,
        "pipeline_model_parallel_size": best.pp,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "native",
    }
    if best.pp > 1:
        settings["pipeline_model_parallel_layout"] = launch.layout(runs.cut)
        settings["virtual_pipeline_model_parallel_size"] = len(runs.cut) // best.pp if len(runs.cut) > best.pp else None
    if len(runs.cut) > best.pp and (size := group_size(best.pp, launch.microbatches)):
        settings["microbatch_group_size_per_vp_stage"] = size
    if launch.has_experts:
        settings |= {
            "expert_model_parallel_size": best.ep,
            "expert_tensor_parallel_size": best.etp,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
        }
    if runs.overlap:  # which excludes that of shared experts, a default of some models
        settings |= {"overlap_moe_expert_parallel_comm": True, "moe_shared_expert_overlap": False}
    if launch.model.predicted_tokens:
        settings["mtp_num_layers"] = launch.model.predicted_tokens
    if runs.recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif runs.recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if runs.offload:
        settings |= {"fine_grained_activation_offloading": True, "offload_modules": [*OFFLOAD_MODULES]}
    lines = [f"    model.{name} = {value!r}" for name, value in settings.items()]
    if best.pp > 1:
        lines.append("    model.pipeline_dtype = torch.bfloat16")
    source = repr(launch.hub_name) if launch.hub_name else "Path(__file__).parent"
    comments = header(launch, runs.cut, lost, runs.seconds)
    text = PROGRAM.format(
        header=comments,
        source=source,
        model="\n".join(lines),
        distributed=best.sharding != "none",
        global_batch=plan.global_batch,
        micro_batch=best.microbatch_size,
        fsdp=best.sharding == "fsdp",
        strategy="optim_grads_params" if best.sharding == "fsdp" else "no_shard",
        sequence=plan.sequence,
        vocabulary=launch.model.vocabulary,
        precision=PRECISION[best.precision],
    )
    before = [] if best.sharding == "fsdp" else ["export CUDA_DEVICE_MAX_CONNECTIONS=1"]
    made = {"launch.sh": script(launch, comments, before, ['"$folder/pretrain.py"']), "pretrain.py": text}
    return LaunchFiles(made | config_json(launch, architecture), lost, runs.seconds)
