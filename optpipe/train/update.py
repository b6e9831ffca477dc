"""Optimizer step of all stages: learning rate, gradient norm, clipping, post-validation (Zero Bubble, section 4).

A device updates its weights as soon as its own gradients are ready, while others still compute. The all-reduce of the
step's losses and squared norms runs meanwhile, and is read in the next step before its first backward: it decides
whether gradients had to be clipped and whether all of them are finite. If the update was wrong, weights and optimizer
state are rolled back bit for bit, and the right update, or none, is applied. All processes read the same sums and so
decide alike, without another exchange.

The norm has the same bits for every placement and number of processes: each stage's sum of squares is computed in
float64, parameter by parameter in their order; it has a slot of its own in the all-reduce, to which all other processes
add 0; and slots are added up in the order of stages. Infinity and NaN survive both sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.errors import RunFailedError
from optpipe.profile.subject import Named
from optpipe.runtime.shared_parameters import Place, SharedParameter
from optpipe.runtime.stage import Stage
from optpipe.runtime.weight_gradients.split import LOWER
from optpipe.train.config import OPTIMIZERS, OptimizerConfig
from optpipe.train.launch import Launch, PendingSum
from optpipe.train.master_weights import MasterWeights
from optpipe.train.rollback import RollbackBackoff, Snapshot


def stage_optimizer(config: OptimizerConfig, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer | None:
    """Optimizer of a stage's trainable parameters; None if it has none. SGD takes beta1 as its momentum.

    Vectors, which biases and the weights of norms are, do not decay unless the configuration says so. AdamW is fused on
    GPUs. Of parameters of lower precision float32 copies are updated (`MasterWeights`). An optimizer of the user's own
    is made by the callable `config.name` from the named parameters and `config`. Raises InputError where that returns
    something else, or leaves a parameter out.
    """
    named = [(name, p) for name, p in named if p.requires_grad]
    if not named:
        return None
    if any(p.dtype in LOWER for _, p in named):
        return MasterWeights(named, lambda copies: _optimizer(config, copies))
    return _optimizer(config, named)


def _optimizer(config: OptimizerConfig, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    rate, decay = config.learning_rate, config.weight_decay
    if config.name not in OPTIMIZERS:
        return _own_optimizer(config, named)
    matrices = [p for _, p in named if p.dim() > 1 or config.decay_vectors]
    vectors = [p for _, p in named if p.dim() <= 1 and not config.decay_vectors]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.beta1, weight_decay=decay)
    fused = all(p.is_cuda and p.is_floating_point() for _, p in named)
    return torch.optim.AdamW(groups, lr=rate, betas=(config.beta1, config.beta2), weight_decay=decay, fused=fused)


def _own_optimizer(config: OptimizerConfig, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    make = Named("optimizer", config.name)
    optimizer = make(list(named), config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        make.refuse("wrong_return", f"returns {kind}, but must return a torch.optim.Optimizer of the named parameters.")
    names = {id(p): name for name, p in named}
    updated = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if left := [name for key, name in names.items() if key not in updated]:
        make.refuse("left_out", f"leaves out {left[0]}, which would not be trained. Maybe freeze it where it is made.")
    if not names.keys() >= {*updated}:
        make.refuse("unknown_parameter", "updates a parameter that it was not given.")
    return optimizer


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of `step` in a run of `steps`.

    Linear warm-up, whose first step is above 0. Then constant; or half a cosine that reaches its floor after the last
    step; or constant and over the last steps a line to the floor (warm-up, stable, decay).
    """
    warm_up, floor = config.warm_up_steps, config.decay_floor
    if step < warm_up:
        return config.learning_rate * (step + 1) / (warm_up + 1)
    if config.decay == "none":
        return config.learning_rate
    if config.decay == "wsd":
        last = max(1, steps // 5) if config.decay_steps is None else config.decay_steps
        left = min(1.0, max(0, steps - step) / (last + 1))
    else:
        share = (step - warm_up) / max(1, steps - warm_up)
        left = (1 + math.cos(math.pi * min(1.0, share))) / 2
    return config.learning_rate * (floor + (1 - floor) * left)


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step whose update is settled; equal in every process except `seconds`.

    `loss`: mean over the batch, before the update. `gradient_norm`: 2-norm of all gradients of the model together,
    before clipping. `clipped`: they were scaled down to `clip_norm`. `skipped`: loss or norm is not finite, and no
    weight changed. `rolled_back`: an optimistic update was undone for one of these two reasons. `seconds`: duration of
    the step in this process, which with post-validation includes the wait for the sums of the step before.
    `loss_terms`: means of the terms of a loss that has several, by name; their sum is the loss.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    clipped: bool
    skipped: bool
    rolled_back: bool
    seconds: float
    loss_terms: Mapping[str, float] = field(default_factory=dict)


EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as torch.nn.utils.clip_grad_norm_ does."""


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """Factor that scales gradients of this norm to at most `clip_norm`; 1.0 if they are below it."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + EPSILON))


@dataclass(frozen=True)
class _Pending:
    """Step whose all-reduce is in progress. `optimistic`: its update has been applied already.

    `terms`: names of the terms of its loss.
    """

    step: int
    sums: PendingSum
    optimistic: bool
    terms: tuple[str, ...]
    seconds: float = 0.0


class Updates:
    """Optimizers of this process's stages, and the validation of their updates.

    `steps`: length of the run, for the learning rate. `shared`: parameters that several stages hold; the first place
    in this process updates one, and the first place of all counts it in the norm. `followers`: places of parameters
    that are neither updated nor counted, because others stand for them. `changed` is called after each update and each
    rollback, in all processes together. `optimistic`: update before the sums are known, except while rollbacks are
    frequent (`RollbackBackoff`).

    Raises RunFailedError if a loss or gradient is not finite and `on_not_finite` is "stop".
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
        followers: Collection[Place] = (),
        changed: Callable[[], None] = lambda: None,
        optimistic: bool,
    ) -> None:
        self._config, self._steps, self._launch, self._layout = config, steps, launch, layout
        updated_elsewhere = {*followers, *(p for parameter in shared for p in parameter.places_in(stages)[1:])}
        counted_elsewhere = {place for parameter in shared for place in parameter.places[1:]}
        self._changed = changed
        self._parameters = {
            s: [
                (p, (s, name) not in counted_elsewhere)
                for name, p in stage.module.named_parameters()
                if (s, name) not in updated_elsewhere
            ]
            for s, stage in stages.items()
        }
        names = {s: {id(p): name for name, p in stage.module.named_parameters()} for s, stage in stages.items()}
        made = {
            s: stage_optimizer(config, ((names[s][id(p)], p) for p, _ in own)) for s, own in self._parameters.items()
        }
        self.optimizers = {s: optimizer for s, optimizer in made.items() if optimizer is not None}
        # Those of a user's optimizer may differ from group to group, and all follow the schedule.
        self._rates = {s: [group["lr"] for group in made.param_groups] for s, made in self.optimizers.items()}
        self._devices = {s: stage.device for s, stage in stages.items()}
        self._optimistic, self._backoff = optimistic, RollbackBackoff()
        self.snapshot = Snapshot([stage.module for stage in stages.values()], self.optimizers.values())
        self._pending: _Pending | None = None
        self._outcomes: list[StepOutcome] = []
        self._requests: list[bool] = []

    @property
    def pending(self) -> bool:
        """True while an update has not been validated."""
        return self._pending is not None

    @property
    def leaves_open(self) -> bool:
        """True if the next update is applied before its sums are known."""
        return self._optimistic and not self._backoff.waits

    def update(
        self, step: int, losses: Tensor, requests: Sequence[bool], terms: Mapping[str, Tensor] | None = None
    ) -> None:
        """Update after a step whose gradients are ready: optimistically, or as soon as the sums are known.

        `terms` of the losses have the same names in all processes, and the shape of `losses`.
        """
        assert self._pending is None, "an update is settled before the next one"
        squares = {s: self._sum_of_squares(s) for s in self._parameters}
        terms = terms or {}
        sums = self._launch.start_sum(self._layout.pack(losses, squares, requests, list(terms.values())))
        self._pending = _Pending(step, sums, self.leaves_open, tuple(terms))
        if not self._pending.optimistic:
            self.validate()
            return
        if self._config.clip_norm is not None or self._config.on_not_finite == "skip":
            self.snapshot.take()  # otherwise no update is undone: a step that is not finite ends the run
        # The global norm is no less than that of this process's stages (they are added in the same order, and rounding
        # is monotonic). Where these alone exceed the limit, the update is certain to be undone and is not made: an
        # infinite gradient never reaches the weights.
        norm = math.sqrt(sum(torch.stack([squares[s] for s in sorted(squares)]).tolist())) if squares else 0.0
        if math.isfinite(norm) and clip_factor(norm, self._config.clip_norm) == 1.0:
            self._apply(step)
        self._changed()

    def took(self, seconds: float) -> None:
        """Record the duration of the last step."""
        if self._pending is not None:
            self._pending = replace(self._pending, seconds=seconds)
        else:
            self._outcomes[-1] = replace(self._outcomes[-1], seconds=seconds)

    def validate(self) -> bool:
        """Wait for the pending step's sums and settle its update; False if weights were rolled back.

        Forwards that ran since the update have used the rolled back weights and are to be run again.
        """
        pending, self._pending = self._pending, None
        assert pending is not None, "nothing to validate"
        sums = self._layout.unpack(pending.sums.wait(), pending.terms)
        factor = clip_factor(sums.gradient_norm, self._config.clip_norm) if sums.finite else 0.0
        wrong = factor != 1.0
        self._backoff.add(wrong=wrong)
        if wrong and pending.optimistic:
            self.snapshot.restore()
        if not sums.finite and self._config.on_not_finite == "stop":
            figure = "gradient norm" if math.isfinite(sums.loss) else "loss"
            value = sums.gradient_norm if math.isfinite(sums.loss) else sums.loss
            when = f"at step {pending.step} with learning_rate {self._config.learning_rate}. Maybe lower it."
            first = "at step 0, before any update. Maybe a number of the batch or a weight is none."
            raise RunFailedError(f"the {figure} is {value} {when if pending.step else first}")
        if sums.finite and (wrong or not pending.optimistic):
            # Gradients are still those of the pending step: the next backward waits for this validation.
            gradients = [p.grad for own in self._parameters.values() for p, _ in own if p.grad is not None]
            if gradients and wrong:
                torch._foreach_mul_(gradients, factor)
            self._apply(pending.step)
        if wrong or not pending.optimistic:
            self._changed()
        self._outcomes.append(
            StepOutcome(
                pending.step,
                sums.loss,
                sums.gradient_norm,
                learning_rate(self._config, pending.step, self._steps),
                clipped=sums.finite and wrong,
                skipped=not sums.finite,
                rolled_back=pending.optimistic and wrong,
                seconds=pending.seconds,
                loss_terms=sums.loss_terms,
            )
        )
        earlier = self._requests or [False] * len(sums.requests)
        self._requests = [before or count > 0 for before, count in zip(earlier, sums.requests, strict=True)]
        return not (wrong and pending.optimistic)

    def take_outcomes(self) -> list[StepOutcome]:
        """Outcomes that have become known since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_requests(self) -> list[bool]:
        """Requests of any process in the steps validated since the last call; empty if none was."""
        requests, self._requests = self._requests, []
        return requests

    def _sum_of_squares(self, stage: int) -> Tensor:
        """Sum over all gradient entries that a stage counts: a float64 scalar on the stage's device."""
        counted = [_as_real(p.grad) for p, counts in self._parameters[stage] if counts and p.grad is not None]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self._devices[stage])
        return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in counted]).square().sum()

    def _apply(self, step: int) -> None:
        rate, highest = learning_rate(self._config, step, self._steps), self._config.learning_rate
        for s, optimizer in self.optimizers.items():
            for group, of_group in zip(optimizer.param_groups, self._rates[s], strict=True):
                group["lr"] = rate if of_group == highest else rate * (of_group / highest)
            optimizer.step()


