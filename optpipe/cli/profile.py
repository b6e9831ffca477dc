"""`optpipe profile`: what a model costs, by formula from a table of sizes or measured on this hardware."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.output import AsJson, check_writable
from optpipe.cli.size import parse_share, parse_size
from optpipe.errors import InputError, Issue


class Precision(StrEnum):
    """Precision of weights and activations."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Format(StrEnum):
    """The document that is written."""

    PROBLEM = "problem"
    LAYERS = "layers"


class ClockChoice(StrEnum):
    """What times the ops on the CPU."""

    WALL = "wall"
    CPU = "cpu"


def command(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile goes.", metavar="FILE.json")],
    from_table: Annotated[
        Path | None, typer.Option(help="Nothing is measured: sizes and rates are read here.", metavar="TABLE.toml")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="tiny, small or medium (our GPT), or your own as module:callable.", metavar="MODEL"),
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Default: a problem where it is known how many stages there are.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, max=4096, help="Devices of the pipeline.")] = None,
    stages: Annotated[int | None, typer.Option(min=1, max=4096, help="Stages, instead of devices.")] = None,
    placement: Annotated[str, typer.Option(help="linear, interleaved-N, v or v-N.")] = "linear",
    microbatches: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="In a step; default: two a device.")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            help="Of a device: parameters with gradients and Adam's moments are taken off and the rest is the budget; "
            "messages that wait for their op come on top. Default: no limit.",
            metavar="SIZE",
        ),
    ] = None,
    memory_margin: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            help="Share of --memory to leave free, for sizes that depend on the data; default: 0%.",
            metavar="10%",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Called with 0, returns microbatches to measure with, as 'train' has it.", metavar="module:callable"
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=2000, help="Blocks of our GPT; default: one a stage.")
    ] = None,
    microbatch_size: Annotated[int | None, typer.Option(min=1, max=4096, help="Sequences; default: 4.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Bytes of text in one; default: the longest.")] = None,
    dtype: Annotated[Precision | None, typer.Option(help="Precision of our GPT; default: float32.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="How often each op is timed, after warm-up; default: 10.")
    ] = None,
    clock: Annotated[
        ClockChoice | None,
        typer.Option(help="cpu: the computing thread's time, which a busy machine does not lengthen; default: wall."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Run steps and compare with what is predicted; exit code 1 if peaks differ."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Find out what a model's stages cost: times, memory, transfers. Writes a problem to solve, or layers to plan.

    From a table of sizes (--from-table) by formula, for machines that are not at hand; or measured here (--model), with
    the code that runs in training. Under torchrun each process measures the stages of its device.
    """
    check_writable(output)
    our_gpt: dict[str, object] = {
        "--layers": layers,
        "--microbatch-size": microbatch_size,
        "--sequence": sequence,
        "--dtype": dtype,
    }
    measuring: dict[str, object] = {
        "--memory": memory,
        "--memory-margin": memory_margin,
        "--data": data,
        "--rounds": rounds,
        "--clock": clock,
        "--check": check or None,
    }
    if from_table is not None:
        _refuse("--from-table", "measures nothing and has all from its table", {"--model": model} | our_gpt | measuring)
        from optpipe.cli.profile_table import profile_table

        return profile_table(from_table, output, form, devices, stages, placement, microbatches, as_json)
    if model is None:
        raise InputError([Issue("--model", "missing", "is missing. Maybe --model small, or --from-table TABLE.toml.")])
    if ":" in model:
        _refuse("--model", f"is {model}, whose callable decides that", our_gpt)
    else:
        _refuse("--model", f"is {model}, which has its own text", {"--data": data})
    if memory is None:
        _refuse("--memory", "is not given", {"--memory-margin": memory_margin})
    from optpipe.cli.profile_model import Options, profile_model

    options = Options(
        devices=devices,
        stages=stages,
        placement=placement,
        microbatches=microbatches,
        as_layers=form is Format.LAYERS,
        memory_bytes=memory,
        memory_margin=memory_margin or 0.0,
        data=data,
        layers=layers,
        microbatch_size=microbatch_size or 4,
        sequence=sequence,
        dtype=(dtype or Precision.FLOAT32).value,
        rounds=rounds or 10,
        clock=(clock or ClockChoice.WALL).value,
        check=check,
    )
    return profile_model(model, options, output, as_json)


def _refuse(option: str, why: str, others: Mapping[str, object]) -> None:
    """Raise InputError about the options that were given but mean nothing beside `option`."""
    issues = [
        Issue(name, "meaningless", f"has no meaning here: {option} {why}. Maybe leave it out.")
        for name, value in others.items()
        if value is not None
    ]
    if issues:
        raise InputError(issues)
