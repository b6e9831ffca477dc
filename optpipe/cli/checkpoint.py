"""`optpipe checkpoint`: weights of a run for other programs, and from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from optpipe.cli.console import AsJson, answer
from optpipe.errors import InputError, Issue, needs_extra

DType = Literal["float32", "float64", "bfloat16"]

checkpoint = typer.Typer(help="Checkpoints of training runs, for other programs and from them.", no_args_is_help=True)


@checkpoint.callback()
def _group() -> None:
    pass


Run = Annotated[Path, typer.Argument(help="Folder of checkpoints, or one of them.", metavar="CHECKPOINTS")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Folder to write.", metavar="FOLDER")]


@checkpoint.command("to-hf")
def to_hf(run: Run, output: Output, as_json: AsJson = False) -> int:
    """Write the weights of the newest checkpoint as a folder for from_pretrained of transformers."""
    with needs_extra("hf", "models of transformers"):
        from optpipe.train.checkpoint.convert import to_hugging_face

    _refuse_existing(output)
    step = to_hugging_face(run, output)
    return answer({"step": step, "output": str(output)}, f"wrote {output}: the weights after {step} steps", as_json)


@checkpoint.command("to-dcp")
def to_dcp(run: Run, output: Output, as_json: AsJson = False) -> int:
    """Write weights and optimizer of the newest checkpoint in the default files of torch.distributed.checkpoint."""
    with needs_extra("train", "checkpoints"):
        from optpipe.train.checkpoint.convert import to_torch

    _refuse_existing(output)
    step = to_torch(run, output)
    return answer({"step": step, "output": str(output)}, f"wrote {output}: the state after {step} steps", as_json)


@checkpoint.command("from-hf")
def from_hf(
    model: Annotated[Path, typer.Argument(help="Folder of a model of transformers, with weights.", metavar="MODEL")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of a run's checkpoints.", metavar="FOLDER")],
    dtype: Annotated[DType, typer.Option(help="Precision of the run's weights.")] = "float32",
    as_json: AsJson = False,
) -> int:
    """Write the weights of a model of transformers as a checkpoint of step 0, with which a run begins."""
    with needs_extra("hf", "models of transformers"):
        import torch

        from optpipe.train.checkpoint.convert import from_hugging_face

    tensors = from_hugging_face(str(model), output, getattr(torch, dtype))
    text = f"wrote {output}: {tensors} tensors of {model}; a run with --checkpoint {output} begins with them"
    return answer({"step": 0, "output": str(output), "tensors": tensors}, text, as_json)


def _refuse_existing(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError([Issue("--output", "exists", f"is {output}, which is there already. Maybe a new folder.")])
