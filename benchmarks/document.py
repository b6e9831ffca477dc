"""Measures sections of the pages in docs/benchmarks and inserts them; other sections stay unchanged.

`python -m benchmarks.document value-over-time devices --size full`. Without names of sections those that
were measured are only put in their current order and pages. Others are in none.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from benchmarks import (
    ablation,
    blocks,
    cut_regret,
    executor,
    first_solve,
    fleet,
    lengths,
    long_sequences,
    many_devices,
    milp_accelerations,
    pattern_curve,
    predicted_steps,
    published_plans,
    recomputation,
    seconds_by_size,
    service_load,
    suites,
    time_limits,
    unequal,
    updates,
    value_over_time,
    vocabulary,
)
from benchmarks.marks import between, marked
from benchmarks.section import SIZES, Section, say


class Page(NamedTuple):
    """A page of the documentation with the sections of some modules."""

    name: str
    title: str
    modules: Sequence[ModuleType]


PAGES = (
    Page("solving", "Time to a schedule", (value_over_time, first_solve, milp_accelerations)),
    Page("memory", "Memory, recomputation, unequal microbatches", (pattern_curve, recomputation, unequal)),
    Page("blocks", "Expert models with blocks", (blocks,)),
    Page("sizes", "Large problems", (seconds_by_size, many_devices, time_limits)),
    Page("suites", "Against public schedulers", (suites, ablation)),
    Page(
        "training",
        "Training steps and plans",
        (executor, predicted_steps, published_plans, cut_regret, updates, long_sequences, lengths, vocabulary),
    ),
    Page("service", "The service under load", (service_load, fleet)),
)
SECTIONS = {section.name: section for page in PAGES for module in page.modules for section in module.SECTIONS}
FOLDERS = {"quick": Path("out/benchmarks"), "full": Path("docs")}
"""Folders with the list of pages, their folder and that of their pictures, by size."""

HEAD = """# Benchmarks

They are made by commands, never by hand. `make bench-tables` measures every section anew: with SIZE=quick in minutes,
to `out/benchmarks/`; with SIZE=full in some 70 minutes on two cores, for these pages. `python -m benchmarks.document
SECTION --size full` measures one of them. Each section names its command, cores, their load and the time limit. Values
and bounds are exact; seconds and what is found within them vary with the machine and its load. A bubble is that of the
busiest device; "best public" is the best of the public schedulers in `instances/reference.json`.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"what to measure: all, or some of {', '.join(SECTIONS)}")
    parser.add_argument("--size", choices=SIZES, default="quick")
    parser.add_argument("--note", default="", help="a sentence to add, such as what else ran on the machine")
    options = parser.parse_args(arguments)
    names = list(SECTIONS) if options.sections == ["all"] else options.sections
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"no sections: {', '.join(sorted(unknown))}. Maybe one of {', '.join(SECTIONS)}.")
    folder = FOLDERS[options.size]
    pictures = folder / "pictures" / "benchmarks"
    pictures.mkdir(parents=True, exist_ok=True)
    bodies = _bodies(folder)
    for name in names:
        say(f"-- {name}")
        measured = SECTIONS[name].measure(options.size, pictures)
        bodies[name] = _body(SECTIONS[name], " ".join(filter(None, (measured, options.note))), pictures)
        _write(folder, bodies)  # after each section, so that an error loses only one
    _write(folder, bodies)
    say(f"wrote {folder / 'benchmarks'}")


def _body(section: Section, measured: str, pictures: Path) -> str:
    picture = section.picture(pictures)
    shown = f"![{section.title}](../pictures/benchmarks/{picture.name})\n\n" if picture.is_file() else ""
    return f"{shown}{measured}"


def _write(folder: Path, bodies: dict[str, str]) -> None:
    """Write the pages of which a section was measured, and the list of them."""
    lines = [HEAD, "| page | sections |", "|---|---|"]
    names = []
    for page in PAGES:
        sections = [section for module in page.modules for section in module.SECTIONS if section.name in bodies]
        if not sections:
            continue
        names.append(f"benchmarks/{page.name}")
        parts = [f"# Benchmarks: {page.title[0].lower()}{page.title[1:]}\n"]
        parts += [f"## {one.title}\n\n{one.intent}\n\n{marked(one.name, bodies[one.name])}\n" for one in sections]
        (folder / "benchmarks").mkdir(exist_ok=True)
        _path(folder, page).write_text("\n".join(parts))
        lines.append(f"| [{page.title}](benchmarks/{page.name}.md) | {'; '.join(one.title for one in sections)} |")
    lines += ["", "```{toctree}", ":hidden:", "", *names, "```", ""]
    (folder / "benchmarks.md").write_text("\n".join(lines))


def _path(folder: Path, page: Page) -> Path:
    return folder / "benchmarks" / f"{page.name}.md"


def _bodies(folder: Path) -> dict[str, str]:
    """Bodies of the sections that were measured, by name."""
    paths = [path for page in PAGES if (path := _path(folder, page)).is_file()]
    document = "\n".join(path.read_text() for path in paths)
    bodies = {name: between(document, name) for name in SECTIONS}
    return {name: body for name, body in bodies.items() if body is not None}


if __name__ == "__main__":
    main()
