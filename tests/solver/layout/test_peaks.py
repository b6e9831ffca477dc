"""Memory of a rated strategy is the peak of the schedule that it names."""

from __future__ import annotations

import pytest

from optpipe.cluster.machine import named_machines
from optpipe.cluster.memory import MemoryModel
from optpipe.cluster.model import load_model
from optpipe.cluster.software import MEGATRON
from optpipe.cluster.strategy import Strategy
from solver.layout.fitting import Job, ranks_of
from solver.layout.peaks import COUNTED, STEADY_ROUNDS, enough_microbatches
from solver.layout.strategies import Rater


def _job(model: str = "llama-3.1-8b", sequence: int = 8192, global_batch: int = 64) -> Job:
    return Job(load_model(model), named_machines()["h100"], sequence, global_batch, MEGATRON)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("llama-3.1-8b", Strategy(pipeline=4, data=2, schedule="1f1b")),
        ("llama-3.1-8b", Strategy(pipeline=4, data=2, schedule="zb-h1")),
        ("llama-3.1-8b", Strategy(pipeline=4, data=2, schedule="gpipe", tensor=2)),
        ("llama-3.1-8b", Strategy(pipeline=4, data=2, virtual=2, schedule="zb-v")),
        ("llama-3.1-8b", Strategy(pipeline=4, data=2, virtual=2, schedule="v-half", recompute="full")),
        ("llama-3.1-8b", Strategy(pipeline=4, data=2, virtual=2, schedule="v-min")),
        ("llama-3.1-8b", Strategy(pipeline=4, data=2, virtual=2, schedule="dualpipe-v")),
        ("llama-3.1-8b", Strategy(pipeline=4, virtual=3, schedule="interleaved-1f1b", vocabulary="own")),
        ("llama-3.1-8b", Strategy(data=8, sharding="fsdp")),
        ("qwen3-30b-a3b", Strategy(pipeline=4, virtual=5, schedule="interleaved-1f1b", recompute="full")),
        ("deepseek-v3", Strategy(pipeline=6, virtual=2, schedule="interleaved-1f1b", recompute="selective")),
        ("gemma-2-9b", Strategy(pipeline=8, schedule="vocab-2", vocabulary="spread")),
    ],
    ids=lambda one: one.schedule if isinstance(one, Strategy) else one,
)
def test_plan_and_fits_agree(model: str, strategy: Strategy) -> None:
    """The rating's bytes are those of the schedule's ops at its peak, on each rank."""
    job = _job(model)
    ranks = ranks_of(job, strategy, strategy.schedule)
    held = [one.activations + one.logits + one.transient for one in job.held(strategy)]
    assert held == pytest.approx([one.activations for one in ranks], abs=strategy.stages)  # bytes rounded up
    rated = Rater(job, {"recompute": [strategy.recompute]}).rate(strategy, 0.0)
    fullest = max(one.total for one in ranks)
    assert rated.memory_bytes == pytest.approx(fullest, abs=2 * strategy.stages)
    assert (rated.end == "solved") == (fullest <= job.machine.facts.memory_bytes)


def test_late_weight_gradients_are_counted() -> None:
    """Each stage of ZB-H1 has p microbatches in flight: the last one before their B, the others before their W."""
    job, strategy = _job(), Strategy(pipeline=4, data=2, schedule="zb-h1")
    sizes, last = job.memory(strategy).stages(), job.held(strategy)[-1]
    most = sizes.kept[-1] + 3 * sizes.operands[-1] + sizes.backward[-1]
    assert last.activations + last.logits + last.transient == most


@pytest.mark.parametrize("schedule", [name for name in COUNTED if name not in ("gpipe", "vocab-2")])
def test_more_microbatches_hold_no_more(schedule: str) -> None:
    virtual = {"interleaved-1f1b": 3, "dualpipe-v": 2}.get(schedule, 1)
    strategy = Strategy(pipeline=4, virtual=virtual, schedule=schedule)
    fewest = enough_microbatches(schedule, 4, 1024)
    assert fewest == 4 * STEADY_ROUNDS
    few, many = (_job(global_batch=count) for count in (fewest, 3 * fewest))
    assert [rank.activations for rank in ranks_of(few, strategy, schedule)] == [
        rank.activations for rank in ranks_of(many, strategy, schedule)
    ]


def test_stages_hold_what_their_layers_do() -> None:
    memory = MemoryModel(load_model("llama-3.1-8b"), Strategy(pipeline=4, virtual=2), 8192, 8)
    layer = memory.model.layers[0]
    assert memory.stages().kept[1] == 4 * memory.layer(layer)
