"""Models of transformers, cut: outputs and losses are those of the uncut model."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, T5Config, XLNetConfig

from optpipe.cluster.machine import named_machines
from optpipe.cluster.model import load_model
from optpipe.cluster.software import MEGATRON
from optpipe.compile import compile_schedule
from optpipe.errors import InputError
from optpipe.models.hugging_face import PART, HuggingFace
from optpipe.models.loss import IGNORED, PerToken
from optpipe.runtime.loss import total_loss
from optpipe.runtime.shared_parameters import shared_parameters
from optpipe.train import ModelConfig, StepReport, output, train
from optpipe.train.check import scheduled_memory
from optpipe.train.launch import Launch
from optpipe.train.model import Model
from optpipe.train.result import TrainingResult
from optpipe.train.tasks import build_task
from solver.build import build_schedule
from solver.layout.cluster_plan import Plan
from solver.layout.fitting import Job
from tests.optpipe.models import tiny_models
from tests.optpipe.models.cases import config_of
from tests.optpipe.models.tiny_models import (
    ARCHITECTURES,
    CONFIGS,
    MICROBATCHES,
    ROWS,
    TOKENS,
    TRAINED,
    plain_losses,
    plain_model,
    saved,
    saved_architecture,
)
from tests.ranks import RunRanks
from tests.recomputing import FULL, one_f_one_b, recomputing
from tests.sample import some

WORKER = Path(__file__).parent / "worker.py"
LOADED = ["tied llama, loaded", "llama, loaded replicas"]
IN_4 = LOADED + some(
    [
        "tied llama, linear",
        "qwen3-moe, linear",
        "gpt2, replicas",
        "tied llama, accumulated",
        "qwen3-moe, accumulated replicas",
    ]
)

TIED = ("tied llama", "gemma", "gemma3", "gpt2", "opt", "falcon", "falcon with alibi", "bloom")


def output_of(stages: list[nn.Module], x: Any) -> Any:
    for stage in stages:
        stage.eval()
        x = stage(x)
    return x


@pytest.mark.parametrize(("name", "cut"), some([*product(CONFIGS, ("1,1,1,2", "2,3", "1,3,1"))]))
def test_stages_compute_what_the_uncut_model_does(name: str, cut: str) -> None:
    model, plain = HuggingFace(saved(name), cut=cut), plain_model(name).eval()
    stages = model.build_stages()
    inputs: list[Any] = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))]
    if name != "vit":
        x = tiny_models.batch(0)[0][0]
        inputs = [x["input_ids"], x]
        if "position_ids" in inspect.signature(plain.forward).parameters:
            inputs.append({"input_ids": x["input_ids"], "position_ids": torch.arange(8, 16)[None]})
    for x in inputs:
        with torch.no_grad():
            expected = plain(**x) if isinstance(x, dict) else plain(x)
            found = output_of(stages, x)
        shown = (
            torch.ones(()) if not isinstance(x, dict) or "attention_mask" not in x else x["attention_mask"][..., None]
        )
        logits = found["logits"] if isinstance(found, dict) else found
        torch.testing.assert_close(logits * shown, expected.logits * shown, rtol=0, atol=2e-6)
        if "auxiliary" in found if isinstance(found, dict) else False:
            torch.testing.assert_close(found["auxiliary"], expected.aux_loss)
    assert isinstance(found, dict) == (name in ("mixtral", "qwen3-moe"))
    held = {id(p): p for stage in stages for p in stage.parameters()}
    assert sum(p.numel() for p in held.values()) == plain.num_parameters()
    assert len(shared_parameters(stages)) == (name in TIED)


def test_a_process_has_values_for_its_own_stages_alone() -> None:
    model = HuggingFace(saved("tied llama"), 4)
    whole, stages = model.build_stages(), model.build_stages({1, 3})
    for s, stage in enumerate(stages):
        expected = dict(whole[s].named_parameters())
        shared = {"model.model.embed_tokens.weight"}  # the last stage has its values
        assert {n for n, p in stage.named_parameters() if p.is_meta} == (set() if s in (1, 3) else {*expected} - shared)
        assert all(p.is_meta or torch.equal(p, expected[n]) for n, p in stage.named_parameters())
    assert stages[0].get_parameter("model.model.embed_tokens.weight") is stages[3].get_parameter("model.lm_head.weight")


@pytest.mark.parametrize("name", some(["tied llama", "gpt2", "qwen3-moe", "vit"]))
def test_weights_that_are_drawn_depend_on_seed_and_name_alone(name: str, tmp_path: Path) -> None:
    tiny_models.config(name).save_pretrained(tmp_path)

    def drawn(cut: str, seed: int, own: set[int] | None = None) -> dict[str, Tensor]:
        stages = HuggingFace(f"hf:{tmp_path}", cut=cut, seed=seed).build_stages(own)
        return {n: p for stage in stages for n, p in stage.named_parameters() if not p.is_meta}

    first, other = drawn("1,1,1,2", 0), drawn("1,1,1,2", 1)
    for again in (drawn("3,2", 0), drawn("1,1,1,2", 0, {2}), drawn("1,1,1,2", 0, {3})):
        assert again
        assert all(torch.equal(parameter, first[name]) for name, parameter in again.items())
    matrices = [name for name, parameter in first.items() if parameter.dim() > 1]
    assert all(not torch.equal(first[name], other[name]) for name in matrices)
    spread = {name: float(first[name].detach().std()) for name in matrices if "c_proj" not in name}
    expected = tiny_models.config(name).initializer_range
    assert all(value == pytest.approx(expected, rel=0.3) for key, value in spread.items() if "cls" not in key)


ALONE = [f"{name}, {way}" for name in TRAINED for way in ("linear, checked", "V")]


@pytest.mark.parametrize(
    "case", some([*ALONE, "tied llama, accumulated, checked", "qwen3-moe, accumulated V", "bloom, V"])
)
def test_training_in_one_process(case: str) -> None:
    name = case.partition(",")[0]
    result = train(config_of(case))
    assert result.losses == pytest.approx(plain_losses(name), rel=0, abs=1e-5)
    assert result.parameters == plain_model(name).num_parameters()
    assert ("checked" in case) == (result.check is not None)
    assert result.check is None or result.check.failures == ()


def test_the_utilization_is_that_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that are known, for the steps that were measured."""
    monkeypatch.setattr(output, "hardware_name", lambda *_: "NVIDIA H100 80GB HBM3")
    reports: list[StepReport] = []
    config = config_of("llama, linear")
    result = train(config, reports.append)
    model, h100 = load_model(config.model.name.removeprefix("hf:")), named_machines()["h100"]
    plan = Plan(Job(model, h100, TOKENS, MICROBATCHES * ROWS, MEGATRON), 1, {}, [], [], 0.0)
    assert [r.utilization for r in reports] == pytest.approx([plan.utilization(r.seconds) for r in reports])
    assert result.utilization == median(r.utilization or 0.0 for r in reports)
    monkeypatch.undo()
    assert train(config).utilization is None


