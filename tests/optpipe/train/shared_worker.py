"""Runs under torchrun: trains models of which stages share parameters. Usage: shared_worker.py FOLDER CASE...

Each rank writes what it found to `FOLDER/rankN.json`, by case (see `shared_cases`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import optpipe.train.loop as loop
import optpipe.train.resolve.callback as online_room
from optpipe.train import StepReport, train
from optpipe.train.model import Model, _digest
from optpipe.train.resolve.callback import Choice
from tests.gloo import gloo_group
from tests.optpipe.train.resolve.solvers import Scripted
from tests.optpipe.train.shared_cases import config_of

RANK = int(os.environ["RANK"])
MODELS: list[Model] = []


class Recorded(Model):
    """Is there to be looked at when the run is over."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        MODELS.append(self)


def main(folder: Path, cases: list[str]) -> None:
    with gloo_group():
        loop.Model = Recorded  # type: ignore[misc]
        online_room.choose = lambda *_: Choice(2.0, 1.0, 0.0)  # times of a busy machine may say anything
        (folder / f"rank{RANK}.json").write_text(json.dumps({case: found_in(case, folder) for case in cases}))


def found_in(case: str, folder: Path) -> dict[str, Any]:
    config, reports = config_of(case, folder), list[StepReport]()
    result = train(config, reports.append, Scripted(["zb-h1"]) if RANK == 0 and config.online.on else None)
    model = MODELS.pop()
    held = [(shared, shared.places_in(model.stages)) for shared in model.shared]
    parameters = {id(p) for stage in model.stages.values() for p in stage.module.parameters() if p.requires_grad}
    return {
        "losses": result.losses,
        "parameters": result.parameters,
        "first_step": result.first_step,
        "failures": result.check.failures if result.check else None,
        "rolled back": sum(report.rolled_back for report in reports),
        "events": [event.kind for event in result.events],
        "values": {str(s): _digest(model.stages[at[0][0]].module.get_parameter(at[0][1])) for s, at in held if at},
        "states": sum(len(optimizer.state) for optimizer in model.optimizers.values()) - len(parameters),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
