"""The update at the end of a step, and its validation in the next one (Zero Bubble, section 4, post-validation).

A device updates its weights as soon as its own gradients are ready, while others still work. The sums of the step are
on their way meanwhile and tell in the next step, before its first backward, whether that was right: whether gradients
had to be clipped, and whether all is finite. If not, weights and optimizers go back to what they were, bit for bit,
and get the right update or none. All processes see the same sums, so all of them do the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optpipe.errors import RunFailedError
from optpipe.runtime.shared_parameters import SharedParameter
from optpipe.runtime.stage import Stage
from optpipe.train.config import OptimizerConfig
from optpipe.train.launch import Launch, PendingSum
from optpipe.train.updates.gradient_norm import clip_factor, sum_of_squares
from optpipe.train.updates.learning_rate import learning_rate
from optpipe.train.updates.optimizers import stage_optimizer, step_with
from optpipe.train.updates.outcome import StepOutcome
from optpipe.train.updates.patience import Patience
from optpipe.train.updates.snapshot import Snapshot
from optpipe.train.updates.sums import StepSums, SumsLayout


@dataclass(frozen=True)
class _Pending:
    """A step whose sums are on their way. `optimistic`: others go on as if its update were right."""

    step: int
    sums: PendingSum
    optimistic: bool
    seconds: float = 0.0


class Updates:
    """Of this process's stages.

    `steps` is the length of the run, for the learning rate. Of a parameter in `shared`, the first place in this process
    updates it, and the first of all counts it in its stage's norm. With `optimistic` an update does not wait for other
    processes, unless that was wrong too often of late (`Patience`).

    Raises RunFailedError where a loss or gradient is not finite, unless such steps are to be skipped.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        steps: int,
        stages: Mapping[int, Stage],
        launch: Launch,
        layout: SumsLayout,
        *,
        shared: Sequence[SharedParameter],
        optimistic: bool,
    ) -> None:
        self._config, self._steps, self._launch, self._layout = config, steps, launch, layout
        updated_elsewhere = {place for parameter in shared for place in parameter.places_in(stages)[1:]}
        counted_elsewhere = {place for parameter in shared for place in parameter.places[1:]}
        self._parameters = {
            s: [
                (p, (s, name) not in counted_elsewhere)
                for name, p in stage.module.named_parameters()
                if (s, name) not in updated_elsewhere
            ]
            for s, stage in stages.items()
        }
        made = {s: stage_optimizer(config, (p for p, _ in own)) for s, own in self._parameters.items()}
        self.optimizers = {s: optimizer for s, optimizer in made.items() if optimizer is not None}
        self._devices = {s: stage.device for s, stage in stages.items()}
        self._optimistic, self._patience = optimistic, Patience()
        self.snapshot = Snapshot([stage.module for stage in stages.values()], self.optimizers.values())
        self._pending: _Pending | None = None
        self._outcomes: list[StepOutcome] = []
        self._wishes: list[bool] = []

    @property
    def pending(self) -> bool:
        """Whether an update waits for its validation."""
        return self._pending is not None

    @property
    def leaves_open(self) -> bool:
        """Whether the next update will not wait."""
        return self._optimistic and not self._patience.waits

    def update(self, step: int, losses: Tensor, wishes: Sequence[bool]) -> None:
        """End a step whose gradients are ready: validated later if it does not wait, or at once."""
        assert self._pending is None, "an update is settled before the next one"
        squares = {s: self._square(s) for s in self._parameters}
        sums = self._launch.start_sum(self._layout.pack(losses, squares, wishes))
        self._pending = _Pending(step, sums, self.leaves_open)
        if self._pending.optimistic:
            if self._may_undo:
                self.snapshot.take()
            if not self._surely_wrong(squares):
                self._apply(step)
        else:
            self.validate()

    def took(self, seconds: float) -> None:
        """How long the last step took."""
        if self._pending is not None:
            self._pending = replace(self._pending, seconds=seconds)
        else:
            self._outcomes[-1] = replace(self._outcomes[-1], seconds=seconds)

    def validate(self) -> bool:
        """Wait for the pending step's sums; whether weights are what they were before. Else they are right now."""
        pending, self._pending = self._pending, None
        assert pending is not None, "nothing to validate"
        sums = self._layout.unpack(pending.sums.wait())
        factor = clip_factor(sums.gradient_norm, self._config.clip_norm) if sums.finite else 0.0
        wrong = factor != 1.0
        self._patience.add(wrong=wrong)
        if wrong and pending.optimistic:
            self.snapshot.restore()
        if not sums.finite and self._config.on_not_finite == "stop":
            raise RunFailedError(self._not_finite(pending.step, sums))
        if sums.finite and (wrong or not pending.optimistic):
            self._clip(factor)
            self._apply(pending.step)
        self._record(pending, sums, factor)
        return not (wrong and pending.optimistic)

    def take_outcomes(self) -> list[StepOutcome]:
        """Those that have become known since the last call."""
        known, self._outcomes = self._outcomes, []
        return known

    def take_wishes(self) -> list[bool]:
        """Which wishes some process has had since the last call."""
        known, self._wishes = self._wishes, []
        return known

    @property
    def _may_undo(self) -> bool:
        """Whether anything but the end of the run may follow from the sums."""
        return self._config.clip_norm is not None or self._config.on_not_finite == "skip"

    def _surely_wrong(self, squares: Mapping[int, Tensor]) -> bool:
        """Whether this process's gradients alone say that the step will not stay as it is.

        They are no less a part of the sum: it is added up in the same order, and rounding keeps what is larger.
        So weights never become infinite by an update that would not have been done.
        """
        own = torch.stack([squares[s] for s in sorted(squares)]).tolist() if squares else []
        norm = math.sqrt(sum(own))
        return not math.isfinite(norm) or clip_factor(norm, self._config.clip_norm) != 1.0

    def _square(self, stage: int) -> Tensor:
        counted = [p.grad for p, counts in self._parameters[stage] if counts and p.grad is not None]
        return sum_of_squares(counted, self._devices[stage])

    def _clip(self, factor: float) -> None:
        if factor == 1.0:
            return
        gradients = [p.grad for own in self._parameters.values() for p, _ in own if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _apply(self, step: int) -> None:
        rate = learning_rate(self._config, step, self._steps)
        for optimizer in self.optimizers.values():
            step_with(optimizer, rate)

    def _record(self, pending: _Pending, sums: StepSums, factor: float) -> None:
        self._outcomes.append(
            StepOutcome(
                pending.step,
                sums.loss,
                sums.gradient_norm,
                learning_rate(self._config, pending.step, self._steps),
                clipped=sums.finite and factor != 1.0,
                skipped=not sums.finite,
                rolled_back=pending.optimistic and factor != 1.0,
                seconds=pending.seconds,
            )
        )
        known = self._wishes or [False] * len(sums.wishes)
        self._wishes = [before or wish > 0 for before, wish in zip(known, sums.wishes, strict=True)]

    def _not_finite(self, step: int, sums: StepSums) -> str:
        what = f"the loss is {sums.loss}"
        if math.isfinite(sums.loss):
            what = f"the gradient norm is {sums.gradient_norm}"
        return f"{what} at step {step} with learning_rate {self._config.learning_rate}. Maybe lower it."
