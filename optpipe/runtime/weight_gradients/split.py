"""Split backward of a module: input gradients now, weight gradients later.

A layer keeps its identity: only its class changes, to a subclass whose `forward` goes through one autograd function.
Parameters, names, hooks, mode and repr stay; copies and pickles are of the class that it had before.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from optpipe.errors import TrainingError
from optpipe.runtime.torch_private import ANY_LEAF, computes_given_gradients_alone, is_transforming


class GradientTask(Protocol):
    """Adds the weight gradients of one call of one layer to `.grad` of `parameters`."""

    parameters: tuple[nn.Parameter, ...]

    def __call__(self) -> None:
        """Add them."""


class Splitting(Enum):
    """Set of layers that split their backward."""

    NONE = 0
    """None: outside of F and backwards, for instance in evaluation."""
    LARGE = 1
    """Layers that save memory by it even in a fused backward."""
    ALL = 2


class WeightGradients:
    """Deferred weight gradients of one stage, by microbatch.

    `splitting` applies to layers in F, and in B if a checkpoint runs a part of F again. An `observer` is called with
    every task after it has run.
    """

    def __init__(self) -> None:
        self.splitting = Splitting.NONE
        self._kept: dict[int, deque[GradientTask]] = {}
        self._put: Callable[[GradientTask], None] | None = None
        self._lost = False
        self.observer: Callable[[GradientTask], None] | None = None

    @contextmanager
    def forward(self, splitting: Splitting = Splitting.ALL) -> Iterator[None]:
        """F: layers record how to split their backward. Raises TrainingError if another stage has taken one of them."""
        if self._lost:
            raise TrainingError(
                "a layer of this stage belongs to another Stage that was made later. "
                "Maybe hand each Stage modules of its own; they may share parameters."
            )
        self.splitting = splitting
        try:
            yield
        finally:
            self.splitting = Splitting.NONE

    def backward_input(self, microbatch: int, splitting: Splitting = Splitting.ALL) -> AbstractContextManager[None]:
        """B: weight gradients wait for `compute`. `splitting` is that of the microbatch's F."""
        return self._backward(self._kept.setdefault(microbatch, deque()).append, splitting)

    def backward(self, splitting: Splitting = Splitting.ALL) -> AbstractContextManager[None]:
        """BW: weight gradients are computed at once. `splitting` is that of the microbatch's F."""
        return self._backward(self._run, splitting)

    @contextmanager
    def _backward(self, put: Callable[[GradientTask], None], splitting: Splitting) -> Iterator[None]:
        self._put, self.splitting = put, splitting
        try:
            yield
        finally:
            self._put, self.splitting = None, Splitting.NONE

    @property
    def takes_tasks(self) -> bool:
        """True in a backward of the stage; false in one that a module runs itself, in F or to get a gradient in B.

        Such a one gets gradients where it asked for them, of all orders, and none of it waits. Only within a backward.
        """
        return self._put is not None and not torch.is_grad_enabled() and not computes_given_gradients_alone()

    def add(self, task: GradientTask) -> None:
        """Add a task; called by a layer's backward."""
        assert self._put is not None, "takes_tasks was asked"
        self._put(task)

    def compute(self, microbatch: int) -> None:
        """W: run the tasks that B of this microbatch deferred; each layer's tensors are freed after its task."""
        tasks = self._kept.pop(microbatch)
        with torch.no_grad():
            while tasks:
                self._run(tasks.popleft())

    def _run(self, task: GradientTask) -> None:
        task()
        if self.observer is not None:
            self.observer(task)

    def clear(self) -> None:
        """Drop everything that is kept."""
        self._kept.clear()

    def lose(self) -> None:
        """Note that another stage has taken over one of the layers."""
        self._lost = True


Layer = TypeVar("Layer", bound=nn.Module)
Saved = tuple[Tensor, ...]

LARGE_BYTES = 2**16
"""From this size on a layer splits its backward in BW too: autograd needs room for the gradient of all its weights."""


