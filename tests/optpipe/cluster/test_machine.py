"""Machines: named ones with a source for each fact, files of one's own, and errors by field."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe.cluster.machine import DEFAULT_EFFICIENCIES, Machine, named_machines
from optpipe.errors import InputError

NAMES = ("a100-40", "a100-80", "a100-pcie", "h100", "h200", "b200", "gb200", "gb300", "mi300x", "mi355x", "rtx4090")


def test_every_fact_of_a_named_machine_has_a_source() -> None:
    assert set(NAMES) <= set(named_machines())
    for machine in named_machines().values():
        given = set(machine.facts.model_dump(exclude_unset=True))
        assert given - {"host_shared_by"} == set(machine.sources), machine.name


def test_a_machine_reads_what_it_writes(tmp_path: Path) -> None:
    for machine in named_machines().values():
        path = tmp_path / f"{machine.name}.toml"
        path.write_text(machine.to_toml())
        assert Machine.load(path) == machine


def test_names_of_tables_are_names(tmp_path: Path) -> None:
    assert Machine.load("H100-SXM") == Machine.load("h100") == named_machines()["h100"]
    with pytest.raises(InputError, match=r"--machine is 'h10', which is no known machine and no file. Maybe 'h100'"):
        Machine.load("h10")
    bad = tmp_path / "bad.toml"
    bad.write_text('format = "optpipe.machine/1"\nname = "x"\n[facts]\ngpus_per_node = 0\n')
    with pytest.raises(InputError, match=r"facts\.gpus_per_node"):
        Machine.load(bad)


def test_the_nearest_efficiencies_are_used() -> None:
    h100 = named_machines()["h100"]
    assert h100.efficiencies_of("bf16", "nvidia-dgxc/unheard of").software == "nvidia-dgxc"
    assert h100.efficiencies_of("bf16", "unheard of").software == ""
    assert h100.efficiencies_of("fp4").precision == "bf16"
    assert named_machines()["rtx4090"].efficiencies_of("bf16") == DEFAULT_EFFICIENCIES
