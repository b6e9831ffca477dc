"""Costs of layers on a machine that is not here: the ops of their F, B and W, counted, at the machine's rates.

Layers run as the runtime runs them, on tensors without values (`WithoutValues`). Bytes are those that a run on a CPU
has. A product takes its operations at the peak of its precision, as torch's FlopCounterMode counts them, and so does
attention, halved where it is causal, with twice as many in B; any other op takes the bytes that it reads and writes
over the memory's rate. The machine's efficiencies scale all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from optpipe.cluster.costs import INDEX, Work, work
from optpipe.cluster.layers import host_copies
from optpipe.cluster.machine import Efficiencies, Facts, Machine
from optpipe.cluster.software import MEGATRON
from optpipe.errors import InputError, Issue, OptPipeError
from optpipe.layers import LayerProfile
from optpipe.models.cut import structure
from optpipe.profile.measured import StageFigures, held_bytes, layer_entries
from optpipe.profile.ops import Key, Stopwatch, measure_op_sizes, measure_op_times
from optpipe.profile.subject import Chain, Subject, ValuesNeededError, build_chain, error_text, refuse
from optpipe.profile.without_values import WithoutValues, written_by
from optpipe.runtime.activations import storage_key
from optpipe.runtime.messages import size_bytes
from optpipe.runtime.torch_private import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GROUPED_MM,
    TorchDispatchMode,
    flop_registry,
    tree_leaves,
)
from optpipe.runtime.vocabulary import holds_other_layers

T = TypeVar("T")
CPU = torch.device("cpu")

_ATEN = torch.ops.aten
_ATTENTION = {ATTENTION: (0, 1), ATTENTION_BACKWARD: (1, 2)}
"""Place of the queries among the arguments, and how often the products of F are computed."""
_CAUSAL = {0: 4, 1: 7}
"""Place of the flag, by that of the queries."""
_MADE = {_ATEN.empty, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.empty_like, _ATEN.set_}
"""Ops that touch no memory."""
_READ_ROWS = {_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather}
"""Ops that read as much as they return, of a tensor that may be much larger."""
_ADD_ROWS = {_ATEN.index_add_, _ATEN.index_put_, _ATEN.scatter_add_, _ATEN.index_copy_, _ATEN.scatter_}
"""Ops that read and write as much of a tensor as they are given."""


def predict_layers(
    run: WithoutValues,
    subject: Subject,
    machine: Machine,
    each: Sequence[tuple[str, int]] | None,
    modes: Sequence[str],
    memory_bytes: int | None,
) -> LayerProfile:
    """Build the layers of a model as `Measured.layers` does, with costs predicted for a machine.

    `each` names all layers, each with the stage that stands for it; None: a layer is a stage, and equal ones
    (`structure`) are run once. `modes` are those of a layer, ``selective`` alone; `memory_bytes`: None for all that the
    machine has. Raises InputError for a model that does not run without values.
    """
    kinds = [structure(stage) for stage in subject.stages]
    subject = run.of_subject(subject)
    with run:
        try:
            chain = build_chain(subject, CPU, 1, range(len(kinds)))
            if each is None:
                first: dict[object, int] = {}
                keys = [(kind, repr(chain.before(s)), repr(chain.after(s))) for s, kind in enumerate(kinds)]
                each = [(f"layer {s}", first.setdefault(key, s)) for s, key in enumerate(keys)]
            figures = _figures(chain, {s for _, s in each}, modes, PredictedStopwatch(machine))
        except OptPipeError:
            raise
        except ValuesNeededError as error:
            refuse(subject.name, "needs_values", str(error))
        except Exception as error:
            detail = f"does not run without values: {error_text(error)}. Maybe measure it, without --machine."
            refuse(subject.name, "needs_values", detail)
    facts, efficiencies = machine.facts, machine.efficiencies_of("bf16")
    entries = layer_entries(each, figures, [size_bytes(spec) for spec in chain.messages])
    passes = ("forward_us", "backward_input_us", "backward_weight_us")
    return LayerProfile.from_data(
        {
            "format": "optpipe.layers/1",
            "name": subject.name[:200],
            "microbatch_size": subject.microbatch_size,
            "layers": [
                entry | {"fixed_us": min(efficiencies.launch_us, *(entry[name] for name in passes))}
                for entry in entries
            ],
            "memory_bytes": MEGATRON.usable_bytes(facts.memory_bytes) if memory_bytes is None else memory_bytes,
            "link": {"latency_us": facts.link_latency_us, "bytes_per_us": facts.link_bytes_per_s / 1e6},
            "copies": host_copies(facts),
            "source": source(machine, efficiencies),
            "output_layer_alone": not holds_other_layers(chain.stages[each[-1][1]].module),
        },
        f"{subject.name} on {machine.name}",
    )


def _figures(chain: Chain, numbers: Collection[int], modes: Sequence[str], watch: Stopwatch) -> dict[int, StageFigures]:
    """Figures of the stages of these numbers."""
    stages = {s: chain.stages[s] for s in sorted(numbers)}
    chain = replace(chain, stages=stages)
    recomputing = {
        s: dict.fromkeys((mode for mode in modes if stage.has_mode(mode)), ("CB", "CBW")) for s, stage in stages.items()
    }
    sizes = measure_op_sizes(chain, CPU, recomputing)
    times = measure_op_times(chain, CPU, 1, watch, modes=recomputing)
    held = held_bytes(chain, range(chain.count))
    return {s: StageFigures(times[s], sizes[s].largest, held[s]) for s in stages}


def source(machine: Machine, efficiencies: Efficiencies) -> str:
    """Origin of the numbers, for documents: how far predictions of the machine's steps were from measured ones."""
    parts = [f"predicted for {machine.name}, nothing measured: bytes and operations of each op without values"]
    error = efficiencies.median_error if efficiencies.unseen_model_error is None else efficiencies.unseen_model_error
    if efficiencies.rows and error is not None:
        whose = "of models that were not fitted " if efficiencies.unseen_model_error is not None else ""
        parts.append(
            f"its rates are fitted to {efficiencies.rows} training steps with fused kernels; half of the steps {whose}"
            f"are within {error:.0%}"
        )
    else:
        parts.append("its rates are guessed: no error is known")
    return "; ".join(parts)


