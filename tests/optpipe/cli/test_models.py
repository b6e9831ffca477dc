"""`optpipe models`: the list, one model, and what is no model."""

from __future__ import annotations

import json
import re

from optpipe.cluster.model import named_models
from tests.optpipe.cli.conftest import Cli


def test_every_named_model_is_listed(cli: Cli) -> None:
    run = cli("models")
    assert run.code == 0
    assert [line.split()[0] for line in run.out.splitlines()[1:]] == list(named_models())
    assert re.search(r"^llama-3.1-405b +llama +405.85 B +405.85 B +126 ", run.out, re.MULTILINE)
    listed = json.loads(cli("models", "--json").out)["models"]
    assert {model["name"]: model["parameters"] for model in listed}["llama-3.1-405b"] == 405_853_388_800


def test_the_layers_of_one(cli: Cli) -> None:
    run = cli("models", "deepseek-v3")
    assert "8 of 256 experts" in run.out
    assert "671,026,419,200 parameters" in run.out
    [model] = json.loads(cli("models", "deepseek-v3", "--json").out)["models"]
    total = sum(layer["count"] * layer["parameters"] for layer in model["layers"])
    assert total + model["embedding_parameters"] + model["head_parameters"] == model["parameters"]


def test_what_is_no_model(cli: Cli) -> None:
    run = cli("models", "llama-3-70b")
    assert run.code == 2
    assert run.err == (
        "error: MODEL is 'llama-3-70b', which is no known model and no config.json. Maybe 'llama-3.1-70b', or a folder "
        "with the model's config.json.\n"
    )
