"""Both exact solvers work in one process, whichever is imported first (docs/adr/0001)."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations

import pytest


@pytest.mark.parametrize("modules", list(permutations(("highspy", "ortools.sat.python.cp_model"))))
def test_either_import_order(modules: tuple[str, ...]) -> None:
    code = "; ".join(f"import {module}" for module in modules) + "; highspy.Highs()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