class PredictedStopwatch:
    """Stopwatch that counts what work would do, and returns the time that a machine needs for it."""

    def __init__(self, machine: Machine) -> None:
        self._facts, self._slowdowns = machine.facts, machine.efficiencies_of("bf16").slowdowns
        # Above its rate is what fused kernels spare, and these are not.
        self._slowdowns[INDEX["memory"]] = max(1.0, self._slowdowns[INDEX["memory"]])
        self.restart()

    def time(self, key: Key, work: Callable[[], T]) -> T:
        """Run `work`, record its predicted time under `key`, and return its result."""
        with Operations(self._facts) as counted:
            result = work()
        self._samples_us[key].append(float(counted.total @ self._slowdowns) * 1e6)
        return result

    def restart(self) -> None:
        """Discard all times so far."""
        self._samples_us: dict[Key, list[float]] = defaultdict(list)

    def samples_us(self) -> Mapping[Key, Sequence[float]]:
        """Times since the last restart by key, in microseconds."""
        return self._samples_us


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts the work of ops by kind, in seconds at a machine's peak."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._facts, self._work = facts, work()

    @property
    def total(self) -> Work:
        """All work so far, with one launch of a layer if there was a product."""
        launched = any(self._work[INDEX[kind]] for kind in ("products", "attention", "experts"))
        return self._work + work(launch=float(launched))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        op = func.overloadpacket
        given = [value for value in tree_leaves((args, named)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if op in _ATTENTION:
            self._work += work(attention=self._seconds(given, _attention_operations(op, args)))
        elif op is GROUPED_MM:
            self._work += work(experts=self._seconds(given, 2 * given[0].numel() * given[1].shape[-1]))
        elif op in flop_registry:
            operations = flop_registry[op](*args, **named, out_val=result)
            self._work += work(products=self._seconds(given, operations))
        else:
            moved = _bytes_moved(op, given, made, [*written_by(func, args, named)])
            self._work += work(memory=moved / self._facts.memory_bytes_per_s)
        return result

    def _seconds(self, given: Sequence[Tensor], operations: float) -> float:
        """Seconds of a product at the peak of its precision: in 32 bits half of that in 16 bits (TF32)."""
        dtype = min((t.dtype for t in given if t.is_floating_point() or t.is_complex()), key=lambda one: one.itemsize)
        rates = {1: self._facts.operations_per_s("fp8"), 2: self._facts.operations_per_s("bf16")}
        rates[4] = rates[2] / 2
        if dtype.itemsize not in rates:
            detail = f"has no rate for products in {dtype}. Maybe a model of bfloat16."
            raise InputError([Issue("--machine", "no_rate", detail)])
        return operations / rates[dtype.itemsize]


def _attention_operations(op: Any, args: Sequence[Any]) -> float:
    at, times = _ATTENTION[op]
    query, key, value = args[at : at + 3]
    causal = len(args) > _CAUSAL[at] and bool(args[_CAUSAL[at]])
    scores = query.shape[:-1].numel() * key.shape[-2]
    return float(times * 2 * scores * (query.shape[-1] + value.shape[-1])) / (2 if causal else 1)


def _bytes_moved(op: Any, given: Sequence[Tensor], made: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Bytes that an op reads and writes: none where it returns views, or memory that nothing was written to."""
    known = {storage_key(tensor) for tensor in given}
    new = [tensor for tensor in made if storage_key(tensor) not in known]
    if op in _MADE or not (new or written):
        return 0
    if op in _READ_ROWS:
        return 2 * sum(map(_size, new))
    if op in _ADD_ROWS:
        return 3 * max(map(_size, given[1:]), default=0)
    return sum(map(_size, (*given, *new, *written)))


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor's own entries: an expanded one has fewer than its shape says."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return torch.Size([n for n, stride in pairs if stride]).numel() * tensor.itemsize
