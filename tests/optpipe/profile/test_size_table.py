"""The cost model against the papers' own figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optpipe.errors import InputError
from optpipe.profile.size_table import SizeTable, build_profile, copy_to_compute_ratio

MODEL = {"layers": 24, "hidden": 2048, "heads": 16, "sequence": 1024, "vocabulary": 50_000}
MACHINE = {"teraflops": 220, "memory_gb": 80, "link_gb_per_s": 25, "copy_gb_per_s": 15}


def table(**more: Any) -> SizeTable:
    data = {"model": MODEL, "machine": MACHINE} | more
    return SizeTable.from_data(data)


def test_layer_times_are_zero_bubbles_operations() -> None:
    _, block, head = build_profile(table()).layers
    s, h = 1024, 2048
    rate = 220e6  # operations a microsecond
    assert block.forward_us == pytest.approx(s * h * (24 * h + 2 * s) / rate)  # half of 4s: attention is causal
    assert block.backward_input_us == pytest.approx(s * h * (24 * h + 4 * s) / rate)
    assert block.backward_weight_us == pytest.approx(s * h * 24 * h / rate)
    assert head.forward_us == pytest.approx(2 * s * h * 50_000 / rate)


def test_attention_is_the_part_that_grows_with_the_square() -> None:
    short, long = (
        build_profile(table(model=MODEL | {"sequence": s, "microbatch_size": 4096 // s})) for s in (1024, 4096)
    )
    assert (short.sequence, long.sequence) == (1024, 4096)
    for kind in ("forward_us", "backward_input_us", "backward_weight_us"):
        times_us = [getattr(profile.layers[1], kind) for profile in (short, long)]
        parts_us = [getattr(profile.layers[1].attention, kind) for profile in (short, long)]
        assert parts_us[1] == pytest.approx(4 * parts_us[0])  # of as many tokens
        assert times_us[1] - parts_us[1] == pytest.approx(times_us[0] - parts_us[0])
    attention = long.layers[1].attention
    assert attention is not None
    assert attention.key_value_bytes == 2 * 2 * 4096 * 2048
    assert long.layers[0].attention is long.layers[2].attention is None


def test_layer_memory_is_zero_bubbles() -> None:
    s, h, a = 1024, 2048, 16
    kept = build_profile(table(kept={"attention_scores": True})).layers[1]
    assert kept.activation_bytes == s * (34 * h + 5 * a * s)
    assert kept.backward_weight_bytes == 32 * s * h
    assert build_profile(table()).layers[1].activation_bytes == 34 * s * h
    recomputed = build_profile(table(kept={"recomputed": True})).layers[1]
    assert recomputed.activation_bytes == recomputed.offload_bytes == 20 * s * h


@pytest.mark.parametrize(("hidden", "sequence"), [(2048, 1024), (4096, 4096), (8192, 16384)])
def test_k_is_pipe_offloads(hidden: int, sequence: int) -> None:
    """k = 10 / (3 (6h + s)) * Bc / Bo (PipeOffload, section 3), which counts all pairs of tokens in attention."""
    given = table(model=MODEL | {"hidden": hidden, "sequence": sequence}, kept={"recomputed": True})
    expected = 10 / (3 * (6 * hidden + sequence / 2)) * 220e12 / 15e9
    assert copy_to_compute_ratio(build_profile(given)) == pytest.approx(expected, rel=1e-6)


def test_parameters_of_the_paper_s_1_5b_model() -> None:
    """22 layers of hidden size 2304 are the 1.5B model of Zero Bubble's experiments, embeddings apart."""
    given = table(model=MODEL | {"layers": 22, "hidden": 2304, "heads": 24})
    block = build_profile(given).layers[1]
    assert 22 * block.parameter_bytes / 18 == pytest.approx(1.4e9, rel=0.01)


def test_a_layer_with_grouped_queries_and_gates_has_the_parameters_of_llama_70b() -> None:
    sizes = {"layers": 80, "hidden": 8192, "heads": 64, "key_value_heads": 8, "feed_forward": 28672, "gated": True}
    given = table(model=MODEL | sizes | {"vocabulary": 128256})
    profile = build_profile(given)
    assert profile.layers[1].parameter_bytes == 18 * 855_654_400
    assert sum(layer.parameter_bytes for layer in profile.each_layer) == 18 * 70_553_706_496
    full = build_profile(table(model=MODEL, precision={"activation_bytes": 4, "optimizer_bytes": 8})).layers[1]
    half = build_profile(table()).layers[1]
    assert full.activation_bytes == 2 * half.activation_bytes
    assert full.parameter_bytes == half.parameter_bytes * 14 / 18


def test_tensor_and_data_parallelism_divide() -> None:
    one, divided = (
        build_profile(table(parallel=parallel)).layers[1]
        for parallel in ({}, {"tensor": 4, "data": 8, "sharded_optimizer": True})
    )
    assert divided.forward_us == pytest.approx(one.forward_us / 4)
    assert divided.activation_bytes == one.activation_bytes // 4
    assert divided.parameter_bytes == pytest.approx(one.parameter_bytes / 18 * (2 + 4 + 12 / 8) / 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 3", "model is 3: input should be a valid dictionary"),
        ("[model]\nlayers = 2\nlayers = 3", "is not TOML"),
        ("[machine]\nteraflop = 3", "machine.teraflop is not a field. Maybe you meant teraflops"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        SizeTable.load(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message", "source"),
    [
        (
            {"machine": MACHINE | {"memory_gb": 1e12}},
            "memory_bytes is 1000000000000000000000 but must be",
            "by formula",
        ),
        (
            {"machine": MACHINE | {"teraflops": 1e-9}},
            "forward_us is .* but at most 1000000000000 us",
            "decoder layer by formula",
        ),
        (
            {"model": MODEL | {"hidden": 10**6, "sequence": 10**6, "microbatch_size": 10**6}},
            "output_bytes is 2000000000000000000 but must be",
            "embedding by formula",
        ),
    ],
)
def test_figures_that_no_profile_can_hold_are_refused(changes: dict[str, Any], message: str, source: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build_profile(table(**changes))
    assert caught.value.source.startswith(source)


def test_heads_divide_hidden() -> None:
    with pytest.raises(InputError, match="model has heads 7, which does not divide hidden 2048"):
        table(model=MODEL | {"heads": 7})
    with pytest.raises(InputError, match="has key_value_heads 3, which does not divide heads 16"):
        table(model=MODEL | {"key_value_heads": 3})
