"""Optimizer step of all stages: learning rate, gradient norm, clipping, post-validation (Zero Bubble, section 4).

A device updates its weights as soon as its own gradients are ready, while others still work. The sums of the step are
on their way meanwhile and tell in the next step, before its first backward, whether that was right: whether gradients
had to be clipped, and whether all is finite. If not, weights and optimizers go back to what they were, bit for bit,
and get the right update or none. All processes see the same sums, so all of them do the same.

Each stage's sum of squares is computed in float64, parameter by parameter in their order, and stages are added up in
the order of their numbers. So the norm has the same bits wherever the stages are, and whenever it is needed.

Every number has a place of its own, to which all other processes add 0: the sum has the same bits in any number of
processes. What is not finite stays so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from optpipe.errors import RunFailedError
from optpipe.runtime.shared_parameters import SharedParameter
from optpipe.runtime.stage import Stage
from optpipe.train.config import OptimizerConfig
from optpipe.train.launch import Launch, PendingSum
from optpipe.train.rollback import RollbackBackoff, Snapshot


def stage_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """An optimizer of those parameters of a stage that are trainable; None where there are none.

    Of SGD, beta1 is the momentum.
    """
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters:
        return None
    rate, decay = config.learning_rate, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=config.beta1, weight_decay=decay)
    return torch.optim.AdamW(parameters, lr=rate, betas=(config.beta1, config.beta2), weight_decay=decay)


def step_with(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """One step of the optimizer at this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """That of `step` in a run of `steps`.

    It rises linearly in the warm-up, whose first step already moves the weights, then stays or falls as half a cosine,
    which would be 0 at the step after the last.
    """
    warm_up = config.warm_up_steps
    if step < warm_up:
        return config.learning_rate * (step + 1) / (warm_up + 1)
    if config.decay == "none":
        return config.learning_rate
    share = (step - warm_up) / max(1, steps - warm_up)
    return config.learning_rate * (1 + math.cos(math.pi * min(1.0, share))) / 2


@dataclass(frozen=True)
class StepOutcome:
    """A step whose update is settled; the same in every process, but for `seconds`.

    `loss` is the mean over the batch before the update; `gradient_norm` the 2-norm of all gradients of the model
    together, before clipping. `clipped`: they were scaled down to the largest norm allowed. `skipped`: loss or norm is
    not finite, and no weight was touched. `rolled_back`: an optimistic update had to be undone for one of these.
    `seconds`: from the step's begin to its end in this process, which with post-validation holds the wait for the step
    before.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    clipped: bool
    skipped: bool
    rolled_back: bool
    seconds: float


EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as torch.nn.utils.clip_grad_norm_ does."""


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Of all entries, a float64 scalar on the device of the gradients; 0 without any."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return torch.stack(norms).square().sum()


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """What to multiply gradients by so that their norm is at most `clip_norm`; 1.0 where it is already."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + EPSILON))


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
    processes, unless that was wrong too often of late (`RollbackBackoff`).

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
        self._optimistic, self._patience = optimistic, RollbackBackoff()
        self.snapshot = Snapshot([stage.module for stage in stages.values()], self.optimizers.values())
        self._pending: _Pending | None = None
        self._outcomes: list[StepOutcome] = []
        self._requests: list[bool] = []

    @property
    def pending(self) -> bool:
        """Whether an update waits for its validation."""
        return self._pending is not None

    @property
    def leaves_open(self) -> bool:
        """Whether the next update will not wait."""
        return self._optimistic and not self._patience.waits

    def update(self, step: int, losses: Tensor, requests: Sequence[bool]) -> None:
        """End a step whose gradients are ready: validated later if it does not wait, or at once."""
        assert self._pending is None, "an update is settled before the next one"
        squares = {s: self._square(s) for s in self._parameters}
        sums = self._launch.start_sum(self._layout.pack(losses, squares, requests))
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
        """Which requests some process has had since the last call."""
        known, self._requests = self._requests, []
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
        known = self._requests or [False] * len(sums.requests)
        self._requests = [before or wish > 0 for before, wish in zip(known, sums.requests, strict=True)]

    def _not_finite(self, step: int, sums: StepSums) -> str:
        what = f"the loss is {sums.loss}"
        if math.isfinite(sums.loss):
            what = f"the gradient norm is {sums.gradient_norm}"
        return f"{what} at step {step} with learning_rate {self._config.learning_rate}. Maybe lower it."


@dataclass(frozen=True)
class StepSums:
    """What all processes know of a step. `loss`: mean over the whole batch. `requests`: how many processes ask for
    each.
    """

    loss: float
    gradient_norm: float
    requests: tuple[int, ...]

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True)
class SumsLayout:
    """Where each number is, for `replicas` pipelines of `stages` stages and `microbatches` each."""

    microbatches: int
    replicas: int
    stages: int
    replica: int

    def pack(self, losses: Tensor, squares: Mapping[int, Tensor], requests: Sequence[bool]) -> Tensor:
        """This process's part. `losses`, shape (microbatches,), are zeros where another process has them; `squares` are
        those of its stages: gradients are equal in all replicas, and the first tells.
        """
        batch = self.microbatches * self.replicas
        packed = losses.new_zeros(batch + self.stages + len(requests), dtype=torch.float64)
        packed[self.replica * self.microbatches : (self.replica + 1) * self.microbatches] = losses
        if self.replica == 0:
            for stage, square in squares.items():
                packed[batch + stage] = square
        if any(requests):
            packed[batch + self.stages :] = torch.tensor(requests, dtype=torch.float64)
        return packed

    def unpack(self, packed: Tensor) -> StepSums:
        """The sum of all parts, on the CPU."""
        batch = self.microbatches * self.replicas
        values = packed.tolist()
        loss = float(packed[:batch].mean())
        square = sum(values[batch : batch + self.stages])
        return StepSums(loss, math.sqrt(square), tuple(map(int, values[batch + self.stages :])))