class SplitBackward(ABC, Generic[Layer]):
    """Split backward of a kind of layer with one input and one output tensor.

    What `forward` saves, and the output gradient, are held from B until W: a split pays where that, which is about as
    much as the layer's activations again, buys a large part of the layer's backward.
    """

    distributed: ClassVar[bool] = False
    """True where both halves are right for DTensors, as matrix products are; else autograd handles such layers."""

    lower_precision: ClassVar[bool] = False
    """True if autocast computes the layer in its own dtype, as it does matrix products: then x comes in that dtype."""

    def handles(self, _layer: Layer) -> bool:
        """True if this layer can be split; for others autograd computes all gradients in B."""
        return True

    @abstractmethod
    def forward(self, layer: Layer, x: Tensor) -> tuple[Tensor, Saved]:
        """The output, which must be a new tensor, and what the backward needs besides the parameters.

        Runs without autograd, as the other two do, and all three under the autocast of the caller.
        """

    @abstractmethod
    def input_gradient(self, layer: Layer, saved: Saved, gradient: Tensor) -> Tensor:
        """The gradient of x from that of the output. In B; not called where x needs none."""

    @abstractmethod
    def add_weight_gradients(self, layer: Layer, saved: Saved, gradient: Tensor) -> None:
        """Add the gradient of each parameter to its `.grad` (`accumulate`). In W."""


def accumulate(parameter: Tensor | None, gradient: Tensor) -> None:
    """Add to a parameter's `.grad`, in its own dtype; not if it is absent or frozen."""
    if parameter is None or not parameter.requires_grad:
        return
    if parameter.grad is None and is_distributed(parameter):
        parameter.grad = gradient.to(parameter.dtype)  # as autograd does: placed as the gradient is, at first
    else:
        gradient_of(parameter).add_(gradient)


def is_distributed(tensor: Tensor) -> bool:
    """True for a DTensor, which tensor parallelism or FSDP has cut."""
    return type(tensor) is not Tensor and hasattr(tensor, "placements")


def rows(x: Tensor) -> Tensor:
    """View of a tensor of shape (..., width) as a matrix, also where there are none or they are of width 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def is_leaf(parameter: Any) -> TypeGuard[nn.Parameter]:
    """True for a parameter that can have a `.grad`. What torch.func.functional_call puts in its place may be a tensor
    that was computed, which autograd has to carry further.
    """
    return isinstance(parameter, nn.Parameter) and parameter.is_leaf


def leaves_to_autograd() -> bool:
    """True where layers leave their backward to autograd, because others transform or compile the forward."""
    return torch.compiler.is_compiling() or is_transforming()


def check_versions(parameters: Iterable[Tensor], versions: Iterable[int]) -> None:
    """Raise TrainingError if parameters have been changed in place since, so that their values in F are lost."""
    for parameter, version in zip(parameters, versions, strict=True):
        if parameter._version != version and parameter.dim() > 1:
            raise TrainingError(
                f"a weight of shape {list(parameter.shape)} was changed in place between F and the backward of a "
                "microbatch, which needs the value of F; autograd refuses that too. Maybe a forward changes it: other "
                "microbatches run in between. Change it between two steps, or compute the changed weight in forward."
            )


def gradient_of(parameter: Tensor) -> Tensor:
    """Get a parameter's `.grad`, zeros if missing. OptPipe's trainer allocates all before its first step."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    return parameter.grad


LOWER = (torch.bfloat16, torch.float16)
"""Precisions in which sums over microbatches lose what is small."""


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Precision of a parameter's `.grad`, which may be higher than its own."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype


