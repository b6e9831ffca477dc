"""Sections of the pages in docs/benchmarks, each measured in two sizes, and their command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Size = Literal["quick", "full"]
"""`quick` is a smoke test; `full` gives the figures of the document."""

SIZES: tuple[Size, ...] = ("quick", "full")


@dataclass(frozen=True)
class Section:
    """Section of the document. `measure` runs the benchmark, may draw `picture`, and returns Markdown.

    `command` measures this section alone.
    """

    name: str
    title: str
    intent: str
    command: str
    measure: Callable[[Size, Path], str]

    def picture(self, pictures: Path) -> Path:
        """Path of the section's picture."""
        return pictures / f"{self.name}.png"


def main(description: str, sections: Sequence[Section]) -> None:
    """Run the command line of a module with sections: measure one and print its Markdown."""
    names = [section.name for section in sections]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("section", choices=names)
    parser.add_argument("--size", choices=SIZES, default="quick")
    parser.add_argument("--pictures", type=Path, default=Path("out/benchmarks"), help="folder for the picture")
    options = parser.parse_args()
    options.pictures.mkdir(parents=True, exist_ok=True)
    print(sections[names.index(options.section)].measure(options.size, options.pictures))


def say(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)
