"""Megatron-LM: a shell script with the arguments of `pretrain_gpt.py`.

Flags are those of Megatron-Core 0.16 to 0.20. The model is stated by its dimensions, so it must be of a family that
`pretrain_gpt.py` builds; data are made up (`--mock-data`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from optpipe.cluster.families import FAMILIES, Fields
from optpipe.cluster.model import Model
from optpipe.errors import InputError, Issue
from optpipe.export.launch import LaunchFiles
from optpipe.export.launch.reading import Launch, Pipeline, Untimed
from optpipe.export.launch.text import all_lost, header, script

OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
"""Modules of a dense layer whose inputs can be offloaded: together nearly all of an activation."""

BUILT = (
    *("llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "gpt2", "nemotron"),
)
"""Families whose layers `pretrain_gpt.py` builds from flags."""

SHARDING: Mapping[str, str] = {
    "none": "--overlap-grad-reduce",
    "optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "fsdp": (
        "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor --init-model-with-meta-device"
    ),
}
PRECISION: Mapping[str, str] = {
    "bf16": "--bf16",
    "fp8": "--bf16 --fp8-format hybrid",
    "fp4": "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4",
}
RECOMPUTE: Mapping[str, str] = {
    "selective": "--recompute-granularity selective --recompute-modules core_attn",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
OVERLAP = "--overlap-moe-expert-parallel-comm"


def files(launch: Launch) -> LaunchFiles:
    """The script."""
    runs = launch.in_loops()
    lost = all_lost(launch, [*launch.lost_in_loops(runs), *lost_of_core(launch), *_lost_of_model(launch)])
    command = ['"${MEGATRON:?is to be a checkout of Megatron-LM}/pretrain_gpt.py"']
    command += [*_parallel(launch, runs), *_batch(launch), *_model(launch), *_run(), '"$@"']
    # One queue keeps communication of tensor parallelism in order, but FSDP refuses it, and in it blocks hide nothing.
    queues = 32 if runs.overlap else 1
    before = [] if launch.best.sharding == "fsdp" else [f"export CUDA_DEVICE_MAX_CONNECTIONS={queues}"]
    text = script(launch, header(launch, runs.cut, lost, runs.seconds), before, command)
    return LaunchFiles({"launch.sh": text}, lost, runs.seconds)


def lost_of_core(launch: Launch) -> Iterator[str]:
    """Sentences on what Megatron-Core does otherwise than planned, in whatever order."""
    if launch.strategy.precision == "fp8":
        yield "precision: the recipe of FP8 is the trainer's default; the plan says only that products are in FP8"
    if launch.strategy.sharding == "fsdp":
        yield "sharding: Megatron FSDP gathers and frees a layer at a time; the plan gathers a stage"


def _lost_of_model(launch: Launch) -> Iterator[str]:
    """Sentences on what of a model flags leave out here."""
    yield "model: flags state its shape; base of the rotary angles, epsilon of norms and the like are defaults"
    if len({layer.attention.window for layer in launch.model.layers}) > 1:
        yield Untimed("windows: all layers have that of the first, where some slide and others do not")


def group_size(devices: int, microbatches: int) -> int | None:
    """Microbatches of a chunk in a row; None for Megatron-Core's default, the number of devices.

    Its interleaved 1F1B refuses a last group of fewer microbatches than devices.
    """
    fits = (size for size in range(devices, microbatches + 1) if not 0 < microbatches % size < devices)
    return None if microbatches % devices == 0 else next(fits, None)


def _parallel(launch: Launch, runs: Pipeline) -> Iterator[str]:
    best = launch.best
    yield f"--tensor-model-parallel-size {best.tp} --context-parallel-size {best.cp}"
    if best.tp > 1:
        yield "--sequence-parallel"
    yield f"--pipeline-model-parallel-size {best.pp}"
    if best.pp > 1:
        yield f"--pipeline-model-parallel-layout '{launch.layout(runs.cut)}'"
    if len(runs.cut) > best.pp and (size := group_size(best.pp, launch.microbatches)):
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {size}"
    if launch.has_experts:
        yield f"--expert-model-parallel-size {best.ep} --expert-tensor-parallel-size {best.etp}"
    if runs.overlap:
        yield OVERLAP
    yield SHARDING[best.sharding]
    yield PRECISION[best.precision]
    if runs.recompute != "none":
        yield RECOMPUTE[runs.recompute]
    if runs.offload:
        yield f"--fine-grained-activation-offloading --offload-modules {' '.join(OFFLOAD_MODULES)}"


def _batch(launch: Launch) -> Iterator[str]:
    plan = launch.plan
    yield f"--micro-batch-size {launch.best.microbatch_size} --global-batch-size {plan.global_batch}"
    yield f"--seq-length {plan.sequence} --max-position-embeddings {launch.model.positions or plan.sequence}"


def _model(launch: Launch) -> Iterator[str]:
    model, config = launch.model, launch.plan.config
    if model.model_type not in BUILT:
        detail = f"is of model_type {model.model_type!r}, whose layers no flags of pretrain_gpt.py describe."
        raise InputError([Issue("model", "cannot_run", detail)])
    family = FAMILIES[model.model_type]
    fields = Fields(family.seen(config), "config")
    attention = model.layers[0].attention
    dense = [layer.feed_forward.width for layer in model.layers if not layer.feed_forward.experts]
    width = dense[0] if dense else fields.size("intermediate_size", model.layers[0].feed_forward.width)
    yield f"--num-layers {len(model.layers)} --hidden-size {model.hidden} --ffn-hidden-size {width}"
    yield f"--num-attention-heads {attention.heads}"
    if attention.latent_width:
        rank = fields.size("q_lora_rank", 0, least=0)
        yield "--multi-latent-attention" + (f" --q-lora-rank {rank}" if rank else "")
        plain, rotary = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
        yield f"--kv-lora-rank {fields.size('kv_lora_rank')} --v-head-dim {attention.value_width}"
        yield f"--qk-head-dim {plain} --qk-pos-emb-head-dim {rotary}"
    else:
        if attention.key_value_heads != attention.heads:
            yield f"--group-query-attention --num-query-groups {attention.key_value_heads}"
        yield f"--kv-channels {attention.query_key_width}"
    if attention.window:
        yield f"--window-size {attention.window - 1},0"
    yield f"--position-embedding-type {'learned_absolute' if model.positions else 'rope'}"
    yield f"--normalization {'LayerNorm' if family.norm == 'layer' else 'RMSNorm'}"
    if fields.flag("gated", family.gated):
        yield "--swiglu"
    elif model.model_type == "nemotron":
        yield "--squared-relu --apply-layernorm-1p"
    if not family.mlp_bias:
        yield "--disable-bias-linear"
        if fields.flag("attention_bias", family.attention_bias):
            yield "--add-qkv-bias"
    if family.query_key_norm != "none" or attention.latent_width:
        yield "--qk-layernorm"
    if not model.tied:
        yield "--untie-embeddings-and-output-weights"
    yield f"--vocab-size {model.vocabulary} --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer"
    yield from _experts(model, fields)
    if model.predicted_tokens:
        yield f"--mtp-num-layers {model.predicted_tokens}"


def _experts(model: Model, fields: Fields) -> Iterator[str]:
    sparse = [layer.feed_forward.experts > 0 for layer in model.layers]
    if not any(sparse):
        return
    experts = model.layers[sparse.index(True)].feed_forward
    yield f"--num-experts {experts.experts} --moe-router-topk {experts.chosen} --moe-ffn-hidden-size {experts.width}"
    if shared := fields.size("n_shared_experts", 0, least=0) * experts.width:
        yield f"--moe-shared-expert-intermediate-size {shared}"
    if not all(sparse):
        runs = "+".join(f"[{int(one)}]*{len([*same])}" for one, same in groupby(sparse))
        yield f"--moe-layer-freq '({runs})'"
    yield "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    if model.model_type in ("deepseek_v3", "kimi_k2"):
        yield "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"


def _run() -> Iterator[str]:
    yield "--use-mcore-models --transformer-impl transformer_engine --attention-backend auto"
    yield "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"
    yield "--mock-data --train-iters 20 --eval-iters 0 --lr 1e-4 --min-lr 1e-5 --log-interval 1 --log-throughput"
