"""Gradients of a step: complete when every microbatch has given its share, reduced over replicas, and scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from optpipe.errors import TrainingError
from optpipe.pipelining import fsdp
from optpipe.runtime import Stage


class GradientCompletion:
    """Reduces the gradients of each stage of this process after its last W, and scales all at the end of a step.

    Under FSDP2 and `replicate` a stage's reduction is begun when its last W is done, while other stages compute; under
    DistributedDataParallel gradients are averaged at the end. `divisor` divides what is then in `.grad`, gradients of
    earlier steps included, as torch's schedules do. `reductions`: how many the program has in a step, by stage.
    """

    def __init__(self, stages: Mapping[int, Stage], divisor: int, reductions: Mapping[int, int]) -> None:
        self._modules: dict[int, nn.Module] = {number: stage.module for number, stage in stages.items()}
        self._divisor = divisor
        self._reductions, self._begun = reductions, dict.fromkeys(stages, 0)

    @property
    def reducers(self) -> Mapping[int, Callable[[], None]]:
        """For each stage, what its REDUCE_PART and REDUCE start."""
        return {number: partial(self._reduce, number) for number in self._modules}

    def _reduce(self, number: int) -> None:
        self._begun[number] += 1
        fsdp.begin_reduction(self._modules[number], last=self._begun[number] == self._reductions[number])

    def finish(self) -> None:
        """Wait for the reductions; then scale."""
        self._begun = dict.fromkeys(self._modules, 0)
        gradients: dict[int, Tensor] = {}  # by parameter: stages of a process may share one
        for module in self._modules.values():
            fsdp.finish_reduction(module)
            found = {id(p): p.grad for p in module.parameters() if p.grad is not None and id(p) not in gradients}
            if isinstance(module, DistributedDataParallel):
                _average(found.values(), module.process_group)
            gradients |= found
        if self._divisor != 1:
            for gradient in gradients.values():
                gradient.div_(self._divisor)

    def clear(self) -> None:
        """Drop what the failed step has left in wrappers."""
        self._begun = dict.fromkeys(self._modules, 0)
        for module in self._modules.values():
            fsdp.abandon_step(module)


def _average(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    running = [(gradient, dist.all_reduce(gradient, group=group, async_op=True)) for gradient in gradients]
    for gradient, work in running:
        assert work is not None, "this process is in the group"
        work.wait()
        gradient.div_(group.size())


class GradientShares:
    """A check that each parameter of a stage gets a share of its gradient from every microbatch that depends on it.

    What a microbatch depends on is read from the graph that its F records; shares are counted where autograd adds to a
    parameter's gradient, and where W does. A wrapper that registers other parameters in between would make either
    miss some (torch 2.13's own runtime loses the first microbatch's under `fully_shard` with resharding).
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._parameters: dict[int, Tensor] = {}
        self._expected: dict[int, set[int]] = {}
        self._found: dict[int, set[int]] = {}
        self._nodes: dict[int, tuple[Any, RemovableHandle]] = {}
        self.microbatch = 0

    def expect(self, microbatch: int, roots: Iterable[Any]) -> None:
        """Note the parameters on which the graph of a microbatch depends; `roots` are nodes of autograd."""
        pending, seen = [node for node in roots if node is not None], set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            parameter = getattr(node, "variable", None)
            if isinstance(parameter, nn.Parameter):
                self._expected.setdefault(id(parameter), set()).add(microbatch)
                self._watch(parameter, node)
            pending += [following for following, _ in node.next_functions if following is not None]

    def add(self, parameters: Iterable[Tensor]) -> None:
        """W, or a layer in BW, has added the share of the current microbatch to these."""
        for parameter in parameters:
            if parameter.requires_grad:
                self._found.setdefault(id(parameter), set()).add(self.microbatch)

    def check(self, stage: int) -> None:
        """Raise TrainingError where a share is missing, at the end of a step."""
        for key, expected in self._expected.items():
            missing = sorted(expected - self._found.get(key, set()))
            if missing:
                name = self._names.get(key, f"a parameter of shape {list(self._parameters[key].shape)}")
                raise TrainingError(
                    f"stages[{stage}]: the gradient of {name} lacks the shares of microbatches {missing}. Maybe a "
                    "wrapper of the module replaces its parameters between forward and backward; where a function of "
                    "the module adds them to another place than .grad, set check_gradients of the schedule to False."
                )

    def end(self) -> None:
        """Watch no longer."""
        for _, handle in self._nodes.values():
            handle.remove()
        self._nodes.clear()

    def _watch(self, parameter: Tensor, node: Any) -> None:
        key = id(parameter)
        if key in self._nodes:
            return
        self._parameters[key] = parameter

        def added(_: Any, gradients: tuple[Tensor | None, ...]) -> None:
            if gradients and gradients[0] is not None:
                self._found.setdefault(key, set()).add(self.microbatch)

        self._nodes[key] = node, node.register_hook(added)
