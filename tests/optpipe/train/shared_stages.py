"""Models of which stages share parameters, and the plain training of each: uncut, one optimizer over its parameters.

GPT-2 and Llama are those of transformers, with few weights drawn at random; like many, they tie embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from optpipe.train import OptimizerConfig
from tests.optpipe.train.cases import decaying

VOCABULARY, WIDTH, ROWS, TOKENS, MICROBATCHES = 32, 16, 2, 8, 4

Built = tuple[list[nn.Module], Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[list[Tensor], list[Tensor]]:
    text = torch.randint(VOCABULARY, (MICROBATCHES, ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return list(text[..., :-1]), list(text[..., 1:])


def _built(stages: list[nn.Module]) -> Built:
    [inputs, *_], [targets, *_] = batch(0)
    return stages, inputs, targets, token_loss


def build_gpt2() -> GPT2LMHeadModel:
    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    none |= {"bos_token_id": None, "eos_token_id": None}
    sizes = {"vocab_size": VOCABULARY, "n_positions": TOKENS, "n_embd": WIDTH, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, initializer_range=0.2))


def build_llama() -> LlamaForCausalLM:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 4}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "max_position_embeddings": TOKENS}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.2))


class GPT2Stage(nn.Module):
    """Some of the blocks, after the embeddings in the first stage, before norm and head in the last."""

    def __init__(self, model: GPT2LMHeadModel, stage: int, stages: int) -> None:
        super().__init__()
        body = model.transformer
        share = len(body.h) // stages
        self.blocks = nn.ModuleList(body.h[stage * share : (stage + 1) * share])
        self.wte, self.wpe = (body.wte, body.wpe) if stage == 0 else (None, None)
        self.norm, self.head = (body.ln_f, model.lm_head) if stage == stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.wte is not None and self.wpe is not None:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[-1], device=x.device))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class LlamaStage(nn.Module):
    """Stage like `GPT2Stage`; all have the one module of rotary embeddings."""

    def __init__(self, model: LlamaForCausalLM, stage: int, stages: int) -> None:
        super().__init__()
        body = model.model
        share = len(body.layers) // stages
        self.blocks = nn.ModuleList(body.layers[stage * share : (stage + 1) * share])
        self.rotary = body.rotary_emb
        self.embedding = body.embed_tokens if stage == 0 else None
        self.norm, self.head = (body.norm, model.lm_head) if stage == stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        positions = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
        for block in self.blocks:
            x = block(x, position_embeddings=positions)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def gpt2_in_2() -> Built:
    model = build_gpt2()
    return _built([GPT2Stage(model, s, 2) for s in range(2)])


def gpt2_in_4() -> Built:
    model = build_gpt2()
    return _built([GPT2Stage(model, s, 4) for s in range(4)])


def llama_in_2() -> Built:
    model = build_llama()
    return _built([LlamaStage(model, s, 2) for s in range(2)])


def llama_in_4() -> Built:
    model = build_llama()
    return _built([LlamaStage(model, s, 4) for s in range(4)])


def ends_in_2() -> Built:
    """An embedding and a head, and nothing between them."""
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    head.weight = embedding.weight
    return _built([embedding, head])


class Mixer(nn.Module):
    """A weight that it has twice, once in a layer that splits its backward and once in a product of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, VOCABULARY)
        self.up.weight = self.down = weight

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + torch.tanh(self.up(x)) @ self.down
        return mixed


def everywhere_in_4() -> Built:
    """One weight in all four stages, twice in two of them."""
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    nn.init.normal_(embedding.weight, std=0.3)
    head.weight = embedding.weight
    return _built([embedding, Mixer(embedding.weight), Mixer(embedding.weight), head])


def modules_in_4() -> Built:
    """The two stages in the middle are one module; the last has the first one's embedding in a module."""
    embedding, block = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    return _built([embedding, block, block, Unembedding(embedding)])


class Unembedding(nn.Module):
    """Has the module of another stage, of which it uses the weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.norm = embedding, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def frozen_in_4() -> Built:
    """Stages whose shared parameter is not trained."""
    stages, *rest = everywhere_in_4()
    next(stages[0].parameters()).requires_grad_(False)
    return stages, *rest  # type: ignore[return-value]


def sliced_in_2() -> Built:
    """The head has the first rows of the embedding, as a parameter of its own."""
    embedding, head = nn.Embedding(2 * VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    head.weight = nn.Parameter(embedding.weight.data[:VOCABULARY])
    return _built([embedding, head])


def buffered_in_2() -> Built:
    """The head has the embedding's data, as a buffer."""
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    head.register_buffer("table", embedding.weight.data)
    return _built([embedding, head])


class HeadAndLoss(nn.Module):
    """A loss that has the head, with a weight that it shares with the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return token_loss(x @ self.weight.T, target)


def loss_in_2() -> Built:
    """The loss has a parameter that no process but the first would update."""
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    _, inputs, targets, _ = _built([])
    return [embedding, nn.Linear(WIDTH, WIDTH)], inputs, targets, HeadAndLoss(embedding.weight)


def statistics_in_2() -> Built:
    """Both stages move the same running statistics."""
    norm = nn.BatchNorm1d(TOKENS)
    first, last = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    return _built([nn.Sequential(first, norm), nn.Sequential(last, norm)])


class Counted(nn.Module):
    """A layer that counts its forwards in a buffer, in place or by another tensor in its place."""

    def __init__(self, layer: nn.Module, calls: Tensor, how: str) -> None:
        super().__init__()
        self.layer, self._how = layer, how
        self.calls: Tensor
        self.register_buffer("calls", calls)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self._how == "in place":
            self.calls += 1
        elif self.training and self._how == "replaced":
            self.calls = 0.9 * self.calls + 0.1 * x.float().mean().detach()
        scaled: Tensor = self.layer(x) * (1 + self.calls)
        return scaled


def _counted(*how: str) -> Built:
    calls, layers = torch.zeros(()), [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)]
    return _built([Counted(layer, calls, way) for layer, way in zip(layers, how, strict=True)])


def counted_in_2() -> Built:
    """Both stages change one buffer in place."""
    return _counted("in place", "in place")


def averaged_in_2() -> Built:
    """The last stage puts another tensor in the place of a buffer that the first only reads."""
    return _counted("read", "replaced")


def constant_in_2() -> Built:
    """Both stages read one buffer."""
    return _counted("read", "read")


class Uncut(nn.Module):
    """Stages one after the other."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self.stages = nn.Sequential(*built[0])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.stages(x)
        return found


def plain_model(name: str, seed: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The model before it is cut, as its builder made it, and its logits."""
    torch.manual_seed(seed)
    if name in ("gpt2", "llama"):
        model = build_gpt2() if name == "gpt2" else build_llama()
        return model, lambda x: model(x).logits
    build = globals().get(f"{name}_in_4") or globals()[f"{name}_in_2"]
    uncut = Uncut(build())
    return uncut, uncut


def plain_losses(name: str, config: OptimizerConfig, steps: int, seed: int = 0) -> tuple[list[float], int]:
    """Losses of training without a pipeline, and how many parameters the model has."""
    with torch.random.fork_rng(devices=[]):
        model, logits = plain_model(name, seed)
    rate, decay = config.learning_rate, config.weight_decay
    groups = decaying(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=decay)
    if config.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=rate, momentum=config.beta1, weight_decay=decay)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        loss = torch.stack([token_loss(logits(x), y) for x, y in zip(inputs, targets, strict=True)]).mean()
        torch.autograd.backward(loss)
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(p.numel() for p in model.parameters())
