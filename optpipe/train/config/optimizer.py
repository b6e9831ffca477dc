"""`[optimizer]`: how weights follow from gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from optpipe.errors import Issue
from optpipe.train.config.setting import Group, setting


@dataclass(frozen=True)
class OptimizerConfig(Group):
    """The optimizer of every stage, its learning rate over the steps, and what is done about large gradients."""

    table: ClassVar[str] = "optimizer"

    name: Literal["adamw", "sgd"] = setting("adamw", "which rule", flag="optimizer")
    learning_rate: float = setting(1e-3, "of the optimizer, after warm-up", above=0)
    weight_decay: float = setting(0.01, "how strongly weights are drawn towards zero", least=0, most=1)
    beta1: float = setting(0.9, "of AdamW's first moment; of SGD its momentum", least=0, most=0.999999)
    beta2: float = setting(0.999, "of AdamW's second moment", least=0, most=0.999999)
    warm_up_steps: int = setting(0, "steps in which the learning rate rises from 0", least=0, most=10**9)
    decay: Literal["none", "cosine"] = setting("none", "of the learning rate, after warm-up, to 0 after the last step")
    clip_norm: float | None = setting(None, "the largest norm of all gradients together; default: not clipped", above=0)
    optimistic: bool = setting(
        True, "under torchrun each stage steps at once, and back where the norm of all then says so, instead of waiting"
    )
    on_not_finite: Literal["stop", "skip"] = setting(
        "stop", "what to do at a loss or gradient that is no number: stop, or skip the update"
    )

    def conflicts(self) -> Iterator[Issue]:
        """SGD has one moment."""
        if self.name == "sgd" and self.beta2 != 0.999:
            yield Issue("beta2", "meaningless", f"is {self.beta2}, but sgd has no second moment. Maybe leave it out.")
