"""A section of the benchmarks' document: what it shows, and how it is measured in two sizes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Size = Literal["quick", "full"]
"""`quick` shows that everything works; `full` is for the figures of the document."""

SIZES: tuple[Size, ...] = ("quick", "full")


@dataclass(frozen=True)
class Section:
    """`measure` runs everything, perhaps draws `pictures / (name + ".png")`, and returns Markdown that shows it.

    `command` measures this section alone.
    """

    name: str
    title: str
    intent: str
    command: str
    measure: Callable[[Size, Path], str]

    def picture(self, pictures: Path) -> Path:
        """Where this section's picture goes."""
        return pictures / f"{self.name}.png"


def main(description: str, sections: Sequence[Section]) -> None:
    """The command line of a module with some sections: measures one and prints its Markdown."""
    names = [section.name for section in sections]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("section", choices=names)
    parser.add_argument("--size", choices=SIZES, default="quick")
    parser.add_argument("--pictures", type=Path, default=Path("out/benchmarks"), help="folder for the picture")
    options = parser.parse_args()
    options.pictures.mkdir(parents=True, exist_ok=True)
    print(sections[names.index(options.section)].measure(options.size, options.pictures))


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
