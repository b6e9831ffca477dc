"""Runs of models of transformers, each by a name such as "gpt2, V"."""

from __future__ import annotations

from instances.schedules import one_f_one_b, v_wave
from optpipe.train import CheckpointConfig, ModelConfig, OptimizerConfig, TrainingConfig
from tests.optpipe.compile.vocabulary import vocabulary_schedule
from tests.optpipe.models import tiny_models
from tests.optpipe.models.tiny_models import LEARNING_RATE, STEPS, WEIGHT_DECAY, saved
from tests.optpipe.models.tiny_models import MICROBATCHES as M

SCHEDULES = {
    "linear": lambda: one_f_one_b(4, M),
    "V": lambda: v_wave(2, M),
    "in 2": lambda: one_f_one_b(2, M),
    "replicas": lambda: one_f_one_b(2, M // 2),
    "loaded": lambda: one_f_one_b(4, M),
    "loaded replicas": lambda: one_f_one_b(2, M // 2),
    "accumulated": lambda: one_f_one_b(4, M // 2),
    "accumulated V": lambda: v_wave(2, M // 4),
    "accumulated replicas": lambda: one_f_one_b(2, M // 4),
    "rows on 2": lambda: vocabulary_schedule(2, M, 2),
    "rows on 3": lambda: vocabulary_schedule(3, M, 1),
}

ACCUMULATE = {"accumulated": 2, "accumulated V": 4, "accumulated replicas": 2}


def config_of(case: str, folder: str | None = None) -> TrainingConfig:
    """The run of a case, with the model in `folder` (None: one of this process)."""
    name, way, *more = case.split(", ")
    read = "loader" if "loaded" in way else "batch"
    return TrainingConfig(
        SCHEDULES[way](),
        ModelConfig(
            folder or saved(name), **{"loader" if "loaded" in way else "data": f"{tiny_models.__name__}:{read}"}
        ),
        OptimizerConfig(learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        CheckpointConfig(),
        steps=STEPS,
        data_parallel=2 if "replicas" in way else 1,
        accumulate=ACCUMULATE.get(way, 1),
        check="checked" in more,
        timeout_seconds=120,
    )
