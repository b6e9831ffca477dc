"""Share of weight gradients that is deferred to W in real models, by operations: `python -m benchmarks.deferred_share`.

Two layers of each, of small width, with random weights. Operations are those that torch's counter knows: products and
convolutions. The weight gradients are what a backward computes beyond one for which no matrix is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.markdown import table
from optpipe.runtime.stage import Stage
from optpipe.runtime.weight_gradients import undeferred_layers

WIDTH, TOKENS = 64, 32
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": None}
SIZES |= {"bos_token_id": None, "eos_token_id": None}
EXPERTS = SIZES | {"num_experts_per_tok": 2, "head_dim": 16}
SPARSE = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32}
GPT2: dict[str, Any] = {
    "vocab_size": 128,
    "n_positions": TOKENS,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "use_cache": False,
}
VIT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
}
VIT |= {"image_size": 32, "patch_size": 8}

Case = tuple[str, dict[str, Any], str | None]

CASES: dict[str, Case] = {
    "Llama, Qwen3, Mistral": ("LlamaForCausalLM", SIZES, None),
    "Gemma": ("GemmaForCausalLM", SIZES | {"head_dim": 16}, None),
    "Phi": ("PhiForCausalLM", SIZES, None),
    "GPT-2 (`Conv1D`)": ("GPT2LMHeadModel", GPT2, None),
    "ViT": ("ViTForImageClassification", VIT, None),
    "Mixtral, experts `eager`": ("MixtralForCausalLM", EXPERTS | {"num_local_experts": 4}, "eager"),
    "Qwen3-MoE, experts `eager`": ("Qwen3MoeForCausalLM", SPARSE, "eager"),
    "Qwen3-MoE, experts `batched_mm`": ("Qwen3MoeForCausalLM", SPARSE, "batched_mm"),
    "Qwen3-MoE, experts `grouped_mm`": ("Qwen3MoeForCausalLM", SPARSE, "grouped_mm"),
    "GPT-OSS, experts `eager`": ("GptOssForCausalLM", EXPERTS | {"num_local_experts": 4}, "eager"),
}


def rows() -> list[list[str]]:
    """The table: model, share deferred, what is named as left."""
    found = []
    for name, (kind, options, experts) in CASES.items():
        torch.manual_seed(0)
        config = getattr(transformers, kind).config_class(**options)
        if experts is not None:
            config._experts_implementation = experts
        model: nn.Module = getattr(transformers, kind)(config)
        x = torch.randn(2, 3, 32, 32) if kind.startswith("ViT") else torch.randint(128, (2, TOKENS))
        stage = Stage(model, first=True, loss=_loss)
        deferred = _operations(stage, x, _last)
        whole = _operations(stage, x, lambda s: s.backward_input(0, None)) + deferred
        left = ", ".join(undeferred_layers(model)) or "none"
        matrices = [p for p in model.parameters() if p.dim() > 1]
        for parameter in matrices:
            parameter.requires_grad_(False)
        inputs_alone = _operations(stage, x, lambda s: s.backward_input(0, None))
        found.append([name, f"{deferred / (whole - inputs_alone):.0%}", left])
    return found


def _last(stage: Stage) -> None:
    stage.backward_weight(0)


def _loss(output: Any, _target: Tensor) -> Tensor:
    loss: Tensor = output.logits.sin().mean()
    return loss


def _operations(stage: Stage, x: Tensor, run: Callable[[Stage], object]) -> int:
    """Operations of a part of the backward of a microbatch, after the parts before it."""
    aten = torch.ops.aten
    formulas = {aten._grouped_mm: _grouped_operations, aten.addmm_: _added_operations, aten.baddbmm_: _added_operations}
    stage.zero_gradients()
    stage.forward(0, x, x, offloads=False)
    if run is _last:
        stage.backward_input(0, None)
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run(stage)
    stage.clear()
    operations: int = counter.get_total_flops()
    return operations


def _grouped_operations(left: torch.Size, right: torch.Size, *_: Any, **_more: Any) -> int:
    """Operations of a grouped product: each row once, whichever its group."""
    return 2 * left.numel() * right[-1]


def _added_operations(_to: torch.Size, left: torch.Size, right: torch.Size, *_: Any, **_more: Any) -> int:
    """Operations of a product that is added to a tensor in place, which the counter does not know."""
    return 2 * left.numel() * right[-1]


if __name__ == "__main__":
    head = ["model", "deferred, by operations", "kinds of which something stays in B"]
    print(table(head, rows(), 1))
