"""Measures sections of docs/benchmarks.md and inserts them; other sections stay unchanged.

`python -m benchmarks.document value-over-time devices --size full`. Without names of sections those of the document are
only put in their current order. Sections that were never measured are not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    ablation,
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
)
from benchmarks.marks import between, marked
from benchmarks.section import SIZES, Section, say

MODULES = (
    value_over_time,
    first_solve,
    milp_accelerations,
    pattern_curve,
    recomputation,
    unequal,
    seconds_by_size,
    many_devices,
    time_limits,
    suites,
    ablation,
    executor,
    predicted_steps,
    published_plans,
    updates,
    long_sequences,
    lengths,
    service_load,
    fleet,
)
SECTIONS = {section.name: section for module in MODULES for section in module.SECTIONS}
DOCUMENTS = {"quick": Path("out/benchmarks/benchmarks.md"), "full": Path("docs/benchmarks.md")}

HEAD = """# Benchmarks

Made by commands, never by hand: `make bench-tables` measures every section anew (SIZE=quick in minutes, to
`out/benchmarks/`; SIZE=full, some 70 minutes on two cores, for this document), `python -m benchmarks.document SECTION
--size full` one of them. Each section names its command, cores, their load and the time limit. Values and bounds are
exact; seconds and what is found within them vary with the machine and its load. A bubble is that of the busiest device;
"best public" is the best of the public schedulers in `instances/reference.json`.
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
    path = DOCUMENTS[options.size]
    pictures = path.parent / "pictures" / "benchmarks"
    pictures.mkdir(parents=True, exist_ok=True)
    bodies = _bodies(path.read_text() if path.is_file() else "")
    for name in names:
        say(f"-- {name}")
        measured = SECTIONS[name].measure(options.size, pictures)
        bodies[name] = _body(SECTIONS[name], " ".join(filter(None, (measured, options.note))), path, pictures)
        path.write_text(_document(bodies))  # after each section, so that an error loses only one
    path.write_text(_document(bodies))
    say(f"wrote {path}")


def _body(section: Section, measured: str, document: Path, pictures: Path) -> str:
    picture = section.picture(pictures)
    shown = f"![{section.title}]({picture.relative_to(document.parent)})\n\n" if picture.is_file() else ""
    return f"{shown}{measured}"


def _document(bodies: dict[str, str]) -> str:
    parts = [HEAD]
    for name, section in SECTIONS.items():
        if name in bodies:
            parts.append(f"## {section.title}\n\n{section.intent}\n\n{marked(name, bodies[name])}\n")
    return "\n".join(parts)


def _bodies(document: str) -> dict[str, str]:
    """Bodies of the sections that the document has."""
    bodies = {name: between(document, name) for name in SECTIONS}
    return {name: body for name, body in bodies.items() if body is not None}


if __name__ == "__main__":
    main()
