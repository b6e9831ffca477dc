"""Models of transformers with few weights drawn at random, and plain training of them: uncut, by transformers' loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.optpipe.train.cases import decaying

VOCABULARY, LAYERS, ROWS, TOKENS, MICROBATCHES = 64, 4, 2, 8, 4
STEPS, LEARNING_RATE, WEIGHT_DECAY, BALANCE = 6, 1e-2, 0.01, 0.1

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
_SIZES |= {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": BALANCE}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": LAYERS, "n_head": 2}
_GPT2 |= {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_OPT = {"vocab_size": VOCABULARY, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": LAYERS, "dropout": 0.0}
_OPT |= {"num_attention_heads": 2, "max_position_embeddings": 32, "word_embed_proj_dim": 16, "init_std": 0.2}
_FALCON = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
_FALCON |= {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": LAYERS, "n_head": 2, "initializer_range": 0.2}
_BLOOM |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_VIT = {"hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 32}
_VIT |= {"image_size": 8, "patch_size": 4, "num_labels": 5, "architectures": ["ViTForImageClassification"]}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES | {"tie_word_embeddings": False}),
    "tied llama": ("LlamaConfig", _SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _SIZES | {"head_dim": 8}),
    "mistral": ("MistralConfig", _SIZES | {"sliding_window": 4}),
    "gemma": ("GemmaConfig", _SIZES | {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", _SIZES | {"head_dim": 8, "sliding_window": 4}),
    "gpt2": ("GPT2Config", _GPT2),
    "phi": ("PhiConfig", _SIZES | {"embd_pdrop": 0.5}),
    "granite": ("GraniteConfig", _SIZES | {"embedding_multiplier": 3.0}),
    "opt": ("OPTConfig", _OPT),
    "falcon": ("FalconConfig", _FALCON),
    "falcon with alibi": ("FalconConfig", _FALCON | {"alibi": True}),
    "bloom": ("BloomConfig", _BLOOM),
    "mixtral": ("MixtralConfig", _SIZES | _EXPERTS | {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", _SIZES | _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}),
    "vit": ("ViTConfig", _VIT),
}
"""Two have what only the first stage may do: Phi drops embeddings, Granite multiplies them.

