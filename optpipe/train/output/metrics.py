"""One JSON object a step and line, there as soon as the step is done."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from optpipe.train.result import StepReport


class Metrics:
    """Writes the steps of a run to a file. A resumed run goes on after the step before its first; others begin anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def __call__(self, report: StepReport) -> None:
        """Write a step."""
        if self._file is None:
            self._file = _opened_before(self._path, report.step)
        self._file.write(json.dumps(record(report), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing comes any more."""
        if self._file is not None:
            self._file.close()


def record(report: StepReport) -> dict[str, Any]:
    """A step as JSON values; numbers that are not finite are null."""
    values = asdict(report) | {"tokens_per_second": report.tokens_per_second}
    del values["steps"]
    found: dict[str, Any] = finite(values)
    return found


def finite(value: Any) -> Any:
    """The same value, with None in place of each number in it that is not finite: JSON has none."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _opened_before(path: Path, step: int) -> IO[bytes]:
    """The file with what it says of earlier steps, cut off there: a run that was ended may have gone further."""
    kept = 0
    opened = path.open("a+b")
    opened.seek(0)
    for line in opened:
        found = _step_of(line)
        if found is None or found >= step:
            break
        kept += len(line)
    opened.truncate(kept)
    return opened


def _step_of(line: bytes) -> int | None:
    """The step of a whole line of ours."""
    try:
        found = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None
