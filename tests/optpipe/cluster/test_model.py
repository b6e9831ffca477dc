"""Shapes of models: parameters as published and as transformers makes them, windows, and errors by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optpipe.cluster.families import FAMILIES
from optpipe.cluster.model import load_model, named_models, read_model
from optpipe.errors import InputError

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-3-mini": 3_821_079_552,
    "bloom-176b": 176_247_271_424,
    "gpt2-xl": 1_557_611_200,
}
"""Parameters of the published weights."""

SMALL = {"hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "vocab_size": 100}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 72}
WIDE = GROUPED | {"head_dim": 16}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROUTED = SPARSE | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 2}
ROUTED |= {"n_group": 1, "topk_group": 1}
LATENT = SMALL | ROUTED | {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"intermediate_size": 72, "q_lora_rank": 24}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
OPT = SMALL | {"ffn_dim": 72, "max_position_embeddings": 64}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "vocab_size": 100}

CONFIGURATIONS: dict[str, list[dict[str, Any]]] = {
    "llama": [WIDE, WIDE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "mistral": [WIDE],
    "mixtral": [GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}],
    "phi3": [GROUPED | {"pad_token_id": 0}],
    "qwen2": [GROUPED, GROUPED | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}],
    "qwen2_moe": [
        GROUPED | SPARSE | {"num_experts": 6, "shared_expert_intermediate_size": 33} | more
        for more in ({}, {"mlp_only_layers": [1], "decoder_sparse_step": 2})
    ],
    "qwen3": [WIDE, WIDE | {"attention_bias": True}],
    "qwen3_moe": [WIDE | SPARSE | {"num_experts": 6, "mlp_only_layers": [0]}],
    "olmo2": [GROUPED],
    "glm4": [WIDE | {"pad_token_id": 0}, WIDE | {"pad_token_id": 0, "attention_bias": False}],
    "glm4_moe": [WIDE | ROUTED, WIDE | ROUTED | {"use_qk_norm": True, "attention_bias": True}],
    "gemma": [WIDE | {"pad_token_id": 0}],
    "gemma2": [WIDE | {"pad_token_id": 0, "sliding_window": 8}],
    "gemma3_text": [WIDE | {"pad_token_id": 0, "sliding_window": 8, "num_hidden_layers": 7}],
    "deepseek_v2": [LATENT, LATENT | {"q_lora_rank": None, "attention_bias": True}],
    "deepseek_v3": [LATENT, LATENT | {"attention_bias": True}],
    "gpt_oss": [WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}],
    "gpt2": [GPT2, GPT2 | {"n_inner": 50, "tie_word_embeddings": False}],
    "gpt_neox": [SMALL | {"intermediate_size": 72}, SMALL | {"intermediate_size": 72, "attention_bias": False}],
    "nemotron": [WIDE],
    "bloom": [{"hidden_size": 48, "n_layer": 3, "n_head": 6, "vocab_size": 100}],
    "falcon": [
        SMALL,
        SMALL | NEW_FALCON,
        SMALL | NEW_FALCON | {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 70},
        SMALL | {"parallel_attn": False, "bias": True, "multi_query": False},
        SMALL | {"num_ln_in_parallel_attn": 2, "num_kv_heads": 3, "multi_query": False},
    ],
    "opt": [
        OPT,
        OPT | {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
        OPT | {"enable_bias": False},
        OPT | {"layer_norm_elementwise_affine": False},
    ],
}
STRAY = {"bias": True, "qkv_bias": True, "mlp_bias": True, "attention_bias": True, "qk_norm": True, "gated": True}
STRAY |= {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2, "mlp_only_layers": [1]}
STRAY |= {"decoder_sparse_step": 2, "moe_intermediate_size": 30, "norm": "LayerNorm", "learned_positions": 9}
"""Fields that only some classes read."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_models_have_the_published_parameters(name: str) -> None:
    model = load_model(name)
    assert model.parameters == PUBLISHED[name]
    assert model.assumptions == ()


def test_what_comes_with_the_program_says_its_source() -> None:
    assert set(PUBLISHED) < set(named_models())
    for name, config in named_models().items():
        assert config["source"], name
        assert config["model_type"] in FAMILIES, name


def test_further_pins() -> None:
    deepseek = load_model("deepseek-v3")
    assert (deepseek.active_parameters, deepseek.prediction_parameters) == (37_552_297_472, 11_610_068_224)
    assert [count for _, count in deepseek.kinds] == [3, 58]
    assert load_model("qwen3-235b-a22b").active_parameters == 22_190_763_520
    assert load_model("nemotron-4-340b").parameters == 341_029_195_776


def _of_transformers(model_type: str, given: dict[str, Any]) -> tuple[Any, int]:
    """The class's configuration and the number of its parameters."""
    config = AutoConfig.for_model(model_type, **given, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    parameters += sum(b.numel() for name, b in module.named_buffers() if name.endswith("e_score_correction_bias"))
    return config, parameters


@pytest.mark.parametrize("model_type", sorted(CONFIGURATIONS))
def test_a_field_that_the_class_does_not_read_changes_nothing(model_type: str) -> None:
    given = STRAY | CONFIGURATIONS[model_type][0]
    _, parameters = _of_transformers(model_type, given)
    assert read_model({"model_type": model_type} | given).parameters == parameters


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"kimi_k2"}))
def test_an_absent_field_is_what_the_class_takes(model_type: str) -> None:
    heads, width = (64, 128) if model_type != "deepseek_v3" else (128, 56)
    given: dict[str, Any] = {"num_attention_heads": heads, "hidden_size": heads * width, "num_hidden_layers": 5}
    given |= {"vocab_size": 100, "pad_token_id": 0}
    if FAMILIES[model_type].gated:
        given["intermediate_size"] = 72
    given |= {"deepseek_v2": {"num_experts_per_tok": 2}, "nemotron": {"num_key_value_heads": 8}}.get(model_type, {})
    config, parameters = _of_transformers(model_type, given)
    model = read_model({"model_type": model_type} | given)
    assert model.parameters == parameters
    assert all(layer.feed_forward.chosen in (0, getattr(config, "num_experts_per_tok", 0)) for layer in model.layers)
    windows = {layer.attention.window for layer in model.layers} - {None}
    assert windows <= {getattr(config, "sliding_window", None)}