def _as_real(gradient: Tensor) -> Tensor:
    """A complex gradient as real and imaginary parts, whose squares add up to those of its absolute values."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


@dataclass(frozen=True)
class StepSums:
    """Sums of a step over all processes. `loss`: mean over the batch. `requests`: how many processes made each.

    `loss_terms`: means of the terms of the loss, by name.
    """

    loss: float
    gradient_norm: float
    requests: tuple[int, ...]
    loss_terms: Mapping[str, float]

    @property
    def finite(self) -> bool:
        """True if neither loss nor gradient norm is infinite or NaN."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True)
class SumsLayout:
    """Slots of the all-reduce, for `replicas` pipelines of `stages` stages and `microbatches` each.

    First the loss of every microbatch of every replica, then likewise each of its terms, then the squared norm of every
    stage, then the requests.
    """

    microbatches: int
    replicas: int
    stages: int
    replica: int

    def pack(
        self,
        losses: Tensor,
        squares: Mapping[int, Tensor],
        requests: Sequence[bool],
        terms: Sequence[Tensor] = (),
    ) -> Tensor:
        """This process's addend, float64. `losses`, shape (microbatches,), are 0 where another process has the loss,
        and so is each of its `terms`.

        `squares`: sums of squares of this process's stages. Gradients are equal in all replicas, so replica 0 fills in
        the squares and the others 0.
        """
        batch = self.microbatches * self.replicas
        figures = [losses, *terms]
        norms = batch * len(figures)
        packed = losses.new_zeros(norms + self.stages + len(requests), dtype=torch.float64)
        for n, figure in enumerate(figures):
            begin = n * batch + self.replica * self.microbatches
            packed[begin : begin + self.microbatches] = figure
        if self.replica == 0:
            for stage, square in squares.items():
                packed[norms + stage] = square
        if any(requests):
            packed[norms + self.stages :] = torch.tensor(requests, dtype=torch.float64)
        return packed

    def unpack(self, packed: Tensor, terms: Sequence[str] = ()) -> StepSums:
        """Read the sum of all processes' addends, a tensor on the CPU; `terms` are the names of those of the loss."""
        batch = self.microbatches * self.replicas
        norms = batch * (1 + len(terms))
        loss, *means = [float(figure.mean()) for figure in packed[:norms].view(-1, batch)]
        values = packed[norms:].tolist()
        norm = math.sqrt(sum(values[: self.stages]))
        requests = tuple(map(int, values[self.stages :]))
        return StepSums(loss, norm, requests, dict(zip(terms, means, strict=True)))
