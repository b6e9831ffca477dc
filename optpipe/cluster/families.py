"""Families of language models by `model_type`: what the class of each reads of a `config.json`, and what it does where
that says nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from optpipe.errors import InputError, Issue, shown

MAX_SIZE = 2**31
"""Largest number that a field of a configuration may have."""

SYNONYMS: Mapping[str, Sequence[str]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "first_k_dense_replace": ("first_k_dense",),
    "num_nextn_predict_layers": ("mtp_layers", "num_mtp_layers"),
}
"""Further names of a field, in configurations of other families."""

HEADS = frozenset({"head_dim", "num_key_value_heads", "intermediate_size"})
WINDOW = HEADS | {"sliding_window"}
WINDOWS = WINDOW | {"layer_types"}
EXPERTS = frozenset({"num_experts", "moe_intermediate_size"})
MIXED = EXPERTS | {"mlp_only_layers", "decoder_sparse_step"}
DENSE_FIRST = EXPERTS | {"first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers"}
LATENT = DENSE_FIRST | {"kv_lora_rank", "intermediate_size", "attention_bias", "moe_layer_freq"}
OPTIONAL = (
    WINDOWS
    | MIXED
    | LATENT
    | {"use_sliding_window", "max_window_layers", "sliding_window_every", "sliding_window_pattern"}
    | {"shared_expert_intermediate_size", "shared_expert_gate", "moe_every", "router_score_bias", "expert_bias"}
    | {"bias", "qkv_bias", "mlp_bias", "qk_norm", "attention_sinks", "norm", "gated", "learned_positions"}
    | {"word_embed_proj_dim", "layer_norm_elementwise_affine"}
)
"""Fields that stand for a part that not every class has: one that a class does not read changes nothing of its models,
though files of others, or of tools that add fields, may have it."""


@dataclass(frozen=True)
class Family:
    """Defaults of a `model_type`: what its class does where the configuration does not say."""

    reads: frozenset[str] = HEADS
    """The fields of OPTIONAL that its class reads."""
    absent: Mapping[str, int] = field(default_factory=dict)
    """Values that the class takes for absent fields, where other fields do not say them. One that is null has no
    such value."""
    norm: Literal["rms", "layer"] = "rms"
    norms: int = 2
    """In each layer, of the hidden width."""
    gated: bool = True
    tied: bool = False
    attention_bias: bool = False
    output_bias_follows: bool = True
    """True if the output of attention has a bias where queries have one."""
    mlp_bias: bool = False
    query_key_norm: Literal["none", "head", "all"] = "none"
    """A norm of queries and one of keys: of a head's width, or of all heads'."""
    sinks: bool = False
    """One more score for each head."""
    positions: int = 0
    """Rows of a learned embedding of positions that tokens have."""
    padding_positions: int = 0
    """Further rows of it, which no token of a full sequence has."""
    embedding_norm: bool = False
    final_norm: bool = True
    windows: Literal["all", "even", "early", "late", "most"] = "all"
    """Layers with the sliding window, where there is one and `layer_types` is absent: all, every second, every second
    of those before `max_window_layers`, those from it, all but each sixth."""
    slides: bool = True
    """False where there is a window only if `use_sliding_window` is true."""
    router_bias: bool = False
    expert_bias: bool = False
    shared_expert_gate: bool = False
    key_value_heads: int | None = None
    """In place of the field."""
    of: Callable[[Family, Fields], Family] | None = None
    """The row for the further fields of a configuration."""

    def seen(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that the class reads, with what it takes for absent ones."""
        ignored = {key for name in OPTIONAL - self.reads for key in _names(name)}
        found = {key: value for key, value in config.items() if key not in ignored}
        return found | {name: value for name, value in self.absent.items() if found.keys().isdisjoint(_names(name))}