def accumulate_in_float32(module: nn.Module) -> None:
    """Let the gradients of parameters of lower precision be float32. Raises TrainingError where torch is too old."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in LOWER:
            if not hasattr(parameter, "grad_dtype"):
                raise TrainingError(
                    f"parameters of {parameter.dtype} need gradients of float32, which torch {torch.__version__} does "
                    "not have. Maybe torch 2.10, or float32 with --autocast bfloat16."
                )
            parameter.grad_dtype = torch.float32


_OF_A_STAGE = ("_weight_gradients", "_deferred")
"""Attributes that a layer has only while it belongs to a stage."""


class Deferred(nn.Module):
    """Base of the classes of split layers; `_plain` is the original class."""

    _split: ClassVar[SplitBackward[Any]]
    _plain: ClassVar[type[nn.Module]]
    _weight_gradients: WeightGradients

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the original forward unless the layer splits its backward and is called with one tensor."""
        splitting = self._weight_gradients.splitting
        if splitting is Splitting.NONE or (splitting is Splitting.LARGE and not _is_large(self)):
            return super().forward(*inputs, **named)
        if named or len(inputs) != 1 or not _is_dense(inputs[0]) or leaves_to_autograd():
            return super().forward(*inputs, **named)
        parameters = [p for p in _parameters(self) if p is not None]
        if not _may_split(parameters, self._split.distributed):
            return super().forward(*inputs)
        return _Split.apply(self, ANY_LEAF, inputs[0], *parameters)  # type: ignore[no-untyped-call]

    def may_split(self) -> bool:
        """True if the backward is split when the layer is called with one tensor."""
        return _may_split([p for p in _parameters(self) if p is not None], self._split.distributed)

    def _get_name(self) -> str:
        return self._plain.__name__

    def __reduce_ex__(self, _protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_A_STAGE}
        return object.__new__, (self._plain,), state


def _parameters(layer: nn.Module) -> Iterable[nn.Parameter | None]:
    return layer.parameters() if layer._modules else layer._parameters.values()


def _is_dense(x: Any) -> bool:
    """True for a tensor that is neither sparse nor nested."""
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested


def _is_large(layer: nn.Module) -> bool:
    """True if a parameter has LARGE_BYTES. For smaller layers the split's 40 us on the host do not pay."""
    return any(p is not None and p.numel() * p.itemsize >= LARGE_BYTES for p in _parameters(layer))


def _may_split(parameters: Iterable[nn.Parameter], distributed: bool) -> bool:
    """True if a parameter needs a gradient, all are leaves, and none has hooks that need autograd to compute it."""
    wanted = False
    for parameter in parameters:
        if not is_leaf(parameter):
            return False
        wanted = wanted or parameter.requires_grad
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return False
        if not distributed and is_distributed(parameter):
            return False
    return wanted


def as_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as autocast gives it to a product: it leaves float64, complex numbers and integers unchanged."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


