"""The benchmark of the service: what it reads from wrk, and what it says where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import service_load
from benchmarks.service_load import Load

OUTPUT = """Running 2s test @ http://127.0.0.1:8000/v1/schedules
  1 threads and 4 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.23ms    0.50ms   1.02s    90.00%
    Req/Sec     3.20k   100.00     3.40k    70.00%
  Latency Distribution
     50%  950.00us
     75%    1.40ms
     90%    2.50ms
     99%    1.02s
  6400 requests in 2.00s, 1.00MB read
{refused}Requests/sec:   3200.50
Transfer/sec:    512.00KB
"""


@pytest.mark.parametrize(("line", "refused"), [("", 0), ("  Non-2xx or 3xx responses: 3\n", 3)])
def test_figures_are_read_in_the_units_of_wrk(line: str, refused: int) -> None:
    load = Load.read("a call", OUTPUT.format(refused=line))
    assert load == Load("a call", 3200.5, pytest.approx(0.95), pytest.approx(1020), refused)


def test_without_wrk_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="Maybe 'apt-get install wrk'"):
        service_load.measure("quick", tmp_path)