@pytest.mark.parametrize("model_type", sorted(CONFIGURATIONS))
def test_parameters_and_windows_are_those_of_transformers(model_type: str) -> None:
    """From what the class fills in, and from what was given alone."""
    for given in CONFIGURATIONS[model_type]:
        config, parameters = _of_transformers(model_type, given)
        full, short = read_model(config.to_dict()), read_model({"model_type": model_type} | given)
        assert full.parameters == short.parameters == parameters, given
        types = getattr(config, "layer_types", None)
        if types and "sliding_window" in given:
            windows = [8 if kind == "sliding_attention" else None for kind in types]
            for model in (full, short):
                assert [layer.attention.window for layer in model.layers] == windows, given


def test_every_family_is_compared() -> None:
    assert set(FAMILIES) - set(CONFIGURATIONS) == {"kimi_k2"}  # the class is DeepSeek-V3's
    assert FAMILIES["kimi_k2"] == FAMILIES["deepseek_v3"]


def test_an_unknown_type_is_read_as_a_llama_and_says_so() -> None:
    model = read_model(WIDE | {"model_type": "llama_of_tomorrow"}, "mine")
    assert model.parameters == read_model(WIDE | {"model_type": "llama"}).parameters
    [assumption] = model.assumptions
    assert "llama_of_tomorrow" in assumption
    facts = {"gated": False, "norm": "LayerNorm", "bias": True, "learned_positions": 64, "tie_word_embeddings": True}
    gpt2 = read_model({"model_type": "gpt2"} | GPT2)
    assert read_model(SMALL | facts | {"num_hidden_layers": 3}).parameters == gpt2.parameters


def test_the_text_of_a_model_of_several_media() -> None:
    config = {"model_type": "gemma3", "text_config": WIDE | {"model_type": "gemma3_text"}, "vision_config": {}}
    assert read_model(config).parameters == read_model(WIDE | {"model_type": "gemma3_text"}).parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"model_type": "", "mtp_layers": 10**9}, "mtp_layers is 1000000000 but at most 100 are read."),
        ({"vocab_size": "many"}, "vocab_size is 'many' but must be an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 but must be an integer from 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000 but at most 10000"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true but must be an integer"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4 but must divide num_attention_heads, which is 6"),
        ({"hidden_size": 50}, r"hidden_size is 50 but must be a multiple of num_attention_heads \(6\)"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes' but must be true or false"),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5 but there are 4 experts"),
        ({"layer_types": "full", "sliding_window": 8}, "layer_types is 'full' but must be a list"),
        ({"mamba_num_heads": 4}, "mamba_num_heads stands for state space layers"),
        ({"interleave_moe_layer_step": 2}, "interleave_moe_layer_step stands for shared experts, and"),
        ({"model_type": "other", "layer_types": ["full_attention", "mamba"]}, "layer_types has 'mamba', but only"),
        (
            {"model_type": "other", "layer_types": ["full_attention"]},
            "layer_types has 1 entries, but num_hidden_layers is",
        ),
        ({"model_type": 3}, "model_type is 3 but must be a text"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_model(GROUPED | {"model_type": "mine"} | change)


def test_a_field_is_named_as_the_family_calls_it() -> None:
    with pytest.raises(InputError, match="n_embd is -1 but"):
        read_model({"model_type": "gpt2"} | GPT2 | {"n_embd": -1})


def test_a_name_may_be_that_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Qwen/Qwen3-32B", "Qwen3-32B", "qwen/qwen3-32b"):
        assert load_model(name) == load_model("qwen3-32b")
    assert load_model("mistralai/Mistral-7B-v0.1").name == "mistral-7b"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-32B").mkdir()
    (tmp_path / "Qwen3-32B" / "config.json").write_text(json.dumps(GROUPED | {"model_type": "llama"}))
    assert load_model("Qwen3-32B").hidden == 48  # a folder of that name comes first


def test_a_path_is_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GROUPED | {"model_type": "llama"}))
    for path in (tmp_path, tmp_path / "config.json"):
        assert load_model(str(path)).hidden == 48
    (tmp_path / "problem.json").write_text(json.dumps({"format": "optpipe.problem/1"}))
    for wrong, message in (
        ("llama-3.1-7b", r"is 'llama-3.1-7b', which is no known model and no config.json. Maybe 'llama-3.1-70b', or a"),
        ("?", "Maybe see `optpipe models`"),
        (str(tmp_path / "problem.json"), "is a problem but the config.json of a transformers model is needed"),
        (str(tmp_path / "no.json"), "no known model"),
    ):
        with pytest.raises(InputError, match=message):
            load_model(wrong)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"must be the object of a config\.json"):
        load_model(str(tmp_path))