@pytest.mark.parametrize("name", some(["llama", "gemma3", "bloom", "qwen3-moe"]))
def test_microbatches_of_different_lengths_train_as_the_uncut_model(name: str) -> None:
    """With rotary embeddings, sliding windows, alibi, and experts whose balance the messages carry."""
    config = config_of(f"{name}, V, checked")
    model = replace(config.model, data=f"{tiny_models.__name__}:short_batch", lengths="varying")
    result = train(replace(config, model=model, steps=3))
    assert result.losses == pytest.approx(plain_losses(name, 3, tiny_models.short_batch), rel=0, abs=1e-5)
    assert result.check is not None
    assert result.check.failures == ()


@pytest.mark.parametrize(
    ("name", "mode"),
    some([("gpt2", "selective:attn"), ("qwen3-moe", "selective:mlp"), ("phi", "selective+offload")]),
)
def test_layers_and_parts_of_them_are_recomputed_one_at_a_time(name: str, mode: str) -> None:
    """Losses to the bit, with the experts' auxiliary loss and dropout; peaks as planned; nothing left after a step."""

    def run(backward: str) -> TrainingResult:
        problem = recomputing(2, MICROBATCHES, [FULL | {"name": mode}])
        orders = one_f_one_b(problem, lambda _s, _i: backward)
        schedule = build_schedule(problem, orders, 0.0, "by hand", 0.0)
        return train(replace(config_of(f"{name}, in 2"), schedule=schedule, steps=2, check=True))

    kept = run("BW")
    for backward in ("CBW", "C BW"):
        found = run(backward)
        assert found.losses == kept.losses
        assert found.loss_terms == kept.loss_terms
        assert [*found.loss_terms] == (["cross_entropy", "auxiliary"] if name == "qwen3-moe" else [])
        assert found.check is not None
        assert found.check.failures == ()
        assert kept.check is not None
        for one, other in zip(found.check.devices, kept.check.devices, strict=True):
            assert one.peak_bytes == pytest.approx(one.planned_peak_bytes, rel=0.02)
            assert one.live_bytes == (0, 0)
            assert one.peak_bytes <= other.peak_bytes
        assert found.check.devices[0].peak_bytes < kept.check.devices[0].peak_bytes


