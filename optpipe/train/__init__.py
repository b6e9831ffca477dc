"""Trains a small GPT as a schedule says: `train(TrainingConfig(schedule=...), report)`."""

from optpipe.train.config import TrainingConfig
from optpipe.train.launch import leads
from optpipe.train.loop import train
from optpipe.train.result import CheckResult, DeviceMemory, StepReport, TrainingResult

__all__ = ["CheckResult", "DeviceMemory", "StepReport", "TrainingConfig", "TrainingResult", "leads", "train"]
