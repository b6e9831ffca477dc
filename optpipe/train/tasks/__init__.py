"""The task of a configuration: the small GPT, or stages of the user's own."""

from __future__ import annotations

from optpipe.train.config import TrainingConfig
from optpipe.train.tasks.base import Task
from optpipe.train.tasks.custom import OwnStages
from optpipe.train.tasks.gpt import GPTTask


def build_task(config: TrainingConfig, stages: int, microbatches: int) -> Task:
    """The task of a run whose schedule has so many stages and, in each of its replicas, microbatches.

    Raises InputError where a user's own stages cannot be loaded or do not fit.
    """
    kind = OwnStages if config.model.own else GPTTask
    return kind(config, stages, microbatches * config.data_parallel)
