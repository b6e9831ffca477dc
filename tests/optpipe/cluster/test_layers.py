"""Layers of a strategy: the same costs and bytes as the step's, cut and planned as measured ones are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optpipe.cluster.costs import INDEX, CostModel, work
from optpipe.cluster.layers import strategy_layers, strategy_partition
from optpipe.cluster.machine import named_machines
from optpipe.cluster.memory import MemoryModel
from optpipe.cluster.model import load_model
from optpipe.cluster.strategy import Strategy
from optpipe.errors import InputError
from optpipe.export.megatron_layout import layout_of_partition
from optpipe.layers import LayerProfile
from optpipe.partition import Batching, Partition, build_problem, parameter_bytes
from optpipe.simulate import simulate
from optpipe.spread import vocabulary_passes
from optpipe.verify import verify
from solver.solve import solve
from tests.heavy_head import LAYER_PARAMETERS, LAYERS, VOCABULARY, WIDTH, heavy_job

STRATEGY = Strategy(tensor=4, context=2, pipeline=4, virtual=5, data=2, schedule="interleaved-1f1b")
OVERLAPPED = Strategy(expert=16, pipeline=4, virtual=3, data=2, overlap="yes", schedule="interleaved-1f1b")
IN_A_V = Strategy(expert=8, pipeline=4, virtual=2, data=2, overlap="yes", schedule="dualpipe-v")


@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-v3", "gpt2-xl"])
def test_layers_add_up_to_the_work_of_the_devices(name: str) -> None:
    model, h100 = load_model(name), named_machines()["h100"]
    strategy = Strategy(pipeline=4, data=8)
    layers = strategy_layers(model, h100, strategy, 1024)
    slowdowns = h100.efficiencies_of("bf16").slowdowns
    devices = CostModel(model, h100.facts, strategy, 1024).devices()
    whole_us = sum(one.forward_us + one.backward_input_us + one.backward_weight_us for one in layers.each_layer)
    assert whole_us == pytest.approx(float(devices.sum((0, 1)) @ slowdowns) * 1e6)
    assert len(layers.each_layer) == len(model.layers) + model.predicted_tokens + 2
    halves = Partition((len(model.layers), 2 + model.predicted_tokens), (0, 1))
    assert layout_of_partition(halves, layers) == f"Et*{len(model.layers) - 1}|t{'m' * model.predicted_tokens}L"


DEEPSEEK = Strategy(expert=32, pipeline=8, data=32)


def test_a_layer_of_multi_token_prediction() -> None:
    """DeepSeek-V3's: a layer as the last one, 3 norms and a matrix of 2 x 7168 x 7168, with a copy of the embedding.

    Its loss is the head's: two outputs of 129,280 logits a token, from two inputs that the layer passes on.
    """
    model, h100 = load_model("deepseek-v3"), named_machines()["h100"]
    profile = strategy_layers(model, h100, replace(DEEPSEEK, sharding="none"), 4096)
    *_, before, made, head = profile.each_layer
    assert [layer.name for layer in (before, made, head)] == [
        "decoder layer",
        "multi-token prediction",
        "head and loss",
    ]
    width, vocabulary, hidden_bytes = 7168, 129_280, 4096 * 7168 * 2
    parameters = 2 * width**2 + 3 * width + width * vocabulary
    assert made.parameter_bytes - before.parameter_bytes == 18 * parameters
    assert head.parameter_bytes == 18 * (width * vocabulary + width)
    assert (before.output_bytes, made.output_bytes) == (hidden_bytes, 2 * hidden_bytes)
    assert made.activation_bytes - before.activation_bytes == 5 * hidden_bytes
    assert head.activation_bytes == 2 * (hidden_bytes + 4096 * vocabulary * (2 + 4))
    alone = CostModel(replace(model, prediction_layers=()), h100.facts, DEEPSEEK, 4096)
    slowdowns = h100.efficiencies_of("bf16").slowdowns
    assert head.forward_us == pytest.approx(2 * float(alone.head().forward @ slowdowns) * 1e6)
    joined_us = made.backward_weight_us - before.backward_weight_us
    products_us = 2 * 4096 * 2 * width**2 / h100.facts.operations_bf16_per_s * slowdowns[INDEX["products"]] * 1e6
    added_us = 2 * 4 * 2 * width**2 / h100.facts.memory_bytes_per_s * slowdowns[INDEX["memory"]] * 1e6
    assert joined_us == pytest.approx(products_us + added_us)
    full = strategy_layers(model, h100, replace(DEEPSEEK, recompute="full"), 4096).each_layer[-2]
    assert full.activation_bytes == 2 * hidden_bytes


def test_states_of_layers_are_those_of_ranks() -> None:
    """Wherever a cut has the layer of multi-token prediction, its embedding is with it, and none on one device."""
    model, h100 = load_model("deepseek-v3"), named_machines()["h100"]
    for sizes in ((16, 16, 16, 14), (16, 16, 30, 0), (15, 16, 16, 15)):
        strategy = Strategy(
            expert=32, pipeline=4, data=32, stage_layers=sizes, vocabulary="last" if sizes[-1] else "own"
        )
        held = parameter_bytes(strategy_layers(model, h100, strategy, 4096), strategy_partition(model, strategy))
        ranks = MemoryModel(model, strategy, 4096, 64).devices()
        assert held == pytest.approx([one.weights + one.gradients + one.optimizer for one in ranks])
    one = Strategy(expert=32, data=32)
    assert MemoryModel(model, one, 4096, 64).held(0).weights == pytest.approx(
        2 * sum(CostModel(model, h100.facts, one, 4096).parameters_of_device())
    )


def test_prediction_in_a_stage_of_its_own() -> None:
    """Three hidden states leave the second of two layers, for the loss of each token."""
    one = load_model("deepseek-v3")
    model = replace(one, layers=one.layers[:6], prediction_layers=one.prediction_layers * 2)
    layers = strategy_layers(model, named_machines()["h100"], Strategy(pipeline=4), 4096).replaced(memory_bytes=None)
    sizes = [layer.output_bytes // layers.each_layer[0].output_bytes for layer in layers.each_layer]
    assert sizes == [1] * 7 + [2, 3, 1]
    assert layout_of_partition(Partition((3, 4, 2, 1), (0, 1, 2, 3)), layers) == "Ett|t*4|mm|L"
    assert layout_of_partition(Partition((3, 4, 1, 2), (0, 1, 2, 3)), layers) == "Ett|t*4|m|mL"
    problem = build_problem(layers, Partition((3, 4, 2, 1), (0, 1, 2, 3)), Batching(1, 8))
    assert problem is not None
    latency_us = layers.link.latency_us
    assert problem.transfer_us[2] - latency_us == pytest.approx(3 * (problem.transfer_us[1] - latency_us))


@pytest.mark.parametrize(
    ("name", "strategy", "hidden"),
    [("llama-3.1-70b", STRATEGY, 0), ("qwen3-30b-a3b", OVERLAPPED, 0.1), ("deepseek-v2-lite", IN_A_V, 0.03)],
)
def test_a_published_schedule_of_them_takes_what_the_closed_form_says(
    name: str, strategy: Strategy, hidden: float
) -> None:
    model, h100 = load_model(name), named_machines()["h100"]
    layers = strategy_layers(model, h100, strategy, 8192).model_copy(update={"memory_bytes": None})
    problem = build_problem(layers, strategy_partition(model, strategy), Batching(1, 64))
    assert problem is not None
    slowdowns = h100.efficiencies_of("bf16").slowdowns
    costs = CostModel(model, h100.facts, strategy, 8192)
    expected_us = float((costs.step(128, slowdowns) - costs.replicas(64)) @ slowdowns) * 1e6
    schedule = solve(problem, strategy.schedule)
    assert schedule.value_us == pytest.approx(expected_us, rel=0.03)
    last = {s for s, stage in enumerate(problem.stages) if stage.device == strategy.pipeline - 1}
    assert sum(op.stage in last for op in schedule.orders.blocks) == strategy.blocks(64)
    apart_us = simulate(problem, replace(schedule.orders, blocks={})).value_us
    assert schedule.value_us <= (1 - hidden) * apart_us


@pytest.mark.parametrize("tensor", [1, 2])
def test_passes_of_the_output_layer_are_its_products(tensor: int) -> None:
    """S has two of three products, T the third. Devices share all of the layer but gathers and launches.

    Its parameters and those of the layers are all of the model's, to the byte.
    """
    job, p = heavy_job(), 8
    last, spread = (
        strategy_layers(job.model, job.machine, Strategy(tensor, pipeline=p, data=2, vocabulary=place), job.sequence)
        for place in ("last", "spread")
    )
    (*layers, head), passes = last.each_layer, spread.spread
    assert passes is not None
    assert len(spread.each_layer) == len(layers) == LAYERS + 1
    whole_us = head.forward_us + head.backward_us
    costs = CostModel(job.model, job.machine.facts, Strategy(tensor, pipeline=p, data=2), job.sequence)
    slowdowns = job.machine.efficiencies_of("bf16").slowdowns
    common = work(launch=3, tensor=float(costs.head().total[INDEX["tensor"]]))
    common_us = float(common @ slowdowns) * 1e6
    assert p * (passes.logits_us + passes.weights_us - common_us) == pytest.approx(whole_us - common_us)
    assert 1.5 < passes.logits_us / passes.weights_us < 2.5
    for with_passes, without in zip(spread.each_layer[1:], layers[1:], strict=True):
        assert with_passes.forward_us == pytest.approx(1.09 * without.forward_us)
        assert with_passes.backward_us == pytest.approx(1.07 * without.backward_us)
    sums = [sum(one.parameter_bytes for one in (*profile.each_layer,)) for profile in (last, spread)]
    assert sums[1] + p * passes.parameter_bytes == sums[0]
    assert sums[0] * tensor == job.model.parameters * (2 + 4 + 12 / 2)


def test_a_problem_with_passes_of_the_output_layer() -> None:
    """Every device runs S and T and holds its rows; the last backward waits for S. The verifier agrees."""
    job = heavy_job()
    strategy = Strategy(pipeline=8, vocabulary="spread", schedule="vocab-2")
    problem = job.problem(strategy, budgets=True)
    assert problem is not None
    layers = strategy_layers(job.model, job.machine, strategy, job.sequence)
    partition, head = strategy_partition(job.model, strategy), layers.spread
    assert head is not None
    assert partition.sizes == (3, 2, 2, 2, 2, 2, 2, 2)
    assert vocabulary_passes(problem.spread or (), problem.gates or (), problem.stages) == ("S", "T", 1)
    rows = (VOCABULARY * WIDTH + WIDTH) // 8
    assert head.parameter_bytes == rows * (2 + 4 + 12)
    held = parameter_bytes(layers, partition)
    assert held[1:] == [(2 * LAYER_PARAMETERS + rows) * 18] * 7
    assert [device.memory_bytes for device in problem.devices] == [layers.memory_bytes - one for one in held]
    assert [one.us for one in problem.spread or ()] == [[head.logits_us] * 8, [head.weights_us] * 8]
    schedule = solve(problem, "vocab-2")
    assert verify(schedule).ok
    costs, slowdowns = job.costs(strategy), job.slowdowns(strategy)
    expected_us = float((costs.step(64, slowdowns) - costs.replicas(64) - work(step=1)) @ slowdowns) * 1e6
    assert schedule.value_us == pytest.approx(expected_us, rel=0.03)
    for device, held in zip(schedule.devices, job.held(strategy), strict=True):
        expected = held.activations + held.logits + held.transient
        assert device.peak_bytes == pytest.approx(expected, rel=0.01)
    with pytest.raises(InputError, match=r"spread\.devices is 8, but the pipeline has 4\. Maybe --devices 8\."):
        build_problem(layers, Partition((5, 4, 4, 4), (0, 1, 2, 3)), Batching(1, 64))


def test_a_block_takes_the_longer_of_each_pair_of_parts() -> None:
    """Attention runs while the other combines, experts while it dispatches; the last layer of the backward is first."""
    costs = dict.fromkeys(("activation_bytes", "backward_weight_bytes"), 0)
    times = {"forward_us": 20, "backward_input_us": 20, "backward_weight_us": 10}
    dense = {"name": "dense"} | costs | times
    first = dense | {"parts": {"forward_us": [5, 6, 3, 4], "backward_us": [8, 6, 7, 5]}}
    second = dense | {"parts": {"forward_us": [1, 2, 9, 8], "backward_us": [4, 1, 2, 3]}}
    layers = LayerProfile.from_data({"format": "optpipe.layers/1", "layers": [dense, first, second]})
    problem = build_problem(layers, Partition((1, 2), (0, 0)), Batching(1, 4))
    assert problem is not None
    saved = min(5, 3) + min(6, 2) + min(3, 1) + min(4, 4) + min(1, 5) + min(2, 7) + min(9, 6) + min(8, 8)
    assert problem.block_us == {(1, 1): 2 * 50 - saved}
