"""Trains a model as a schedule says: `train(TrainingConfig(schedule), report)`.

What needs torch is imported when it is first asked for: the configuration alone does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from optpipe.train.config import (
    CheckpointConfig,
    ModelConfig,
    OnlineConfig,
    OptimizerConfig,
    OutputConfig,
    TrainingConfig,
)

if TYPE_CHECKING:
    from optpipe.train.launch import leads
    from optpipe.train.loop import train
    from optpipe.train.result import (
        CheckResult,
        DeviceMemory,
        RunFacts,
        StepReport,
        TrainingCallback,
        TrainingResult,
    )

__all__ = [
    "CheckResult",
    "CheckpointConfig",
    "DeviceMemory",
    "ModelConfig",
    "OnlineConfig",
    "OptimizerConfig",
    "OutputConfig",
    "RunFacts",
    "StepReport",
    "TrainingCallback",
    "TrainingConfig",
    "TrainingResult",
    "leads",
    "train",
]

_HOMES = {"leads": "launch", "train": "loop"}

if not TYPE_CHECKING:  # the type checker shall know every name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'result')}"), name)
