"""The task of a configuration: the small GPT, a model of transformers, or stages of the user's own."""

from __future__ import annotations

from optpipe.train.config import TrainingConfig
from optpipe.train.tasks.base import Task
from optpipe.train.tasks.custom import OwnStages
from optpipe.train.tasks.gpt import GPTTask
from optpipe.train.tasks.hugging_face import HuggingFaceTask


def build_task(config: TrainingConfig, stages: int, microbatches: int) -> Task:
    """The task of a run whose schedule has so many stages and, in each run of each replica, microbatches.

    Raises InputError where a user's own stages or model cannot be loaded or do not fit.
    """
    kind = OwnStages if config.model.own else HuggingFaceTask if config.model.hugging_face else GPTTask
    return kind(config, stages, microbatches * config.data_parallel * config.accumulate)