Layers of Falcon and Bloom return their hidden states in a tuple; biases of attention go by the mask.
"""

_PADDED = _SIZES | {"pad_token_id": 0, "num_labels": 3}
_BERT = {name: value for name, value in _PADDED.items() if name != "num_key_value_heads"}
_BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DISTILBERT = {"vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 32, "n_layers": LAYERS, "n_heads": 2}
_DISTILBERT |= {"dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.2}
_BART = {"vocab_size": VOCABULARY, "d_model": 16, "dropout": 0.0, "init_std": 0.2, "max_position_embeddings": 32}
_BART |= {"decoder_ffn_dim": 32, "decoder_attention_heads": 2, "encoder_layers": LAYERS + 2, "decoder_layers": LAYERS}
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION |= {"image_size": 8, "patch_size": 4, "projection_dim": 16}
_LLAVA = {"text_config": {"model_type": "llama"} | _SIZES, "image_token_index": VOCABULARY - 1}
_LLAVA |= {"vision_config": {"model_type": "clip_vision_model"} | _VISION}
_MODERN = _BERT | {"local_attention": 4, "embedding_dropout": 0.0, "attention_dropout": 0.0, "mlp_dropout": 0.0}
_MODERN |= {"classifier_dropout": 0.0, "cls_token_id": 1, "sep_token_id": 2}
_PROJECTED = _OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False, "attention_dropout": 0.0}
_GRIFFIN = _SIZES | {"num_hidden_layers": 6, "lru_width": 16, "attention_window_size": 8}
_DEEP = _GPT2 | {"pad_token_id": 0, "num_labels": 3}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", _SIZES),
    "LlavaForConditionalGeneration": ("LlavaConfig", _LLAVA),
    "BartForCausalLM": ("BartConfig", _BART),
    "LlamaForSequenceClassification": ("LlamaConfig", _PADDED),
    "GPT2ForSequenceClassification": ("GPT2Config", _DEEP),
    "MistralForTokenClassification": ("MistralConfig", _PADDED),
    "BertForMaskedLM": ("BertConfig", _BERT),
    "BertForSequenceClassification": ("BertConfig", _BERT),
    "RobertaForMaskedLM": ("RobertaConfig", _BERT | {"max_position_embeddings": 40}),
    "DistilBertForTokenClassification": ("DistilBertConfig", _DISTILBERT),
    "ModernBertForMaskedLM": ("ModernBertConfig", _MODERN),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", CONFIGS["qwen3-moe"][1]),
    "OPTForCausalLM": ("OPTConfig", _PROJECTED),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", _GPT2),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", _GRIFFIN),
}
"""Those whose loss shifts its labels, though their name or their mapping says otherwise, or the other way round; whose
last stage needs the token ids; whose embeddings are a module of several, or of another size than the hidden states;
whose layers return lists; and which use a buffer before the layers."""

TRAINED = ("llama", "tied llama", "gpt2", "qwen3-moe")


def config(name: str) -> PretrainedConfig:
    kind, options = CONFIGS[name]
    made: PretrainedConfig = getattr(transformers, kind)(**options)
    return made


def plain_model(name: str) -> PreTrainedModel:
    """The model as transformers makes it."""
    kind = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config(name)), None) or transformers.ViTForImageClassification
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: PreTrainedModel = kind(config(name))
    return model


@cache
def saved(name: str) -> str:
    """The folder of the model, as transformers saves it beside a tokenizer, with the prefix of its name.

    All tests of a process read it: one that changes a file copies the folder first.
    """
    folder = Path(mkdtemp(prefix=name.replace(" ", "-")))
    plain_model(name).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return f"hf:{folder}"


def batch(step: int) -> tuple[list[Any], list[Tensor]]:
    """Sequences of different lengths, so that microbatches have different numbers of tokens."""
    text = torch.randint(1, VOCABULARY, (MICROBATCHES, ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(text)
    for i in range(MICROBATCHES):
        mask[i, 0, 3 + i :] = 0
    labels = text.masked_fill(mask == 0, -100)
    return [{"input_ids": x, "attention_mask": m} for x, m in zip(text, mask, strict=True)], list(labels)


def unmasked_batch(step: int) -> tuple[list[Any], list[Tensor]]:
    """Sequences of one length without a mask; labels of some positions are ignored."""
    inputs, labels = batch(step)
    return [x["input_ids"] for x in inputs], labels


def short_batch(step: int) -> tuple[list[Any], list[Tensor]]:
    """Microbatches of different lengths, padded within."""
    inputs, labels = batch(step)
    lengths = [4 + (step + 2 * i) % (TOKENS - 3) for i in range(MICROBATCHES)]
    cut = [{name: x[:, :n] for name, x in entry.items()} for entry, n in zip(inputs, lengths, strict=True)]
    return cut, [y[:, :n] for y, n in zip(labels, lengths, strict=True)]


READ: list[int] = []
"""Steps of the microbatches that this process has read from a loader."""


def loader(replica: int, replicas: int) -> Iterator[dict[str, Any]]:
    """The microbatches of a replica, step by step."""
    own = MICROBATCHES // replicas
    for step in count():
        inputs, labels = batch(step)
        for i in range(replica * own, (replica + 1) * own):
            READ.append(step)
            yield inputs[i] | {"labels": labels[i]}


@cache
def saved_architecture(name: str) -> str:
    """The folder of a model of `ARCHITECTURES`, as transformers saves it, with the prefix of its name."""
    kind, options = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, name)(getattr(transformers, kind)(**options, architectures=[name]))
    folder = Path(mkdtemp(prefix=name))
    model.save_pretrained(folder)
    return f"hf:{folder}"


@cache
def plain_losses(
    name: str, steps: int = STEPS, batches: Callable[[int], tuple[list[Any], list[Tensor]]] = batch
) -> list[float]:
    """Losses of training the uncut model by the loss of transformers, over the tokens of the batch."""
    model = plain_model(name)
    groups = decaying(model.parameters())
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(steps):
        inputs, labels = batches(step)
        tokens = sum(int((row[:, 1:] != -100).sum()) for row in labels)
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs, labels, strict=True):
            output = model(**x, labels=y, num_items_in_batch=tokens, use_cache=False)
            loss = output.loss
            if "moe" in name:  # transformers adds it whole for each microbatch; the mean over a batch is one
                loss = loss - BALANCE * (1 - 1 / MICROBATCHES) * output.aux_loss
            torch.autograd.backward(loss)
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses
