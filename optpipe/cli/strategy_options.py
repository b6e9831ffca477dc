"""Options of commands that take a model, GPUs and a strategy: degrees of parallelism, precision, recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from optpipe.cluster.strategy import Strategy

MOST = 2**20
"""Most GPUs, and the largest degree."""

ModelName = Annotated[
    str,
    typer.Argument(help="A name of `optpipe models`, a config.json or the folder of one.", metavar="MODEL"),
]
Gpus = Annotated[int, typer.Option(min=1, max=MOST, help="GPUs of the job.")]
MachineName = Annotated[str, typer.Option("--machine", help="A name of `optpipe machines`, or a file.")]
Sequence = Annotated[int, typer.Option(min=1, max=2**24, help="Tokens of a sequence.")]
GlobalBatch = Annotated[int, typer.Option(min=1, max=10**6, help="Sequences in a training step of the whole job.")]
Degree = Annotated[int, typer.Option(min=1, max=MOST)]
ExpertImbalance = Annotated[
    float | None,
    typer.Option(
        min=1, max=1000, help="Tokens of the busiest rank's experts over the mean; default: 1.", metavar="1.25"
    ),
]
SoftwareName = Annotated[
    str,
    typer.Option(help="Trainer whose kernels are assumed, as `optpipe machines MACHINE` lists it; default: any."),
]


class PrecisionChoice(StrEnum):
    """Type of the operands of products."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


class ShardingChoice(StrEnum):
    """States that replicas divide among themselves."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    FSDP = "fsdp"


class RecomputeChoice(StrEnum):
    """Parts of a layer that are computed again in B."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True)
class Degrees:
    """Degrees as a user gives them; `data` is what is left of the GPUs where it is not given."""

    gpus: int
    tensor: int
    context: int
    expert: int
    expert_tensor: int
    pipeline: int
    virtual: int
    data: int | None

    def strategy(self, **others: object) -> Strategy:
        """The strategy of these degrees, which may be illegal."""
        from optpipe.cluster.strategy import Strategy

        shared = self.tensor * self.context * self.pipeline
        return Strategy(
            tensor=self.tensor,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            pipeline=self.pipeline,
            virtual=self.virtual,
            data=self.data or max(1, self.gpus // shared),
            **others,  # type: ignore[arg-type]
        )
