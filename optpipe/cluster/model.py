"""Shape of a language model, read from the fields of a `config.json`, without transformers and without torch.

A `Model` says of every layer which matrices it multiplies by, how wide its attention is and which experts it has: what
formulas of time and memory need, and the number of parameters to the unit. Families differ by a row of `FAMILIES`: what
the class of that `model_type` does where the configuration says nothing. A configuration of another type with familiar
fields is read as a llama, and `Model.assumptions` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.cluster.families import FAMILIES, UNKNOWN, Fields
from optpipe.document import parse_json, read_bounded, refuse_kind
from optpipe.document_kinds import TRANSFORMERS_CONFIG, kind_of_data
from optpipe.errors import InputError, Issue, shown

MOST_LAYERS, MOST_PREDICTED = 10_000, 100
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
    """A decoder layer, perhaps of multi-token prediction (DeepSeek-V3, section 2.2): what joins two inputs in front."""

    attention: Attention
    feed_forward: FeedForward
    norm_parameters: int
    joining_products: int = 0
    """Elements of the matrix that joins the layer before and the embedding of a further token."""

    @property
    def parameters(self) -> int:
        """Parameters of the layer."""
        shared = self.norm_parameters + self.joining_products
        return self.attention.parameters + self.feed_forward.parameters + shared

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
    positions: int = 0
    """Positions that are learned, more than which no sequence has; 0 where none are: rotary ones have no limit."""
    prediction_layers: tuple[Layer, ...] = ()
    """Layers of multi-token prediction behind the last one. Embedding and head are shared with them."""
    assumptions: tuple[str, ...] = ()
    """Sentences about what the configuration left open."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The fields that were read, for trainers that build the model from them."""

    @property
    def parameters(self) -> int:
        """Parameters as they are published: without the layers of multi-token prediction."""
        return self.embedding_parameters + sum(layer.parameters for layer in self.layers) + self.head_parameters

    @property
    def predicted_tokens(self) -> int:
        """Further tokens that are predicted, each by a layer of its own."""
        return len(self.prediction_layers)

    @property
    def prediction_parameters(self) -> int:
        """Parameters of the layers of multi-token prediction."""
        return sum(layer.parameters for layer in self.prediction_layers)

    @cached_property
    def stack(self) -> tuple[Layer, ...]:
        """Layers between embedding and head, in order: those that a cut divides."""
        return self.layers + self.prediction_layers

    @property
    def most_stages(self) -> int:
        """Stages that the model fills: one of each layer, embedding and head; further tokens are predicted in one."""
        return len(self.layers) + (self.predicted_tokens > 0) + 2

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets."""
        idle = sum(layer.parameters - layer.active_parameters for layer in self.layers)
        return self.parameters - idle

    def on_ranks(self, layer: Layer, tensor: int) -> Layer:
        """A layer as `tensor` ranks of tensor parallelism hold it together.

        Each has keys and values of a head at least, so where there are fewer heads of these, several hold the same.
        """
        one = layer.attention
        copies = max(0, tensor - one.key_value_heads) * self.hidden * (one.query_key_width + one.value_width)
        if not copies:
            return layer
        return replace(
            layer,
            attention=replace(
                one, key_value_heads=tensor, products=one.products + copies, parameters=one.parameters + copies
            ),
        )

    @cached_property
    def distinct_layers(self) -> tuple[Layer, ...]:
        """Layers of the stack that differ, in the order of their first."""
        return tuple(dict.fromkeys(self.stack))

    @cached_property
    def layers_before(self) -> NDArray[np.int64]:
        """How many of the first k layers of the stack are of each distinct kind: shape (layers + 1, kinds)."""
        number = {layer: k for k, layer in enumerate(self.distinct_layers)}
        one_hot = np.eye(len(number), dtype=np.int64)[[number[layer] for layer in self.stack]]
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


NOT_READ: Mapping[str, str] = {
    "linear_num_key_heads": "linear attention",
    "mamba_num_heads": "state space layers",
    "mamba_n_heads": "state space layers",
    "mamba_d_state": "state space layers",
    "conv_L_cache": "convolutions",
    "interleave_moe_layer_step": "shared experts, and routed ones in every n-th layer",
    "moe_num_experts": "experts under other names",
    "hybrid_layer_pattern": "layers of several kinds by a pattern",
    "ssm_cfg": "state space layers",
    "index_n_heads": "attention to indexed tokens",
    "moe_latent_size": "experts in a latent space",
    "decoder_layers": "an encoder and a decoder",
}
"""Fields of architectures that have other layers than these."""
LAYER_TYPES = ("full_attention", "sliding_attention")


@cache
def named_models() -> Mapping[str, Mapping[str, Any]]:
    """Configurations that come with the program, by name: fields of their `config.json`, and the `source` of these."""
    models: dict[str, dict[str, Any]] = parse_json(Path(__file__).with_name("models.json").read_bytes())
    return models


def model_name(model: str) -> str | None:
    """Name of a listed model by its name here or on the Hugging Face hub, with or without its owner, in any case."""
    for name, config in named_models().items():
        hub_name = config["source"].partition(",")[0].lower()
        if model.lower() in (name, hub_name, hub_name.rpartition("/")[2]):
            return name
    return None


def load_model(model: str) -> Model:
    """Read a model by its name here or on the Hugging Face hub, its `config.json` or the folder that holds one.

    Raises InputError for a name that is none and no path, and where the configuration cannot be read.
    """
    if (config := named_models().get(model)) is not None:
        return read_model(config, model, model)
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        if (name := model_name(model)) is not None:
            return load_model(name)
        close = get_close_matches(model.lower(), named_models(), 1, 0.4)
        detail = f"is {shown(model)}, which is no known model and no config.json. Maybe "
        detail += f"{close[0]!r}, or a folder with the model's config.json." if close else "see `optpipe models`."
        raise InputError([Issue("MODEL", "unknown_model", detail)])
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
    """Reader of one configuration."""

    def __init__(self, config: Mapping[str, Any], name: str, source: str) -> None:
        fields = Fields(config, source)
        for other, what in NOT_READ.items():
            if fields.has(other):
                raise fields.fault(other, "not_read", f"stands for {what}, which has no formulas here yet.")
        self.assumptions: list[str] = []
        model_type = config.get("model_type", "")
        if not isinstance(model_type, str):
            raise fields.fault("model_type", "not_a_name", f"is {shown(model_type)} but must be a text.")
        self.name, self.model_type = name or str(config.get("_name_or_path") or model_type), model_type
        row = FAMILIES.get(model_type, UNKNOWN)
        if row is UNKNOWN:
            what = f"model_type {model_type!r} is not known" if model_type else "There is no model_type"
            self.assumptions.append(f"{what}: read as a llama, but for what the fields say.")
        self.config = config
        self.fields = fields = Fields(row.seen(config) if row is not UNKNOWN else config, source)
        self.family = row.of(row, fields) if row.of else row
        self.hidden, self.heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        layer_norm = str(fields.config.get("norm") or self.family.norm).lower().startswith("layer")
        affine = fields.flag("layer_norm_elementwise_affine", True)
        self.norm_parameters = self.hidden * ((2 if layer_norm else 1) if affine else 0)

    def model(self) -> Model:
        """The model."""
        fields, family, h = self.fields, self.family, self.hidden
        vocabulary, count = fields.size("vocab_size"), fields.size("num_hidden_layers")
        if count > MOST_LAYERS:
            raise fields.fault("num_hidden_layers", "too_large", f"is {count} but at most {MOST_LAYERS} are read.")
        kinds = fields.items("layer_types")
        if others := [kind for kind in kinds if kind not in LAYER_TYPES]:
            detail = f"has {shown(others[0])}, but only {' and '.join(LAYER_TYPES)} have formulas here yet."
            raise fields.fault("layer_types", "not_read", detail)
        if kinds and len(kinds) != count:
            detail = f"has {len(kinds)} entries, but num_hidden_layers is {count}."
            raise fields.fault("layer_types", "other_length", detail)
        layers = tuple(self._layer(index) for index in range(count))
        tied = fields.flag("tie_word_embeddings", family.tied)
        width = fields.size("word_embed_proj_dim", h)
        positions = fields.size("learned_positions", family.positions, least=0)
        embedding = vocabulary * width + (positions + family.padding_positions) * h
        embedding += self.norm_parameters if family.embedding_norm else 0
        head = (0 if tied else vocabulary * width) + (self.norm_parameters if family.final_norm else 0)
        if width != h:  # projections behind the embedding and in front of the head
            embedding, head = embedding + width * h, head + width * h
        predicted = fields.size("num_nextn_predict_layers", 0, least=0)
        if predicted > MOST_PREDICTED:
            detail = f"is {predicted} but at most {MOST_PREDICTED} are read."
            raise fields.fault("num_nextn_predict_layers", "too_large", detail)
        # Each is as the last layer, joins two normed inputs, and has a norm in front of the head that all share.
        norms = layers[-1].norm_parameters + 3 * self.norm_parameters
        prediction = replace(layers[-1], norm_parameters=norms, joining_products=2 * h * h)
        return Model(
            name=self.name,
            model_type=self.model_type,
            hidden=h,
            vocabulary=vocabulary,
            layers=layers,
            tied=tied,
            embedding_parameters=embedding,
            head_parameters=head,
            positions=positions,
            prediction_layers=(prediction,) * predicted,
            assumptions=tuple(self.assumptions),
            config=self.config,
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
        if not fields.has("sliding_window") or not fields.flag("use_sliding_window", self.family.slides):
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
                case "early":
                    slides = index % 2 == 0 and index < fields.size("max_window_layers", least=0)
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
        products, parameters = self._mlp(width, self._mlp_bias)
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
            gate = h if fields.flag("shared_expert_gate", self.family.shared_expert_gate) else 0
            more, with_bias = self._mlp(shared, self._mlp_bias)
            products, parameters = products + more + gate, parameters + with_bias + gate
        parameters += experts * expert_parameters
        return FeedForward(width, products, parameters, experts, chosen, expert_products, expert_parameters)

    @property
    def _mlp_bias(self) -> bool:
        return self.fields.flag("mlp_bias", self.fields.flag("bias", self.family.mlp_bias))

    @property
    def _gated(self) -> bool:
        return self.fields.flag("gated", self.family.gated)

    def _mlp(self, width: int, bias: bool) -> tuple[int, int]:
        """Elements of the matrices of a feed-forward, and all its parameters."""
        inner = 2 if self._gated else 1
        products = (inner + 1) * self.hidden * width
        return products, products + (inner * width + self.hidden if bias else 0)
