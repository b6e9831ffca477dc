"""Draws every picture of docs/concepts: `python -m examples.pictures [--out docs/pictures/concepts] [NAME ...]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from examples.pictures import (
    any_timing,
    blocks,
    budgets,
    front,
    objectives,
    offload,
    passes,
    placements,
    recomputation,
    slices,
    spread,
)
from optpipe.plot.figure import encode, settings
from optpipe.plot.panel import Panel

MODULES = (front, passes, objectives, budgets, offload, recomputation, slices, blocks, spread, placements, any_timing)
PICTURES: Mapping[str, Callable[[], Panel]] = {
    name: draw for module in MODULES for name, draw in module.PICTURES.items()
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which pictures: {', '.join(PICTURES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/concepts"), help="where the files go")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(PICTURES):
        parser.error(f"no pictures: {', '.join(sorted(unknown))}. Maybe one of {', '.join(PICTURES)}.")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        path = options.out / f"{name}.png"
        path.write_bytes(picture(name))
        print(path)


def picture(name: str) -> bytes:
    """Draw a picture as PNG."""
    with settings():
        return encode(PICTURES[name]().figure, "png", name)


if __name__ == "__main__":
    main()