@pytest.fixture(scope="module")
def found(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Findings of each of four ranks for each case."""
    folder, names = tmp_path_factory.mktemp("ranks"), [case.split(", ")[0] for case in IN_4]
    run_ranks(WORKER, 4, str(folder), json.dumps({name: saved(name) for name in names}), *IN_4)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.torchrun
@pytest.mark.parametrize("case", IN_4)
def test_training_in_four_processes(found: list[Any], case: str) -> None:
    name = case.partition(",")[0]
    for rank in found:
        assert rank[case]["losses"] == pytest.approx(plain_losses(name), rel=0, abs=1e-5)
        assert rank[case]["parameters"] == plain_model(name).num_parameters()
        assert rank[case]["on meta"]


@pytest.mark.torchrun
def test_a_process_reads_what_its_stages_need(found: list[Any]) -> None:
    """The first step for shapes; then all of its replica's microbatches, or none without the first and last stage."""
    steps, m = range(tiny_models.STEPS), tiny_models.MICROBATCHES
    every = [step for step in steps for _ in range(m)]
    assert [rank["tied llama, loaded"]["read"] for rank in found] == [
        [0] * m + (every if rank in (0, 3) else []) for rank in range(4)
    ]
    assert [rank["llama, loaded replicas"]["read"] for rank in found] == [[0] * (m // 2) + every[::2]] * 4


def test_the_cut_is_that_of_the_plan_for_this_model() -> None:
    """In the name of its problem; of another cut the plan has other sizes, against which no memory is held."""
    config = config_of("llama, in 2")
    assert config.schedule is not None
    folder, problem = saved("llama").rpartition("/")[2], config.schedule.problem
    name = build_task(config, 2, 4).name
    assert name.startswith(f"LlamaForCausalLM of {folder}, ")

    def model(name: str, cut: str | None = None) -> Model:
        schedule = config.schedule.model_copy(update={"problem": problem.model_copy(update={"name": name})})  # type: ignore[union-attr]
        named = replace(config, schedule=schedule, model=replace(config.model, cut=cut))
        return Model(named, compile_schedule(schedule), Launch(2))

    for problem_name, given, cut, memory in (
        (f"{name}, cut 1,4", None, [1, 4], True),
        (f"{name}, cut 1,4", "2,3", [2, 3], False),
        (f"{name}, cut 1,2,2", None, [2, 3], False),
        (name, None, [2, 3], True),
        (name.replace(folder, "other") + ", cut 1,4", None, [2, 3], False),
    ):
        made = model(problem_name, given)
        assert made.task.identity()["cut"] == cut
        assert (scheduled_memory(made) is not None) == memory


def test_layers_that_are_alike_are_measured_once() -> None:
    assert HuggingFace(saved("llama")).alike() == [0, 1, 1, 1, 4]
    assert HuggingFace(saved("gemma3")).alike() == [0, 1, 1, 1, 4], "all of its four layers slide"


def test_torchtitans_names_of_the_modules_of_each_stage(tmp_path: Path) -> None:
    first = ["model.embed_tokens", "model.layers.0"]
    assert HuggingFace(saved("llama")).units[-1].modules == ("model.norm", "lm_head"), "in the order of the run"
    parts = [first, ["model.layers.1", "model.layers.2", "model.layers.3"], ["model.norm", "lm_head"]]
    file = tmp_path / "cut.json"
    file.write_text(json.dumps(parts))
    assert HuggingFace(saved("llama"), 3, str(file)).sizes == (1, 3, 1)
    for wrong, message in (
        ([parts[0], parts[1]], "which makes 4 layers, but the model is cut into 5, from model.embed_tokens and"),
        ([first[:1], first[1:] + parts[1], parts[2]], "stage 0 lacks model.layers.0, which must be in the same stage"),
        ([parts[1], parts[0], parts[2]], "stage 0 must begin with model.embed_tokens and model.layers.0 and go on"),
        ([[*first, "layers.9"], *parts[1:]], "stage 0 has no module 'layers.9'. Maybe one of model.embed_tokens, "),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=re.escape(message)):
            HuggingFace(saved("llama"), None, str(file))
    file.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"cut\.json, which nests too deeply"):
        HuggingFace(saved("llama"), None, str(file))


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ("1,2,2", "cut is 1,2,2, for 3 stage(s), but there are 4."),
        ("1,1,1,3", "cut is 1,1,1,3, which makes 6 layers, but the model is cut into 5"),
        ("1,1,0,3", "cut holds '0', but must be numbers of layers above 0. Maybe 5,6,6,5, or"),
        ("missing.json", "cut is missing.json, which cannot be read: No such file or directory."),
    ],
)
def test_a_wrong_cut_is_refused(cut: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        HuggingFace(saved("llama"), 4, cut)


def test_wrong_models_are_refused(tmp_path: Path) -> None:
    def refused(message: str, stages: int = 2) -> None:
        with pytest.raises(InputError, match=re.escape(message)):
            HuggingFace(f"hf:{tmp_path}", stages)

    refused(f"has no configuration at {tmp_path / 'config.json'}. Maybe it is the name of a model")
    (tmp_path / "config.json").write_text("{}")
    refused("has a configuration that transformers does not read: ValueError: ")
    tiny_models.config("llama").save_pretrained(tmp_path)
    refused("has 4 layers, but there are 5 stages. Maybe fewer.", 5)
    (tmp_path / "pytorch_model.bin").touch()
    refused(
        "has weights in pytorch_model.bin, which are not read, and none in safetensors. Maybe save it anew, by save_"
    )
    (tmp_path / "pytorch_model.bin").unlink()
    plain = plain_model("llama")
    plain.model.layers[2] = nn.Identity()
    plain.save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"has no weights for model\.layers\.2\.input_layernorm\.weight, .* Maybe a file"
    ):
        HuggingFace(f"hf:{tmp_path}", 2).build_stages()
    with pytest.raises(
        InputError, match=r"model\.data is missing, and hf:.* has a vocabulary of 64, so it does not learn"
    ):
        train(config_of("llama, linear").__class__(config_of("llama, linear").schedule, ModelConfig(saved("llama"))))


