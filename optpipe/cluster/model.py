"""Shape of a language model, read from the fields of a `config.json`, without transformers and without torch.

A `Model` says of every layer which matrices it multiplies by, how wide its attention is and which experts it has: what
formulas of time and memory need, and the number of parameters to the unit. Families differ by a row of `FAMILIES`: what
the class of that `model_type` does where the configuration says nothing. A configuration of another type with familiar
fields is read as a llama, and `Model.assumptions` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from optpipe.document import parse_json, read_bounded, refuse_kind
from optpipe.document_kinds import TRANSFORMERS_CONFIG, kind_of_data
from optpipe.errors import InputError, Issue, shown

MAX_SIZE = 2**31
"""Largest number that a field of a configuration may have."""
MOST_LAYERS = 10_000
MAX_FILE_BYTES = 2**20
"""Largest `config.json` that is read; those of published models have a few kilobytes."""


@dataclass(frozen=True)
class Attention:
    """Attention of a layer. `query_key_width` and `value_width` are those of one head, in elements.

    `window` is the number of tokens that a token sees, None for all before it. `latent_width` is what a token leaves
    for keys and values where they are compressed (multi-head latent attention, DeepSeek-V2, section 2.1), else 0.
    """

    heads: int
    key_value_heads: int
    query_key_width: int
    value_width: int
    products: int
    """Elements of the matrices that a token is multiplied by."""
    parameters: int
    """All of them: matrices, biases, norms of queries and keys, sinks."""
    window: int | None = None
    latent_width: int = 0


@dataclass(frozen=True)
class FeedForward:
    """Feed-forward of a layer: dense, or `experts` of which a token visits `chosen`; shared ones count as dense."""

    width: int
    """Inner width, of one expert where there are experts."""
    products: int
    """Elements of the matrices that every token is multiplied by: the dense ones, the router, shared experts."""
    parameters: int
    """All of them, of all experts too."""
    experts: int = 0
    chosen: int = 0
    expert_products: int = 0
    """Elements of the matrices of one expert."""
    expert_parameters: int = 0


@dataclass(frozen=True)
class Layer:
    """A decoder layer."""

    attention: Attention
    feed_forward: FeedForward
    norm_parameters: int

    @property
    def parameters(self) -> int:
        """Parameters of the layer."""
        return self.attention.parameters + self.feed_forward.parameters + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: of the experts, those of the chosen."""
        idle = self.feed_forward.experts - self.feed_forward.chosen
        return self.parameters - idle * self.feed_forward.expert_parameters


