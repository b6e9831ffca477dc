"""Runs as a rank: trains models of transformers. Usage: worker.py FOLDER MODELS CASE...

`MODELS` is a JSON object of folders by name. Each rank writes what it found to `FOLDER/rankN.json`, by case.

Or: worker.py FOLDER recut MODEL CHECKPOINTS WAY CUT STEPS, a run that goes on from the checkpoints there.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import optpipe.train.loop as loop
from optpipe.train import CheckpointConfig, train
from optpipe.train.model import Model
from tests.gloo import gloo_group
from tests.optpipe.models import tiny_models
from tests.optpipe.models.cases import config_of

RANK = int(os.environ["RANK"])
ON_META: list[int] = []


class Watched(Model):
    """Counts the parameters of stages that have no memory here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        own = {s for s, d in enumerate(self.program.placement) if d in self.devices}
        stages = self.task.build_stages(own)
        ON_META.append(sum(p.is_meta for s, stage in enumerate(stages) if s not in own for p in stage.parameters()))


def main(folder: Path, models: dict[str, str], cases: list[str]) -> None:
    with gloo_group():
        loop.Model = Watched  # type: ignore[misc]
        found = {}
        for case in cases:
            tiny_models.READ.clear()
            result = train(config_of(case, models[case.split(", ")[0]]))
            found[case] = {"losses": result.losses, "parameters": result.parameters, "on meta": ON_META.pop()}
            found[case]["read"] = tiny_models.READ.copy()
        (folder / f"rank{RANK}.json").write_text(json.dumps(found))


def recut(folder: Path, model: str, checkpoints: str, way: str, cut: str, steps: str) -> None:
    config = config_of(f"any, {way}", model)
    checkpointed = replace(
        config,
        model=replace(config.model, cut=cut),
        checkpoints=CheckpointConfig(Path(checkpoints), asynchronous=True, every_steps=2, keep=1),
        steps=int(steps),
    )
    with gloo_group():
        result = train(checkpointed)
    found = {"losses": result.losses, "first_step": result.first_step}
    (folder / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__" and sys.argv[2] == "recut":
    recut(Path(sys.argv[1]), *sys.argv[3:])
elif __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