def test_models_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    XLNetConfig(vocab_size=64, d_model=16, n_layer=4, n_head=2, d_inner=32).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match="does not run with layers that hand on one tensor, and has no pipeline plan: "
    ):
        HuggingFace(f"hf:{tmp_path}", 2)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    T5Config(**sizes).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="is a configuration of t5 with no causal language model"):
        HuggingFace(f"hf:{tmp_path}", 2)
    T5Config(**sizes, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="num_decoder_layers 2, but 2 lists of modules are that long, so it cannot be"):
        HuggingFace(f"hf:{tmp_path}", 2)


CTRL = {"n_positions": 32, "n_embd": 16, "dff": 32, "n_layer": 4, "n_head": 2}
RWKV = {"hidden_size": 16, "num_hidden_layers": 4, "context_length": 32}
PROPHET = {"hidden_size": 16, "num_encoder_layers": 2, "num_decoder_layers": 4, "num_decoder_attention_heads": 2}


@pytest.mark.parametrize(
    ("kind", "architecture", "options", "message"),
    [
        ("CTRLConfig", "CTRLLMHeadModel", CTRL, "CTRLLMHeadModel, which changes its embeddings in place"),
        ("RwkvConfig", "RwkvForCausalLM", RWKV, "the model takes more from each layer than hidden states"),
        ("ProphetNetConfig", "ProphetNetForCausalLM", PROPHET, "computes with weights outside their modules"),
    ],
)
def test_models_are_refused_by_what_they_do(
    kind: str, architecture: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    getattr(transformers, kind)(vocab_size=64, **options, architectures=[architecture]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        HuggingFace(f"hf:{tmp_path}", 2)


class Hopping(LlamaForCausalLM):
    """Adds its embeddings to its logits, which no stage but the first has."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **more: Any) -> Any:
        output = super().forward(input_ids, inputs_embeds=inputs_embeds, **more)
        embedded = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        output.logits = output.logits + embedded.mean()
        return output


def test_a_model_that_hands_on_more_than_hidden_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HuggingFace, "_class", lambda _: Hopping)
    with pytest.raises(InputError, match=r"Hopping, which needs what model\.embed_tokens returns for its logits"):
        HuggingFace(saved("llama"), 2)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_configuration_that_asks_for_outputs_in_tuples_is_run_by_name(name: str, tmp_path: Path) -> None:
    """With it transformers itself fails where a model takes the output of its part apart by name."""
    for file in Path(saved(name).removeprefix("hf:")).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"return_dict": False}))
    x = tiny_models.batch(0)[0][0]
    with torch.no_grad():
        found, expected = (output_of(HuggingFace(n, 2).build_stages(), x) for n in (f"hf:{tmp_path}", saved(name)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "stages"), some([*product(ARCHITECTURES, (2, 4))]))
def test_loss_and_gradients_are_those_of_transformers(name: str, stages: int) -> None:
    """With padding, of which the ids of the last microbatch have most."""
    cut, folder = HuggingFace(saved_architecture(name), stages), saved_architecture(name).removeprefix("hf:")
    plain = getattr(transformers, name).from_pretrained(folder).eval()
    loss, modules = PerToken(cut.loss), [stage.eval() for stage in cut.build_stages()]
    for x, tokens in zip(*tiny_models.batch(0), strict=True):
        x["input_ids"] *= x["attention_mask"]
        with torch.no_grad():
            logits = plain(**x).logits
        labels = tokens % logits.shape[-1] if logits.dim() == 3 else torch.arange(len(logits)) % 3
        if logits.dim() == 3:
            labels[tokens == IGNORED] = IGNORED
        plain.zero_grad()
        expected = plain(**x, labels=labels).loss
        expected.backward()
        received = x
        for module in modules:
            module.zero_grad()
        for module in modules:
            received = module(received)
        found = total_loss(loss(received, loss.with_tokens([labels])[0]))
        torch.autograd.backward(found)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        own = {
            name.removeprefix(PART): parameter.grad
            for module in modules
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if parameter.grad is not None
        }
        theirs = {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None}
        assert theirs.keys() == own.keys() | {
            n for n, gradient in theirs.items() if n not in own and not gradient.any()
        }
        for parameter, gradient in own.items():
            torch.testing.assert_close(gradient, theirs[parameter], rtol=1e-4, atol=1e-6)


def test_pixels_go_to_the_first_stage_alone() -> None:
    """The logits and the loss are compared with those of the uncut model; the second stage has no vision tower."""
    ids = torch.arange(1, 13).repeat(2, 1)
    ids[:, 1:5] = tiny_models.VOCABULARY - 1  # the places of the four patches
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    model = HuggingFace(saved_architecture("LlavaForConditionalGeneration"), 2)
    first, _ = model.build_stages(None, [(inputs, ids)])
    assert first(inputs).keys() == {"hidden_states", "attention_mask"}


GEMMA3N = {"num_hidden_layers": 4, "intermediate_size": [32] * 4, "laurel_rank": 4, "num_kv_shared_layers": 0}
GEMMA3N |= {
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "activation_sparsity_pattern": [0.0] * 4,
}
ZAMBA2 = {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 4, "mamba_headdim": 8, "n_mamba_heads": 4}
ZAMBA2 |= {"mamba_ngroups": 1, "chunk_size": 4, "num_mem_blocks": 1, "use_mamba_kernels": False, "adapter_rank": 4}


@pytest.mark.parametrize(
    ("kind", "architecture", "options", "message"),
    [
        ("Gemma3nTextConfig", "Gemma3nForCausalLM", GEMMA3N, r"model\.embed_tokens returns in .* \(per_layer_input\)"),
        ("Zamba2Config", "Zamba2ForCausalLM", ZAMBA2, r"model\.embed_tokens returns in .* \(original_hidden_states\)"),
        ("LlamaConfig", "LlamaForSequenceClassification", {"num_labels": 1}, "a loss that is not the mean cross entr"),
        ("LlamaConfig", "LlamaForQuestionAnswering", {}, "returns no logits but start_logits, end_logits"),
        ("LlamaConfig", "LlamaModel", {}, "returns no logits but last_hidden_state"),
    ],
)
def test_what_a_stage_cannot_compute_is_refused_by_name(
    kind: str, architecture: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Before any weight is read: the message names what a layer reads, or the loss that is not known."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 8}
    config = getattr(transformers, kind)(**sizes | options, num_key_value_heads=2, architectures=[architecture])
    config.save_pretrained(tmp_path)
    with torch.no_grad(), pytest.raises(InputError, match=f"is {architecture}, which .*{message}"):
        HuggingFace(f"hf:{tmp_path}", 2)