@dataclass(frozen=True)
class Model:
    """A decoder-only language model: an embedding, `layers`, a head, and layers that predict further tokens (MTP)."""

    name: str
    model_type: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    tied: bool
    """True if the head's matrix is the embedding's."""
    embedding_parameters: int
    """Parameters of tokens, positions, projections and norms in front of the first layer."""
    head_parameters: int
    """Parameters of the last norm, and of the matrix unless it is tied."""
    predicted_tokens: int = 0
    """Layers of multi-token prediction behind the last one (DeepSeek-V3, section 2.2)."""
    prediction_parameters: int = 0
    """Parameters of all these; embedding and head are shared. Each is a layer as the last one, and what joins two
    inputs in front of it."""
    assumptions: tuple[str, ...] = ()
    """Sentences about what the configuration left open."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The fields that were read, for trainers that build the model from them."""

    @property
    def parameters(self) -> int:
        """Parameters as they are published: without the layers of multi-token prediction."""
        return self.embedding_parameters + sum(layer.parameters for layer in self.layers) + self.head_parameters

    @property
    def joining_parameters(self) -> int:
        """Parameters of the layers of multi-token prediction without the layers themselves."""
        return self.prediction_parameters - self.predicted_tokens * self.layers[-1].parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets."""
        idle = sum(layer.parameters - layer.active_parameters for layer in self.layers)
        return self.parameters - idle

    @cached_property
    def distinct_layers(self) -> tuple[Layer, ...]:
        """Layers that differ, in the order of their first."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def layers_before(self) -> NDArray[np.int64]:
        """How many of the first k layers are of each distinct kind: shape (layers + 1, kinds)."""
        number = {layer: k for k, layer in enumerate(self.distinct_layers)}
        one_hot = np.eye(len(number), dtype=np.int64)[[number[layer] for layer in self.layers]]
        return np.vstack([np.zeros((1, len(number)), np.int64), one_hot.cumsum(0)])

    @property
    def kinds(self) -> list[tuple[Layer, int]]:
        """Layers in order, equal neighbours as one with their number."""
        return [(layer, len(list(same))) for layer, same in groupby(self.layers)]

    def to_data(self) -> dict[str, Any]:
        """Sizes and parameters as plain JSON values, layers by kind."""
        return {
            "name": self.name,
            "model_type": self.model_type,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "prediction_parameters": self.prediction_parameters,
            "hidden_size": self.hidden,
            "vocab_size": self.vocabulary,
            "tied": self.tied,
            "embedding_parameters": self.embedding_parameters,
            "head_parameters": self.head_parameters,
            "layers": [
                {
                    "count": count,
                    "parameters": layer.parameters,
                    "active_parameters": layer.active_parameters,
                    "attention": vars(layer.attention),
                    "feed_forward": vars(layer.feed_forward),
                }
                for layer, count in self.kinds
            ],
            "assumptions": list(self.assumptions),
        }


@dataclass(frozen=True)
class Family:
    """Defaults of a `model_type`: what its class does where the configuration does not say."""

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
    """Rows of a learned embedding of positions."""
    embedding_norm: bool = False
    final_norm: bool = True
    windows: Literal["all", "even", "late", "most"] = "all"
    """Layers with the sliding window, where there is one and `layer_types` is absent: all, every second, those from
    `max_window_layers`, all but each sixth."""
    router_bias: bool = False
    expert_bias: bool = False
    shared_expert_gate: bool = False
    key_value_heads: int | None = None
    """In place of the field."""
    of: Callable[[Family, Fields], Family] | None = None
    """The row for the further fields of a configuration."""


