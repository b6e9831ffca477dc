"""A stage of a model of transformers: the model without the modules of other stages, and the messages it sends."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.models.absent import Received
from optpipe.models.reads import OWN_STAGES
from optpipe.runtime.messages import Tree
from optpipe.runtime.slices import SliceContext, slice_context

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HIDDEN, EXPERTS = "hidden_states", "experts"
"""Entries of a message that is more than the hidden states."""


class ModelStage(nn.Module):
    """The layers `part` of the list named `layers`, in a model without the others; the `last` stage returns logits.

    The first stage takes the model's main input, or a dict of its arguments. Further arguments (masks, positions) are
    sent on to the stages behind, with the hidden states, and so is the main input if `sends_main`, but not those that
    are `read_before` the layers. `balanced`: the auxiliary loss of experts, if the model has one. `in_tuple`: True if
    layers return tuples. Layers that return anything else raise TrainingError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: str,
        part: range,
        *,
        last: bool,
        balanced: Balancing | None,
        in_tuple: bool = False,
        sends_main: bool = False,
        read_before: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.takes_slices = False
        self._first, self._last, self._balanced = part.start == 0, last, balanced
        arguments = inspect.signature(type(model).forward).parameters
        self._main, self._sends_main, self._read_before = model.main_input_name, sends_main, frozenset(read_before)
        # What the model's forward is given in place of its main input, where that is not sent.
        self._takes = "inputs_embeds" if "inputs_embeds" in arguments else self._main
        blocks: Any = model.get_submodule(layers)
        self._before: list[Received] = []
        if not self._first:
            absent = blocks[part.start - 1]
            received = Received(absent.__dict__["_stands_for"], in_tuple=absent.in_tuple)
            blocks[part.start - 1] = received
            self._before.append(received)  # in a list, so that it is registered once
        self._sent: Tensor | None = None
        own = [blocks[n] for n in part if n < len(blocks)]
        for block in own:
            block.register_forward_hook(_refuse_tuples if not in_tuple else _refuse_tensors)
        if not last:
            own[-1].register_forward_hook(self._send)
        self._router_logits: list[Tensor] | None = None
        self._running = False
        if balanced is not None:
            for router in balanced.routers(model):
                router.register_forward_hook(self._keep_logits)

    def forward(self, received: Tree) -> Tree:
        """The message to the next stage: hidden states, or a dict with them; on the last stage the logits.

        Raises TrainingError where the batch has further arguments and sequences are sliced.
        """
        message = dict(received) if isinstance(received, dict) else {self._main if self._first else HIDDEN: received}
        sums, states = message.pop(EXPERTS, None), message.pop(HIDDEN, None)
        main = {self._main: message.pop(self._main)} if self._first or self._sends_main else {self._takes: states}
        cached: dict[str, Any] = {}
        if slice_context() is not None:
            if message:
                raise TrainingError(
                    f"the batch has {', '.join(sorted(message))} beside {self._main}, which slices of sequences do not "
                    "take yet. Maybe leave it out, or solve without slices."
                )
            cached["past_key_values"] = _slice_cache()()
        for before in self._before:
            before.__dict__["received"] = states
        router_logits: list[Tensor] | None = [] if self._balanced else None
        self._router_logits, self._running = router_logits, True
        model: Any = self.model if self._last else self.model.base_model
        try:
            output = model(**main, **message, **cached, return_dict=True)
            result: Tree = output.logits if self._last else self._sent
        finally:
            self._router_logits, self._sent, self._running = None, None, False
            for before in self._before:
                before.__dict__["received"] = None
        if self._balanced is not None and router_logits is not None:
            if sums is None:
                sums = torch.zeros(2 * self._balanced.experts + 1, device=result.device)
            sums = self._balanced.sums(router_logits, message.get("attention_mask"), sums)
            if self._last:
                return {"logits": result, "auxiliary": self._balanced.loss(sums)}
            message[EXPERTS] = sums
        message = {name: value for name, value in message.items() if name not in self._read_before}
        if self._sends_main:
            message |= main
        return {HIDDEN: result, **message} if message and not self._last else result

    def _send(self, _layer: nn.Module, _inputs: Any, output: Any) -> None:
        """Keep the output of the stage's last layer: what the model computes from it belongs to other stages."""
        if self._running:
            self._sent = output[0] if isinstance(output, tuple | list) else output

    def _keep_logits(self, _router: nn.Module, _inputs: Any, output: Any) -> None:
        """Keep the logits of a router in `forward` only: a checkpoint runs the router again in the backward."""
        if self._router_logits is not None and self._balanced is not None:
            self._router_logits.append(self._balanced.logits_of(output))