class _Autocast:
    """The autocast under which F ran, for both halves of the backward.

    Without autocast's cache, which would hold a cast copy of every weight until F ends: eight layers of width 64 then
    need 68 kB of workspace instead of 10.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def cast(self, split: SplitBackward[Any], x: Tensor) -> Tensor:
        """Input of the layer under autocast."""
        return as_autocast(x, self._dtype) if split.lower_precision else x

    def entered(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device, self._dtype, cache_enabled=False)

    def run(self, half: Callable[..., Any], *call: Any) -> Any:
        with self.entered():
            return half(*call)


class _Split(torch.autograd.Function):
    """One call of a layer. The parameters are only given for autograd to record the call."""

    @staticmethod
    def forward(ctx: Any, layer: Deferred, _leaf: Tensor, x: Tensor, *_parameters: nn.Parameter) -> Tensor:
        ctx.layer, ctx.parameters = layer, _parameters
        ctx.versions = [parameter._version for parameter in _parameters]
        device = x.device.type
        if torch.is_autocast_enabled(device):
            ctx.autocast = _Autocast(device, torch.get_autocast_dtype(device))
            y, saved = ctx.autocast.run(layer._split.forward, layer, ctx.autocast.cast(layer._split, x))
        else:
            ctx.autocast = None
            y, saved = layer._split.forward(layer, x)
        ctx.x_place = next((place for place, tensor in enumerate(saved) if tensor is x), None)
        ctx.save_for_backward(*saved)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer: Deferred = ctx.layer
        split, autocast = layer._split, ctx.autocast
        if not layer._weight_gradients.takes_tasks:
            return None, None, *_at_once(ctx, gradient)
        # Attached to the graph, what is kept for W would keep the graph.
        call = (layer, tuple([tensor.detach() for tensor in ctx.saved_tensors]), gradient)
        later, now = split.add_weight_gradients, split.input_gradient
        if autocast:
            later, now = partial(autocast.run, later), partial(autocast.run, now)
        _, _, x_needs_it, *wanted = ctx.needs_input_grad
        layer._weight_gradients.add(WeightTask(layer, ctx.parameters, wanted, partial(later, *call)))
        input_gradient = None
        if x_needs_it:
            check_versions(ctx.parameters, ctx.versions)
            with registered(layer, ctx.parameters):
                input_gradient = now(*call)
        return None, None, input_gradient, *(None,) * len(wanted)


def _at_once(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """The gradients of the input and the parameters of a call, by autograd and for it, so that they have gradients.

    Raises TrainingError if the call has not kept its input.
    """
    layer: Deferred = ctx.layer
    if ctx.x_place is None:
        raise TrainingError(
            f"a module differentiates through a {layer._plain.__name__} within the forward or backward of a stage, but "
            "that keeps its input for its own backward alone: under autocast, or by a split that was registered. "
            "Maybe leave autocast out, or give that part of the module a forward without such layers."
        )
    x = ctx.saved_tensors[ctx.x_place]
    autocast = ctx.autocast.entered() if ctx.autocast else nullcontext()
    with torch.enable_grad(), autocast, registered(layer, ctx.parameters):
        y = layer._plain.forward(layer, x)
    return gradients_of(y, (x, *ctx.parameters), ctx.needs_input_grad[2:], gradient)


def gradients_of(y: Tensor, inputs: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor) -> list[Tensor | None]:
    """Gradients of those inputs of y that are wanted, None for the others; with graphs where autograd records."""
    own = [part for part, needed in zip(inputs, wanted, strict=True) if needed]
    found = iter(torch.autograd.grad(y, own, gradient, create_graph=torch.is_grad_enabled(), allow_unused=True))
    return [next(found) if needed else None for needed in wanted]


@contextmanager
def registered(layer: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which a layer has these parameters, those of a call in F.

    A wrapper or torch.func.functional_call may have registered others for that call, or since.
    """
    now = [p for p in _parameters(layer) if p is not None]
    if all(map(operator.is_, now, parameters)):
        yield
        return
    of_call = dict(zip(map(id, now), parameters, strict=True))
    places = [
        (part._parameters, name, parameter)
        for part in layer.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    for registry, name, parameter in places:
        registry[name] = of_call[id(parameter)]
    try:
        yield
    finally:
        for registry, name, parameter in places:
            registry[name] = parameter


class WeightTask:
    """Adds the weight gradients of one call of a layer to the parameters that the layer had in that call.

    A wrapper may have registered others since: under FSDP2 a layer has its gathered parameters while its module runs,
    and shards of them otherwise. Gradients belong to the gathered ones, whose `.grad` is there while their data is not.

    `wanted`: which of them were trained in that call. As in autograd those get gradients that still are.
    """

    __slots__ = ("_add", "_frozen", "_layer", "parameters")

    def __init__(
        self, layer: nn.Module, parameters: tuple[nn.Parameter, ...], wanted: Iterable[bool], add: Callable[[], None]
    ) -> None:
        self._layer, self.parameters, self._add = layer, parameters, add
        self._frozen = [p for p, trained in zip(parameters, wanted, strict=True) if not trained]

    def __call__(self) -> None:
        """Add them."""
        thawed = [parameter for parameter in self._frozen if parameter.requires_grad]
        for parameter in thawed:
            parameter.requires_grad_(False)
        try:
            with registered(self._layer, self.parameters):
                self._add()
        finally:
            for parameter in thawed:
                parameter.requires_grad_(True)
