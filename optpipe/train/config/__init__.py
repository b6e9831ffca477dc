"""What to train and how: everything that a run depends on, from TOML, flags or Python. Imports no torch."""

from optpipe.train.config.checkpoints import CheckpointConfig
from optpipe.train.config.model import ModelConfig
from optpipe.train.config.online import OnlineConfig
from optpipe.train.config.optimizer import OptimizerConfig
from optpipe.train.config.output import OutputConfig
from optpipe.train.config.setting import Group, flat, setting
from optpipe.train.config.training import DeviceChoice, TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DeviceChoice",
    "Group",
    "ModelConfig",
    "OnlineConfig",
    "OptimizerConfig",
    "OutputConfig",
    "TrainingConfig",
    "flat",
    "setting",
]