class Balancing:
    """The auxiliary loss of Switch Transformer over all layers of a model, as transformers computes it.

    It is not a sum over layers, so stages send on its terms: for each expert the number of tokens that chose it and the
    sum of its probabilities, and the number of rows; a float32 tensor of shape (2 * experts + 1,). `recorder`: the
    entry "router_logits" of the model's `_can_record_outputs`.
    """

    def __init__(self, experts: int, top_k: int, coefficient: float, recorder: Any) -> None:
        self.experts, self.top_k, self.coefficient, self._recorder = experts, top_k, coefficient, recorder

    def routers(self, model: nn.Module) -> Iterator[nn.Module]:
        """The modules of the model that choose experts."""
        kind = getattr(self._recorder, "target_class", self._recorder)
        part = getattr(self._recorder, "layer_name", None)
        for name, module in model.named_modules():
            if isinstance(module, kind) and (part is None or part in name):
                yield module

    def logits_of(self, output: Any) -> Tensor:
        """The logits in the output of a router."""
        logits: Tensor = output[getattr(self._recorder, "index", 0)] if isinstance(output, tuple) else output
        return logits

    def sums(self, logits: Sequence[Tensor], mask: Tensor | None, before: Tensor) -> Tensor:
        """The terms of the stages `before` and those of a stage's layers added; rows where `mask` is 0 do not count."""
        chosen, probabilities, rows = torch.split(before, [self.experts, self.experts, 1])
        for layer in logits:
            shares = torch.softmax(layer, dim=-1).float()
            weight = shares.new_ones(len(shares)) if mask is None else mask.reshape(-1).to(shares.dtype)
            picked = torch.topk(shares, self.top_k, dim=-1).indices.reshape(-1)
            counts = torch.zeros_like(chosen).scatter_add(0, picked, weight.repeat_interleave(self.top_k))
            chosen, probabilities = chosen + counts, probabilities + (shares * weight.unsqueeze(-1)).sum(0)
            rows = rows + weight.sum()
        return torch.cat([chosen, probabilities, rows])

    def loss(self, sums: Tensor) -> Tensor:
        """The loss of a microbatch: `top_k` where all experts are chosen alike, at most the number of experts."""
        chosen, probabilities, rows = torch.split(sums, [self.experts, self.experts, 1])
        loss: Tensor = (chosen / rows * (probabilities / rows)).sum() * self.experts
        return loss


def _refuse_tensors(layer: nn.Module, _inputs: Any, output: Any) -> None:
    if not isinstance(output, tuple | list) or not isinstance(output[0], Tensor):
        kinds = type(layer).__name__, type(output).__name__
        raise TrainingError(f"a layer of kind {kinds[0]} returns {kinds[1]}, but others a tuple. {OWN_STAGES}")


def _refuse_tuples(layer: nn.Module, _inputs: Any, output: Any) -> None:
    if not isinstance(output, Tensor):
        kinds = type(layer).__name__, type(output).__name__
        raise TrainingError(f"a layer of kind {kinds[0]} returns {kinds[1]}, but only tensors are sent. {OWN_STAGES}")


@functools.cache
def _slice_cache() -> Any:
    """The class of caches that hand the keys and values of a layer to the slice that runs (`slice_context`)."""
    from transformers import Cache

    def running() -> SliceContext:
        context = slice_context()
        assert context is not None, "stages give the cache to slices alone"
        return context

    class SliceCache(Cache):
        """Keeps nothing itself: a block that is recomputed asks the same cache again."""

        def __init__(self) -> None:
            super().__init__(layers=[])

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            """Keys and values of a layer, of all slices so far."""
            keys, values = running().extend(layer_idx, key_states, value_states)
            return keys, values

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            """Positions before the slice."""
            return running().offset

        def get_query_offset(self, *_: Any, **__: Any) -> int:
            """Position of the first query: that of the slice."""
            return running().offset

        def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
            """Number of keys, and the position of the first."""
            context = running()
            return context.offset + context.length, 0

    return SliceCache
