"""Every switch of the mixed-integer program is measured."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.milp_accelerations import SWITCHES, variants
from solver.exact.milp.variables import DEFAULT


def test_each_switch_is_turned_alone_and_all_are_turned_off() -> None:
    switches = {name for name, value in asdict(DEFAULT).items() if isinstance(value, bool)}
    assert set(SWITCHES) == switches
    default, *alone, none = [asdict(options) for _, options in variants()]
    assert default == asdict(DEFAULT)
    changed = [{name for name in default if default[name] != options[name]} for options in alone]
    assert sorted(map(sorted, changed)) == [[name] for name in sorted(switches)]
    assert not any(none[name] for name in switches)
