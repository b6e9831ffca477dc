"""A made model of few layers with a large vocabulary, and its jobs."""

from __future__ import annotations

from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import Model, read_model
from optpipe.cluster.software import MEGATRON
from solver.layout.fitting import Job

WIDTH, INNER, LAYERS = 2048, 8192, 16
VOCABULARY = 262_144
LAYER_PARAMETERS = 4 * WIDTH**2 + 3 * WIDTH * INNER + 2 * WIDTH
"""Four matrices of attention, three of the gated feed-forward, two norms."""


def heavy_head(vocabulary: int = VOCABULARY, *, tied: bool = False) -> Model:
    """A model whose output layer multiplies by `vocabulary` rows: as many products as in eight layers, by default."""
    fields = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": vocabulary}
    more = {"num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": tied}
    return read_model({"model_type": "llama"} | fields | more, "heavy-head")


def heavy_job(vocabulary: int = VOCABULARY, *, tied: bool = False, batch: int = 64) -> Job:
    """Train it on H100 with sequences of 2,048 tokens."""
    return Job(heavy_head(vocabulary, tied=tied), named_machines()["h100"], 2048, batch, MEGATRON)
