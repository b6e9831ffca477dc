"""Memory of ranks against what trainers measured, by kind, and what schedules change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optpipe.cluster.calibrate import memory_of
from optpipe.cluster.machine import named_machines
from optpipe.cluster.memory import MemoryModel
from optpipe.cluster.model import load_model
from optpipe.cluster.rows import Row, read_rows
from optpipe.cluster.strategy import Strategy

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
STRATEGY = Strategy(tensor=4, pipeline=4, data=4)


@pytest.fixture(scope="module")
def steps() -> list[Row]:
    return read_rows(PUBLISHED / "steps.csv", PUBLISHED / "models.json")[0]


def test_peaks_of_megatron_core(steps: list[Row]) -> None:
    """23 runs on B200 with tensor, context, expert and pipeline parallelism: each within 3 %."""
    machine, measured = named_machines()["b200"], [row for row in steps if row.name.startswith("simumax-b200")]
    errors = {
        row.name: memory_of(machine, row).held.total / 2**30 / row.allocated_gib - 1
        for row in measured
        if row.allocated_gib
    }
    assert len(errors) == 23
    assert {name: error for name, error in errors.items() if abs(error) > 0.03} == {}


def test_layouts_that_ran_and_that_did_not(steps: list[Row]) -> None:
    """Aleph Alpha's sheets: 592 layouts on A100."""
    machine = named_machines()["a100-80"]
    ended = read_rows(PUBLISHED / "out_of_memory.csv", PUBLISHED / "models.json")[0]
    fitting = [memory_of(machine, row).fits for row in steps if row.software.startswith("aleph") and row.seconds]
    refused = [not memory_of(machine, row).fits for row in ended if row.software.startswith("aleph")]
    assert (len(fitting), len(refused)) == (216, 376)
    assert (sum(fitting) + sum(refused)) / 592 > 0.95


def test_states_are_divided_by_what_shards_them() -> None:
    model = load_model("llama-3.1-70b")
    held = MemoryModel(model, STRATEGY, 8192, 16).held(1)
    parameters = 20 * model.layers[0].parameters / 4
    assert held.weights == pytest.approx(2 * parameters)
    assert held.gradients == pytest.approx(4 * parameters)
    assert held.optimizer == pytest.approx(12 * parameters / 4)
    whole = MemoryModel(model, replace(STRATEGY, sharding="none"), 8192, 16).held(1)
    assert whole.optimizer == pytest.approx(12 * parameters)
    divided = MemoryModel(model, replace(STRATEGY, sharding="fsdp"), 8192, 16).held(1)
    assert divided.weights == pytest.approx(2 * parameters / 4)


def test_activations_are_those_in_flight() -> None:
    model = load_model("llama-3.1-70b")
    kept = [MemoryModel(model, STRATEGY, 8192, 16).held(device).activations for device in range(4)]
    assert [size / kept[3] for size in kept] == pytest.approx([4, 3, 2, 1])
    few = MemoryModel(model, STRATEGY, 8192, 2).held(0).activations
    assert few / kept[3] == pytest.approx(2)
    layer = MemoryModel(model, STRATEGY, 8192, 16)
    per_token = 8 * 8192 + 4 * 8192 + 4 * 1024 + 6 * 28672  # SimuMax and Megatron-Core, with fused attention
    assert layer.layer(model.layers[0]) == pytest.approx(8192 / 4 * per_token)
    # As measured of transformers' layers in our runtime: what products read, and gradients of what they returned.
    assert layer.weight_operands(model.layers[0]) == 8192 / 4 * 2 * 137_216
    full = MemoryModel(model, replace(STRATEGY, recompute="full"), 8192, 16)
    assert full.layer(model.layers[0]) == 8192 / 4 * 2 * 8192


def test_experts_of_a_predicted_token_are_divided_as_all_experts() -> None:
    """DeepSeek-V3 with ep 64: a layer of prediction has 11.6 billion parameters, of which a rank holds a part."""
    model = load_model("deepseek-v3")
    strategy = Strategy(tensor=2, expert=64, pipeline=4, data=32)
    with_it = MemoryModel(model, strategy, 4096, 64).held(3).weights
    without = (
        MemoryModel(replace(model, predicted_tokens=0, prediction_parameters=0), strategy, 4096, 64).held(3).weights
    )
    assert 0 < with_it - without < 2 * 1.5e9
