"""`optpipe models`: language models by name, or one model layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import AsJson, print_json, stdout, table

if TYPE_CHECKING:
    from optpipe.cluster.model import Layer, Model


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="A name, a config.json or the folder of one: this model alone.", metavar="MODEL"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List the language models that are known by name, or the layers of one, with their parameters.

    Counts are those of published weights, without layers of multi-token prediction: in billions in the list, to the
    unit for one model and with --json.
    """
    from optpipe.cluster.model import load_model, named_models

    found = [load_model(name) for name in (named_models() if model is None else [model])]
    if as_json:
        print_json({"models": [one.to_data() for one in found]})
        return 0
    if model is None:
        rows = table("model", "type", "parameters", "a token meets", "layers", "hidden", "vocabulary")
        for one in found:
            parameters = (f"{count / 1e9:,.2f} B" for count in (one.parameters, one.active_parameters))
            sizes = (f"{size:,}" for size in (len(one.layers), one.hidden, one.vocabulary))
            rows.add_row(one.name, one.model_type, *parameters, *sizes)
        stdout().print(rows)
        return 0
    _print(found[0])
    return 0


def _print(model: Model) -> None:
    console = stdout()
    rows = table("part", "number", "parameters of each", "what it has", left=(0, 3))
    rows.add_row("embedding", "1", f"{model.embedding_parameters:,}", f"{model.vocabulary:,} tokens")
    for layer, count in model.kinds:
        rows.add_row("layer", f"{count:,}", f"{layer.parameters:,}", _text(layer))
    rows.add_row("head", "1", f"{model.head_parameters:,}", "tied to the embedding" if model.tied else "")
    console.print(rows)
    console.print(f"{model.parameters:,} parameters, of which a token meets {model.active_parameters:,}")
    if model.predicted_tokens:
        console.print(f"and {model.prediction_parameters:,} for the prediction of {model.predicted_tokens} more tokens")
    for assumption in model.assumptions:
        console.print(assumption)


def _text(layer: Layer) -> str:
    attention, feed_forward = layer.attention, layer.feed_forward
    heads = f"{attention.heads} heads of {attention.query_key_width}"
    if attention.latent_width:
        heads += f", keys and values in {attention.latent_width}"
    elif attention.key_value_heads < attention.heads:
        heads += f", {attention.key_value_heads} of keys and values"
    if attention.window:
        heads += f", a window of {attention.window:,}"
    if feed_forward.experts:
        return f"{heads}; {feed_forward.chosen} of {feed_forward.experts} experts, {feed_forward.width:,} wide"
    return f"{heads}; feed-forward {feed_forward.width:,} wide"
