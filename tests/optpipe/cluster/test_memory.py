"""Memory of ranks against what trainers measured, by kind, and what schedules change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optpipe.cluster.calibrate import memory_of
from optpipe.cluster.layers import strategy_layers
from optpipe.cluster.machine import named_machines
from optpipe.cluster.memory import MemoryModel
from optpipe.cluster.model import load_model
from optpipe.cluster.rows import Row, read_rows
from optpipe.cluster.strategy import Strategy
from tests.heavy_head import heavy_head

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
    assert divided.weights == pytest.approx(2 * parameters / 4 + 2 * parameters)
    assert divided.gradients == pytest.approx(4 * parameters / 4)


def test_fsdp_holds_what_it_has_gathered() -> None:
    """In a pipeline the weights of one stage, else those of two layers; a profile of layers says the same."""
    model, machine = load_model("llama-3.1-8b"), named_machines()["h100"]
    parameters = 16 * model.layers[0].parameters + model.embedding_parameters
    one = Strategy(pipeline=2, data=8, sharding="fsdp", schedule="1f1b")
    memory = MemoryModel(model, one, 8192, 16)
    assert memory.held(0).weights == pytest.approx(2 * parameters / 8 + 2 * parameters)
    assert memory.held(0).gradients == pytest.approx(4 * parameters / 8)
    two = MemoryModel(model, replace(one, virtual=2, schedule="interleaved-1f1b"), 8192, 16)
    assert two.held(0).weights == pytest.approx(2 * parameters / 8 + parameters)
    profile = strategy_layers(model, machine, one, 8192)
    states = sum(layer.repeat * layer.parameter_bytes for layer in profile.layers)
    assert states == pytest.approx((18 / 8 + 2) * model.parameters)

    alone = replace(one, pipeline=1, data=16)
    gathered = 2 * 2 * model.layers[0].parameters
    held, divided = (
        MemoryModel(model, replace(alone, sharding=sharding), 8192, 16).held(0) for sharding in ("fsdp", "optimizer")
    )
    assert held.transient - divided.transient == gathered
    workspaces = [
        strategy_layers(model, machine, replace(alone, sharding=sharding), 8192).layers[1].workspace_bytes
        for sharding in ("fsdp", "optimizer")
    ]
    for op in ("F", "B", "W", "BW"):
        assert getattr(workspaces[0], op) - getattr(workspaces[1], op) == gathered


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_the_output_layer_on_all_devices(tied: bool) -> None:
    """By hand: two of 16 layers a device, an eighth of the rows and of the last norm, and the embedding on the first.

    Tied rows are there a second time where the embedding is on another device, as with the layer in the last stage.
    """
    model, rows = heavy_head(tied=tied), 262_144 * 2048
    layer = 4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048
    each = 2 * layer + (rows + 2048) // 8
    expected = [each + rows, *[each] * 7]
    assert sum(expected) == model.parameters + tied * rows
    strategy = Strategy(pipeline=8, vocabulary="spread", schedule="vocab-2")
    ranks = MemoryModel(model, strategy, 2048, 64).devices()
    for held, parameters in zip(ranks, expected, strict=True):
        assert (held.weights, held.gradients, held.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    assert [round(held.activations / ranks[7].activations * 2) for held in ranks] == [9, 8, 7, 6, 5, 4, 3, 2]
    logits, message = 2048 * 262_144 // 8, 2048 * 2048 * 2
    assert {held.logits for held in ranks} == {2 * logits + 2 * message}
    for place in ("last", "own"):
        whole = MemoryModel(model, replace(strategy, vocabulary=place, schedule="1f1b"), 2048, 64).devices()
        assert sum(held.weights for held in whole) == 2 * sum(expected)
        layers = 2 if place == "last" else 0
        assert whole[7].weights == 2 * (layers * layer + rows + 2048)
        assert whole[7].total > ranks[7].total


def test_more_ranks_than_key_value_heads_hold_copies() -> None:
    """8 ranks of 4 heads of keys and values, 128 wide, of 3,584 inputs, with biases: each rank has a whole head."""
    model = load_model("qwen2.5-7b")
    layer, kept = model.layers[0], {}
    for tensor in (4, 8):
        memory = MemoryModel(model, replace(STRATEGY, tensor=tensor), 8192, 16)
        dense, _ = memory.parameters(layer)
        copies = 2 * (tensor - 4) * 3584 * 128
        assert dense == (layer.parameters + copies) / tensor
        kept[tensor] = memory.layer(layer)
    assert kept[8] == kept[4] / 2 + 8192 * 128 * 2 * 2 / 2


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
    without = MemoryModel(replace(model, prediction_layers=()), strategy, 4096, 64)
    other = without.held(3).weights
    parameters = (11_610_068_224 - 256 * 3 * 7168 * 2048) / 2 + 256 // 64 * 3 * 7168 * 2048 + 129_280 * 7168 / 2
    of_a_layer = sum(without.parameters(model.layers[-1]))
    layers = Strategy(pipeline=4).layers_of_stages(model)[3] - Strategy(pipeline=4).layers_of_stages(without.model)[3]
    assert with_it - other == pytest.approx(2 * (parameters + (layers - 1) * of_a_layer))
