"""`optpipe machines`: GPUs by name, or one of them with its facts, their sources and what was measured on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import AsJson, print_json, stdout, table
from optpipe.units import bytes_text, share_text, time_text

if TYPE_CHECKING:
    from optpipe.cluster.machine import Machine


def command(
    machine: Annotated[
        str | None, typer.Argument(help="A name, or a file (optpipe.machine/1): this one alone.", metavar="MACHINE")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List the machines that are known by name, or the facts of one and the efficiencies of training on it.

    Facts are those of data sheets. Efficiencies were fitted to published steps by `optpipe calibrate`.
    """
    from optpipe.cluster.machine import Machine, named_machines

    found = list(named_machines().values()) if machine is None else [Machine.load(machine)]
    if as_json:
        print_json({"machines": [one.model_dump() for one in found]})
        return 0
    if machine is None:
        _print_all(found)
    else:
        _print(found[0])
    return 0


def _print_all(found: list[Machine]) -> None:
    rows = table(
        "machine", "GPUs of a node", "GiB", "TFLOP/s", "HBM TB/s", "link GB/s", "network GB/s", "steps", "error"
    )
    for one in found:
        facts, own = one.facts, one.efficiencies_of("bf16")
        network = facts.network_bytes_per_s
        rows.add_row(
            one.name,
            str(facts.gpus_per_node),
            f"{facts.memory_bytes / 2**30:.0f}",
            f"{facts.operations_bf16_per_s / 1e12:,.0f}",
            f"{facts.memory_bytes_per_s / 1e12:.2f}",
            f"{facts.link_bytes_per_s / 1e9:.0f}",
            "-" if network is None else f"{network / 1e9:.0f}",
            str(sum(entry.rows for entry in one.efficiencies if not entry.software)) or "0",
            "-" if own.median_error is None else share_text(own.median_error),
        )
    console = stdout()
    console.print(rows)
    console.print(
        "TFLOP/s: dense, 16 bits. error: median over the measured steps in 16 bits that it was calibrated on."
    )


def _fact_text(name: str, value: float) -> str:
    """A fact in the unit that people name it in."""
    if name.startswith("operations"):
        return f"{value / 1e12:,.1f} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.10g} GB/s"
    if name.endswith("_us"):
        return time_text(value)
    return bytes_text(value) if name.endswith("_bytes") else f"{value:,}"


def _print(machine: Machine) -> None:
    console = stdout()
    facts = table("fact", "value", "source")
    facts.columns[-1].justify = "left"
    for name, value in machine.facts.model_dump(exclude_none=True).items():
        facts.add_row(name, _fact_text(name, value), machine.sources.get(name, "default"))
    console.print(facts)
    if not machine.efficiencies:
        console.print(f"Nothing was measured on {machine.name}: predictions take efficiencies of other machines.")
        return
    from optpipe.cluster.machine import SHARES

    rows = table("software", "precision", *SHARES, "launch", "step", "steps", "error", "unseen models")
    for one in machine.efficiencies:
        unseen = "-" if one.unseen_model_error is None else share_text(one.unseen_model_error)
        rows.add_row(
            one.software or "any",
            one.precision,
            *(f"{getattr(one, name):.2f}" for name in SHARES),
            time_text(one.launch_us),
            time_text(one.step_us),
            str(one.rows),
            "-" if one.median_error is None else share_text(one.median_error),
            unseen,
        )
    console.print(rows)
    console.print("Shares of the facts' rates; above 1 is what hides behind compute. errors: medians over these steps.")
