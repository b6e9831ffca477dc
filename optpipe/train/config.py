"""What to train and how: everything that a run depends on besides the schedule's orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from optpipe.errors import TrainingError
from optpipe.schedule import Schedule
from optpipe.train.gpt import SIZES, GPTShape
from optpipe.train.hardware import DEVICE_CHOICES, DeviceChoice

DTYPES = {"float32": torch.float32, "float64": torch.float64}
AUTOCASTS = {None: None, "bfloat16": torch.bfloat16}
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class TrainingConfig:
    """One training run. Raises TrainingError naming the field, the value and the limit."""

    schedule: Schedule
    """who computes what in which order; its sizes and times need not be this model's"""
    model: str = "small"
    """the size of the GPT, one of `optpipe.train.gpt.SIZES`"""
    layers: int | None = None
    """blocks of the GPT, at least one a stage; None: one a stage"""
    steps: int = 20
    """optimizer steps"""
    seed: int = 0
    """of the weights, of the order of the data and of what layers draw"""
    dtype: Literal["float32", "float64"] = "float32"
    """of weights and of what is not cast"""
    autocast: Literal["bfloat16"] | None = None
    """what matrix products are computed in, under torch.autocast; None: in `dtype`, which else must be float32"""
    device: DeviceChoice = "auto"
    """what to compute on; "auto": on CUDA where there is any"""
    learning_rate: float = 1e-3
    sequence: int | None = None
    """bytes of text in a sequence; None: the model's longest"""
    microbatch_size: int = 4
    """sequences in a microbatch"""
    check: bool = False
    """before training, compare gradients with the plain step and memory with the plan"""
    trace_step: int | None = None
    """before this step, record what a step does, on the same batch; None: nothing is recorded"""
    data_parallel: int = 1
    """replicas of the pipeline, each with its own part of the batch; more than one needs torchrun"""
    tied: bool = False
    """whether the output head uses the embedding's weights, on whichever devices the two are"""
    timeout_seconds: float = 300.0
    """under torchrun: how long to wait for another process"""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_range("steps", self.steps, 1, 10**9)
        if self.trace_step is not None:
            self._check_range("trace_step", self.trace_step, 0, self.steps - 1)
        self._check_range("seed", self.seed, 0, MAX_SEED)
        self._check_range("microbatch_size", self.microbatch_size, 1, 4096)
        self._check_range("data_parallel", self.data_parallel, 1, 4096)
        self._check_range("sequence", self.shape.sequence, 1, SIZES[self.model].sequence)
        self._check_positive("learning_rate", self.learning_rate)
        self._check_positive("timeout_seconds", self.timeout_seconds)
        if self.autocast and self.dtype != "float32":
            raise TrainingError(
                f"dtype is {self.dtype!r} with autocast to {self.autocast}, but autocast leaves all but float32 alone. "
                "Maybe leave one of them out."
            )
        stages = len(self.schedule.problem.stages)
        if self.shape.layers < stages:
            raise TrainingError(
                f"layers is {self.layers} but the schedule has {stages} stages, and each needs a layer. "
                f"Maybe leave layers out, or solve for at most {self.layers} stages."
            )

    @property
    def shape(self) -> GPTShape:
        """The model that is trained."""
        layers = len(self.schedule.problem.stages) if self.layers is None else self.layers
        size = SIZES[self.model]
        return GPTShape(size.width, size.heads, size.sequence if self.sequence is None else self.sequence, layers)

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients come together from several processes or stages."""
        return self.data_parallel > 1 or self.tied

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_autocast(self) -> torch.dtype | None:
        return AUTOCASTS[self.autocast]

    def _check_choices(self) -> None:
        for field, value, known in (
            ("model", self.model, SIZES),
            ("dtype", self.dtype, DTYPES),
            ("autocast", self.autocast, AUTOCASTS),
            ("device", self.device, DEVICE_CHOICES),
        ):
            if value not in known:
                raise TrainingError(f"{field} is {value!r} but must be one of {', '.join(map(str, known))}.")

    @staticmethod
    def _check_range(field: str, value: int, least: int, most: int) -> None:
        if not least <= value <= most:
            raise TrainingError(f"{field} is {value} but must be from {least} to {most}.")

    @staticmethod
    def _check_positive(field: str, value: float) -> None:
        if not 0 < value < float("inf"):
            raise TrainingError(f"{field} is {value} but must be positive and finite.")