class Fields:
    """Typed access to the fields of a configuration by their common names."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def fault(self, name: str, code: str, detail: str) -> InputError:
        """Error about a field."""
        return InputError([Issue(self._key(name) or name, code, detail)], self.source)

    def _key(self, name: str) -> str | None:
        """The name under which the configuration has a field; None if it has none, or null."""
        return next((key for key in (name, *SYNONYMS.get(name, ())) if self.config.get(key) is not None), None)

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


SYNONYMS: Mapping[str, Sequence[str]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "first_k_dense_replace": ("first_k_dense",),
    "num_nextn_predict_layers": ("mtp_layers",),
}
"""Further names of a field, in configurations of other families."""

NOT_READ: Mapping[str, str] = {
    "linear_num_key_heads": "linear attention",
    "mamba_num_heads": "state space layers",
    "hybrid_layer_pattern": "layers of several kinds by a pattern",
    "ssm_cfg": "state space layers",
    "index_n_heads": "attention to indexed tokens",
    "moe_latent_size": "experts in a latent space",
    "decoder_layers": "an encoder and a decoder",
}
"""Fields of architectures that have other layers than these."""


def _gpt2(row: Family, fields: Fields) -> Family:
    return replace(row, positions=fields.size("max_position_embeddings", 1024))


def _opt(row: Family, fields: Fields) -> Family:
    bias, before = fields.flag("enable_bias", True), fields.flag("do_layer_norm_before", True)
    return replace(
        row,
        positions=fields.size("max_position_embeddings") + 2,  # the class keeps two rows for padding
        attention_bias=bias,
        mlp_bias=bias,
        final_norm=before and not fields.flag("_remove_final_layer_norm", False),
    )


def _falcon(row: Family, fields: Fields) -> Family:
    new = fields.flag("new_decoder_architecture", False)
    one = fields.flag("parallel_attn", True) and (not new or fields.size("num_ln_in_parallel_attn", 2) == 1)
    groups = 1 if fields.flag("multi_query", True) and not new else None
    return replace(row, norms=1 if one else 2, key_value_heads=groups)


def _glm4_moe(row: Family, fields: Fields) -> Family:
    return replace(row, query_key_norm="head" if fields.flag("use_qk_norm", False) else "none")


_LLAMA = Family()
_QWEN2 = Family(attention_bias=True, output_bias_follows=False, windows="late")
_QWEN3 = Family(query_key_norm="head", windows="late")
_GEMMA = Family(tied=True)
_DEEPSEEK = Family(router_bias=True)
_GPT = Family(norm="layer", gated=False, tied=True, attention_bias=True, mlp_bias=True)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "phi3": _LLAMA,
    "qwen2": _QWEN2,
    "qwen2_moe": replace(_QWEN2, shared_expert_gate=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "olmo2": Family(query_key_norm="all"),
    "glm4": Family(norms=4, attention_bias=True, output_bias_follows=False),
    "glm4_moe": Family(output_bias_follows=False, router_bias=True, of=_glm4_moe),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4, windows="even"),
    "gemma3_text": replace(_GEMMA, norms=4, windows="most", query_key_norm="head"),
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gpt_oss": Family(attention_bias=True, sinks=True, windows="even", expert_bias=True),
    "gpt2": replace(_GPT, of=_gpt2),
    "gpt_neox": replace(_GPT, tied=False),
    "nemotron": Family(norm="layer", gated=False),
    "bloom": replace(_GPT, embedding_norm=True),
    "falcon": replace(_GPT, attention_bias=False, mlp_bias=False, of=_falcon),
    "opt": replace(_GPT, of=_opt),
}
"""By `model_type`."""


@cache
def named_models() -> Mapping[str, Mapping[str, Any]]:
    """Configurations that come with the program, by name: fields of their `config.json`, and the `source` of these."""
    models: dict[str, dict[str, Any]] = parse_json(Path(__file__).with_name("models.json").read_bytes())
    return models


def load_model(model: str) -> Model:
    """Read a model by its name, its `config.json` or the folder that holds one.

    Raises InputError for a name that is none and no path, and where the configuration cannot be read.
    """
    if (config := named_models().get(model)) is not None:
        return read_model(config, model, model)
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        close = get_close_matches(model.lower(), named_models(), 1, 0.4)
        detail = f"is {shown(model)}, which is no known model and no config.json. Maybe "
        raise InputError(
            [Issue("MODEL", "unknown_model", detail + (f"{close[0]!r}." if close else "see `optpipe models`."))]
        )
    config = parse_json(read_bounded(path, MAX_FILE_BYTES), str(path))
    refuse_kind(kind_of_data(config), [TRANSFORMERS_CONFIG], str(path))
    return read_model(config, source=str(path))


def read_model(config: Any, name: str = "", source: str = "") -> Model:
    """Read the fields of a `config.json`; `name` is the model's, `source` names the document in errors.

    Raises InputError that names the field that is missing or wrong, or that stands for layers that are not read.
    """
    if not isinstance(config, dict):
        raise InputError(
            [Issue("", "wrong_kind", f"is {shown(config)} but must be the object of a config.json.")], source
        )
    text = config.get("text_config")
    return _Reader(text if isinstance(text, dict) else config, name, source).model()


class _Reader:
    """Reads one configuration."""

    def __init__(self, config: Mapping[str, Any], name: str, source: str) -> None:
        self.fields = fields = Fields(config, source)
        for other, what in NOT_READ.items():
            if fields.has(other):
                raise fields.fault(other, "not_read", f"stands for {what}, which has no formulas here yet.")
        self.assumptions: list[str] = []
        model_type = config.get("model_type", "")
        if not isinstance(model_type, str):
            raise fields.fault("model_type", "not_a_name", f"is {shown(model_type)} but must be a text.")
        self.name, self.model_type = name or str(config.get("_name_or_path") or model_type), model_type
        row = FAMILIES.get(model_type)
        if row is None:
            row = _LLAMA
            what = f"model_type {model_type!r} is not known" if model_type else "There is no model_type"
            self.assumptions.append(f"{what}: read as a llama, but for what the fields say.")
        self.family = row.of(row, fields) if row.of else row
        self.hidden, self.heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        layer_norm = str(config.get("norm") or self.family.norm).lower().startswith("layer")
        self.norm_parameters = self.hidden * (2 if layer_norm else 1)

    def model(self) -> Model:
        """The model."""
        fields, family, h = self.fields, self.family, self.hidden
        vocabulary, count = fields.size("vocab_size"), fields.size("num_hidden_layers")
        if count > MOST_LAYERS:
            raise fields.fault("num_hidden_layers", "too_large", f"is {count} but at most {MOST_LAYERS} are read.")
        layers = tuple(self._layer(index) for index in range(count))
        tied = fields.flag("tie_word_embeddings", family.tied)
        width = fields.size("word_embed_proj_dim", h)
        embedding = vocabulary * width + fields.size("learned_positions", family.positions, least=0) * h
        embedding += self.norm_parameters if family.embedding_norm else 0
        head = (0 if tied else vocabulary * width) + (self.norm_parameters if family.final_norm else 0)
        if width != h:  # projections behind the embedding and in front of the head
            embedding, head = embedding + width * h, head + width * h
        predicted = fields.size("num_nextn_predict_layers", 0, least=0)
        # Each joins two normed inputs by a matrix, and has a norm in front of the head that all share.
        prediction = predicted * (layers[-1].parameters + 2 * h * h + 3 * self.norm_parameters)
        return Model(
            name=self.name,
            model_type=self.model_type,
            hidden=h,
            vocabulary=vocabulary,
            layers=layers,
            tied=tied,
            embedding_parameters=embedding,
            head_parameters=head,
            predicted_tokens=predicted,
            prediction_parameters=prediction,
            assumptions=tuple(self.assumptions),
            config=fields.config,
        )

    def _layer(self, index: int) -> Layer:
        attention = self._latent_attention() if self.fields.has("kv_lora_rank") else self._attention(index)
        sparse = self.fields.size("num_experts", 0, least=0) > 0 and self._has_experts(index)
        feed_forward = self._experts() if sparse else self._dense()
        return Layer(attention, feed_forward, self.family.norms * self.norm_parameters)

    def _attention(self, index: int) -> Attention:
        fields, family, h, heads = self.fields, self.family, self.hidden, self.heads
        groups = family.key_value_heads or fields.size("num_key_value_heads", heads)
        if heads % groups:
            detail = f"is {groups} but must divide num_attention_heads, which is {heads}."
            raise fields.fault("num_key_value_heads", "does_not_divide", detail)
        if not fields.has("head_dim") and h % heads:
            detail = f"is {h} but must be a multiple of num_attention_heads ({heads}). Maybe head_dim is missing."
            raise fields.fault("hidden_size", "does_not_divide", detail)
        width = fields.size("head_dim", h // heads)
        products = h * width * (2 * heads + 2 * groups)
        parameters = products
        biased = fields.flag("attention_bias", fields.flag("bias", family.attention_bias))
        if fields.flag("qkv_bias", biased):
            parameters += width * (heads + 2 * groups)
        if biased and family.output_bias_follows:
            parameters += h
        match "head" if fields.flag("qk_norm", False) else family.query_key_norm:
            case "head":
                parameters += 2 * width
            case "all":
                parameters += width * (heads + groups)
        if fields.flag("attention_sinks", family.sinks):
            parameters += heads
        return Attention(heads, groups, width, width, products, parameters, self._window(index))

    def _latent_attention(self) -> Attention:
        """DeepSeek-V2, section 2.1: queries and keys have a part of their own for rotary positions."""
        fields, h, heads = self.fields, self.hidden, self.heads
        latent, rotary = fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim")
        plain, value = fields.size("qk_nope_head_dim"), fields.size("v_head_dim")
        rank = fields.size("q_lora_rank", 0, least=0)
        queries = heads * (plain + rotary)
        products = (h + queries) * rank if rank else h * queries
        products += h * (latent + rotary) + latent * heads * (plain + value) + heads * value * h
        parameters = products + rank + latent  # the norms of what is compressed
        if fields.flag("attention_bias", False):
            parameters += rank + latent + rotary + h
        return Attention(heads, heads, plain + rotary, value, products, parameters, None, latent + rotary)

    def _window(self, index: int) -> int | None:
        fields = self.fields
        if not fields.has("sliding_window") or not fields.flag("use_sliding_window", self.family.windows != "late"):
            return None
        kinds = fields.items("layer_types")
        if index < len(kinds):
            slides = kinds[index] == "sliding_attention"
        elif fields.has("sliding_window_every"):
            slides = index % fields.size("sliding_window_every") == 0
        else:
            match self.family.windows:
                case "all":
                    slides = True
                case "even":
                    slides = index % 2 == 0
                case "late":
                    slides = index >= fields.size("max_window_layers", 0, least=0)
                case "most":
                    slides = (index + 1) % fields.size("sliding_window_pattern", 6) != 0
        return fields.size("sliding_window") if slides else None

    def _has_experts(self, index: int) -> bool:
        fields = self.fields
        if index in fields.items("mlp_only_layers") or index < fields.size("first_k_dense_replace", 0, least=0):
            return False
        if fields.has("moe_layer_freq"):
            return index % fields.size("moe_layer_freq") == 0
        return (index + 1) % fields.size("moe_every", fields.size("decoder_sparse_step", 1)) == 0

    def _dense(self) -> FeedForward:
        width = self.fields.size("intermediate_size", None if self._gated else 4 * self.hidden)
        products, parameters = self._mlp(
            width, self.fields.flag("mlp_bias", self.fields.flag("bias", self.family.mlp_bias))
        )
        return FeedForward(width, products, parameters)

    def _experts(self) -> FeedForward:
        fields, h, experts = self.fields, self.hidden, self.fields.size("num_experts")
        chosen = fields.size("num_experts_per_tok")
        if chosen > experts:
            raise fields.fault("num_experts_per_tok", "out_of_range", f"is {chosen} but there are {experts} experts.")
        width = fields.size("moe_intermediate_size" if fields.has("moe_intermediate_size") else "intermediate_size")
        biased = fields.flag("expert_bias", self.family.expert_bias)
        expert_products, expert_parameters = self._mlp(width, biased)
        products = h * experts  # the router
        parameters = products + (experts if fields.flag("router_score_bias", biased or self.family.router_bias) else 0)
        shared = fields.size("n_shared_experts", 0, least=0) * width
        if shared := fields.size("shared_expert_intermediate_size", shared, least=0):
            more = self._mlp(shared, False)[0]
            more += h if fields.flag("shared_expert_gate", self.family.shared_expert_gate) else 0
            products, parameters = products + more, parameters + more
        parameters += experts * expert_parameters
        return FeedForward(width, products, parameters, experts, chosen, expert_products, expert_parameters)

    @property
    def _gated(self) -> bool:
        return self.fields.flag("gated", self.family.gated)

    def _mlp(self, width: int, bias: bool) -> tuple[int, int]:
        """Elements of the matrices of a feed-forward, and all its parameters."""
        inner = 2 if self._gated else 1
        products = (inner + 1) * self.hidden * width
        return products, products + (inner * width + self.hidden if bias else 0)