class Fields:
    """Typed access to the fields of a configuration by their common names."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def fault(self, name: str, code: str, detail: str) -> InputError:
        """Error about a field."""
        return InputError([Issue(self._key(name) or name, code, detail)], self.source)

    def _key(self, name: str) -> str | None:
        """The name under which the configuration has a field; None if it has none, or null."""
        return next((key for key in _names(name) if self.config.get(key) is not None), None)

    def has(self, name: str) -> bool:
        """True if the field is given and not null."""
        return self._key(name) is not None

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`; refused as missing where there is no default."""
        key = self._key(name)
        if key is None:
            if default is None:
                detail = "is missing. Maybe this is not the config.json of a decoder-only language model."
                raise self.fault(name, "missing", detail)
            return default
        value = self.config[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
            raise self.fault(
                name, "not_a_size", f"is {shown(value)} but must be an integer from {least} to {MAX_SIZE}."
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        key = self._key(name)
        if key is None:
            return default
        if not isinstance(self.config[key], bool):
            raise self.fault(name, "not_a_flag", f"is {shown(self.config[key])} but must be true or false.")
        return bool(self.config[key])

    def items(self, name: str) -> Sequence[Any]:
        """A list; empty where the field is absent."""
        value = self.config.get(name)
        if value is None or isinstance(value, list):
            return value or ()
        raise self.fault(name, "not_a_list", f"is {shown(value)} but must be a list.")


def _names(name: str) -> tuple[str, ...]:
    """A field's names."""
    return name, *SYNONYMS.get(name, ())


def _gpt2(row: Family, fields: Fields) -> Family:
    return replace(row, positions=fields.size("max_position_embeddings", 1024))


def _opt(row: Family, fields: Fields) -> Family:
    bias, before = fields.flag("enable_bias", True), fields.flag("do_layer_norm_before", True)
    return replace(
        row,
        positions=fields.size("max_position_embeddings", 2048),
        attention_bias=bias,
        mlp_bias=bias,
        final_norm=before and not fields.flag("_remove_final_layer_norm", False),
    )


def _falcon(row: Family, fields: Fields) -> Family:
    new = fields.flag("new_decoder_architecture", False)
    two = not fields.flag("parallel_attn", True) or fields.size("num_ln_in_parallel_attn", 2 if new else 1) == 2
    if new:
        return replace(row, norms=2 if two else 1)
    # The class has one group or as many as heads, whatever num_kv_heads says.
    groups = 1 if fields.flag("multi_query", True) else fields.size("num_attention_heads")
    return replace(row, norms=2 if two else 1, key_value_heads=groups)


def _glm4_moe(row: Family, fields: Fields) -> Family:
    return replace(row, query_key_norm="head" if fields.flag("use_qk_norm", False) else "none")


_LLAMA = Family(reads=HEADS | {"attention_bias", "mlp_bias"})
_QWEN = WINDOWS | {"use_sliding_window", "max_window_layers"}
_LATE = {"sliding_window": 4096, "max_window_layers": 28}
_QWEN2 = Family(
    reads=_QWEN,
    absent=_LATE | {"num_key_value_heads": 32},
    attention_bias=True,
    output_bias_follows=False,
    windows="late",
    slides=False,
)
_QWEN3 = Family(
    reads=_QWEN | {"attention_bias"},
    absent=_LATE | {"num_key_value_heads": 32, "head_dim": 128},
    query_key_norm="head",
    windows="late",
    slides=False,
)
_GEMMA = Family(
    reads=WINDOWS | {"attention_bias"},
    absent={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
    tied=True,
)
_LATENT_WIDTHS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DEEPSEEK = Family(
    reads=LATENT,
    absent=_LATENT_WIDTHS
    | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    | {"n_shared_experts": 1, "first_k_dense_replace": 3},
    router_bias=True,
)
_GPT = Family(
    reads=frozenset({"intermediate_size"}),
    norm="layer",
    gated=False,
    tied=True,
    attention_bias=True,
    mlp_bias=True,
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(reads=WINDOW, absent={"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": Family(
        reads=WINDOW | {"num_experts"}, absent={"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2}
    ),
    "phi3": Family(reads=WINDOW),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(
        _QWEN2,
        reads=_QWEN | MIXED | {"qkv_bias", "shared_expert_intermediate_size"},
        absent=_LATE
        | {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        windows="early",
        shared_expert_gate=True,
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3,
        reads=WINDOW | MIXED | {"use_sliding_window", "attention_bias"},
        absent={"sliding_window": 4096, "num_key_value_heads": 4}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        windows="all",
    ),
    "olmo2": Family(reads=HEADS | {"attention_bias"}, query_key_norm="all"),
    "glm4": Family(
        reads=HEADS | {"attention_bias"},
        absent={"head_dim": 128, "num_key_value_heads": 2},
        norms=4,
        attention_bias=True,
        output_bias_follows=False,
    ),
    "glm4_moe": Family(
        reads=HEADS | DENSE_FIRST | {"attention_bias"},
        absent={"num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1},
        output_bias_follows=False,
        router_bias=True,
        of=_glm4_moe,
    ),
    "gemma": replace(_GEMMA, reads=HEADS | {"attention_bias"}, absent={"head_dim": 256, "num_key_value_heads": 16}),
    "gemma2": replace(_GEMMA, norms=4, windows="even"),
    "gemma3_text": replace(
        _GEMMA,
        reads=_GEMMA.reads | {"sliding_window_pattern"},
        absent={**_GEMMA.absent, "num_attention_heads": 8, "vocab_size": 262_208},
        norms=4,
        windows="most",
        query_key_norm="head",
    ),
    "deepseek_v2": Family(
        reads=LATENT | {"mlp_bias"},
        absent=_LATENT_WIDTHS
        | {"num_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2, "first_k_dense_replace": 0},
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gpt_oss": Family(
        reads=WINDOWS | {"attention_bias", "num_experts"},
        absent={"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
        | {"num_experts": 128, "num_experts_per_tok": 4},
        attention_bias=True,
        sinks=True,
        windows="even",
        expert_bias=True,
    ),
    "gpt2": replace(_GPT, of=_gpt2),
    "gpt_neox": replace(_GPT, reads=_GPT.reads | {"attention_bias"}, absent={"intermediate_size": 24_576}, tied=False),
    "nemotron": Family(
        reads=HEADS | {"attention_bias", "mlp_bias"},
        absent={"intermediate_size": 24_576},
        norm="layer",
        gated=False,
    ),
    "bloom": replace(_GPT, reads=frozenset(), embedding_norm=True),
    "falcon": replace(
        _GPT,
        reads=_GPT.reads | {"num_key_value_heads", "bias"},
        attention_bias=False,
        mlp_bias=False,
        of=_falcon,
    ),
    "opt": replace(
        _GPT,
        reads=_GPT.reads | {"word_embed_proj_dim", "layer_norm_elementwise_affine"},
        absent={"intermediate_size": 3072},
        padding_positions=2,
        of=_opt,
    ),
}
"""By `model_type`."""

UNKNOWN = Family(reads=OPTIONAL)
"""A type that is not known: a llama, but for what the fields say."""
