"""The task of a configuration: the small GPT, a model of transformers, or stages of the user's own."""

from __future__ import annotations

from dataclasses import replace

from optpipe.partition import cut_in_name
from optpipe.train.config import TrainingConfig
from optpipe.train.launch import Launch
from optpipe.train.tasks.base import Task
from optpipe.train.tasks.custom import OwnStages
from optpipe.train.tasks.gpt import GPTTask, gpt_prefix
from optpipe.train.tasks.hugging_face import HuggingFaceTask, folder_name
from optpipe.train.tasks.loader import LoadedBatches

ALONE = Launch(1)


def build_task(config: TrainingConfig, stages: int, microbatches: int, launch: Launch = ALONE) -> Task:
    """The task of a run whose schedule has so many stages and, in each run of each replica, microbatches.

    Without a cut in the configuration a schedule that is planned for the model gives it. Raises InputError where a
    user's own stages or model cannot be loaded or do not fit.
    """
    model, problem = config.model, config.schedule.problem.name if config.schedule else ""
    planned = cut_in_name(problem)
    if model.cut is None and planned is not None and planned.count(",") + 1 == stages:
        if model.hugging_face:
            own = f" of {folder_name(model.name)}," in problem
        elif model.own:
            own = problem.startswith(f"{model.name},")
        else:
            own = problem.startswith(f"{gpt_prefix(model.name, model.shape(stages).layers)},")
        if own:
            config = replace(config, model=replace(model, cut=planned))
    all_microbatches = microbatches * config.data_parallel * config.accumulate
    loader = LoadedBatches(config, all_microbatches, launch) if model.loader else None
    if model.own:
        return OwnStages(config, stages, all_microbatches, loader)
    if model.hugging_face:
        return HuggingFaceTask(config, stages, all_microbatches, loader, launch)
    return GPTTask(config, stages, all_microbatches)
