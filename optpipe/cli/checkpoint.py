"""`optpipe checkpoint`: weights of a run for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optpipe.cli.console import AsJson, print_json, stdout
from optpipe.errors import InputError, Issue, needs_extra

checkpoint = typer.Typer(help="Checkpoints of training runs, for other programs.", no_args_is_help=True)


@checkpoint.callback()
def _group() -> None:
    pass


@checkpoint.command("to-hf")
def to_hf(
    run: Annotated[Path, typer.Argument(help="Folder of checkpoints, or one of them.", metavar="CHECKPOINTS")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.", metavar="FOLDER")],
    as_json: AsJson = False,
) -> int:
    """Write the weights of the newest checkpoint as a folder for from_pretrained of transformers."""
    with needs_extra("hf", "models of transformers"):
        from optpipe.train.checkpoint.convert import to_hugging_face

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError([Issue("--output", "exists", f"is {output}, which is there already. Maybe a new folder.")])
    step = to_hugging_face(run, output)
    if as_json:
        print_json({"step": step, "output": str(output)})
    else:
        stdout().print(f"wrote {output}: the weights after {step} steps", markup=False, highlight=False)
    return 0
