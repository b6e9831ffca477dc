"""Layers of any kind that multiply by matrices of their own: experts with one weight of three dimensions, routers.

While such a layer runs, the products that its forward makes of its own parameters, or of entries of them, go through an
autograd function that leaves the weight's gradient for W. What else it does with them is left to autograd: always
right, but in B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from optpipe.errors import TrainingError
from optpipe.runtime.torch_private import GROUPED_PRODUCTS
from optpipe.runtime.weight_gradients.split import (
    LARGE_BYTES,
    Deferred,
    Splitting,
    WeightGradients,
    gradient_dtype,
    gradient_of,
    is_distributed,
)


@dataclass(frozen=True, eq=False)
class View:
    """A parameter, an entry or several entries (`index`) of it, with the last two dimensions exchanged or not."""

    parameter: nn.Parameter
    index: int | Tensor | None = None
    transposed: bool = False

    @property
    def whole(self) -> bool:
        """True for the parameter as it is."""
        return self.index is None and not self.transposed

    def value(self, dtype: torch.dtype) -> Tensor:
        """The values now, apart from autograd."""
        values = self.parameter.detach() if self.index is None else self.parameter.detach()[self.index]
        return (values.mT if self.transposed else values).to(dtype)

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of the view to the parameter's."""
        of_all = gradient_of(self.parameter)
        gradient = (gradient.mT if self.transposed else gradient).to(of_all.dtype)
        if isinstance(self.index, Tensor):
            of_all.index_add_(0, self.index, gradient)
        else:
            (of_all if self.index is None else of_all[self.index]).add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add `left @ right`, of two or three dimensions, without room for it where possible."""
        if isinstance(self.index, Tensor) or left.dtype != gradient_dtype(self.parameter):
            self.add(left @ right)
            return
        target = gradient_of(self.parameter)
        target = target if self.index is None else target[self.index]
        target = target.mT if self.transposed else target
        (target.addmm_ if left.dim() == 2 else target.baddbmm_)(left, right)


@dataclass(frozen=True)
class Product:
    """A product of x and a weight, plus a bias: its value, its gradient of x, what adds the weight's to a view."""

    value: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    add_weight_gradient: Callable[[View, Tensor, Tensor], None]
    lower_precision: bool = True
    """True if autocast computes it in its own dtype."""


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _grouped(offsets: Tensor) -> Product:
    multiply = GROUPED_PRODUCTS[0]
    return Product(
        lambda x, weight, _: multiply(x, weight, offs=offsets),
        lambda gradient, weight: multiply(gradient, weight.transpose(-2, -1), offs=offsets),
        lambda view, x, gradient: view.add(multiply(x.transpose(0, 1), gradient, offs=offsets)),
        lower_precision=False,
    )


def _looked_up(padding: int | None) -> Product:
    def add(view: View, index: Tensor, gradient: Tensor) -> None:
        if padding is not None:
            gradient = gradient.masked_fill((index == padding).unsqueeze(-1), 0)
        of_all = gradient_of(view.parameter)
        of_all.index_add_(0, index.reshape(-1), _rows(gradient).to(of_all.dtype))

    return Product(
        lambda index, weight, _: nn.functional.embedding(index, weight),
        lambda gradient, _: gradient,  # not called: indices have no gradient
        add,
        lower_precision=False,
    )


LINEAR = Product(
    nn.functional.linear,
    lambda gradient, weight: gradient @ weight,
    lambda view, x, gradient: view.add_product(_rows(gradient).T, _rows(x)),
)
RIGHT = Product(
    lambda x, weight, bias: x @ weight if bias is None else torch.addmm(bias, x, weight),
    lambda gradient, weight: gradient @ weight.mT,
    lambda view, x, gradient: view.add_product(_rows(x).T, _rows(gradient)),
)
RIGHT_OF_EACH = replace(RIGHT, add_weight_gradient=lambda view, x, gradient: view.add_product(x.mT, gradient))
LEFT_OF_EACH = Product(
    lambda x, weight, _: weight @ x,
    lambda gradient, weight: weight.mT @ gradient,
    lambda view, x, gradient: view.add_product(gradient, x.mT),
)


class _Deferring(torch.autograd.Function):
    """A product whose weight's gradient waits, the bias's does not. The parameter lets autograd record the call."""

    @staticmethod
    def forward(
        ctx: Any,
        pending: WeightGradients,
        product: Product,
        view: View,
        x: Tensor,
        bias: Tensor | None,
        _parameter: nn.Parameter,
    ) -> Tensor:
        ctx.pending, ctx.product, ctx.view = pending, product, view
        ctx.save_for_backward(x)
        with torch.autocast(x.device.type, enabled=False):
            dtype = x.dtype if x.is_floating_point() else view.parameter.dtype
            return product.value(x, view.value(dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise TrainingError("a gradient of a gradient was asked for, which a split backward does not have.")
        product, view, (x,) = ctx.product, ctx.view, ctx.saved_tensors
        add = partial(product.add_weight_gradient, view, x.detach(), gradient)
        ctx.pending.add(ProductTask(view.parameter, add))
        found = product.input_gradient(gradient, view.value(gradient.dtype)) if ctx.needs_input_grad[3] else None
        bias = _rows(gradient).sum(0) if ctx.needs_input_grad[4] else None
        return None, None, None, found, bias, None


class ProductTask:
    """Adds the gradient of a parameter from one product."""

    __slots__ = ("_add", "parameters")

    def __init__(self, parameter: nn.Parameter, add: Callable[[], None]) -> None:
        self.parameters, self._add = (parameter,), add

    def __call__(self) -> None:
        """Add it."""
        self._add()


class Products(TorchFunctionMode):
    """Context of a layer's forward, in which products of its matrices are deferred."""

    def __init__(self, layer: DeferredProducts) -> None:
        super().__init__()
        self._layer = layer
        own = matrices(layer)
        self._names = {id(parameter): name for name, parameter in own.items()}
        self._views = {id(parameter): View(parameter) for parameter in own.values()}
        self._alive: list[Tensor] = []

    def __torch_function__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; products and views of own matrices are recognised."""
        kwargs = kwargs or {}
        tracked = [value for value in (*args, *kwargs.values()) if id(value) in self._views]
        if not tracked or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        with suppress(TypeError, KeyError):
            if (made := self._product(func, args, kwargs)) is not None:
                return made
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.requires_grad and id(result) not in self._views:
            view = self._view_of(func, args, kwargs)
            if view is not None:
                self._views[id(result)] = view
                self._alive.append(result)  # or another tensor may get its id
                return result
        if any(part.requires_grad for part in _tensors(result) if id(part) not in self._views):
            for value in tracked:
                self._layer._deferred[self._names[id(self._views[id(value)].parameter)]] = False
        return result

    def _view_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
        """The view that a function makes of a tracked one; None if it makes something else."""
        view = self._views.get(id(args[0])) if args else None
        if view is None or kwargs:
            return None
        dims = view.parameter.dim() - isinstance(view.index, int)
        if func is Tensor.__getitem__ and view.whole and dims == 3:
            index = args[1]
            if isinstance(index, Tensor) and not index.dtype.is_floating_point and index.dtype != torch.bool:
                if index.dim() == 0:
                    return replace(view, index=int(index))
                return replace(view, index=index.detach()) if index.dim() == 1 else None
            return replace(view, index=index) if isinstance(index, int) and not isinstance(index, bool) else None
        swapped = func in _TRANSPOSED or (func in _T and dims == 2)
        if func in _TRANSPOSE:
            swapped = {dim % dims for dim in args[1:]} == {dims - 2, dims - 1}
        return replace(view, transposed=not view.transposed) if swapped else None

    def _product(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The product that a function makes of a tracked view; None if it makes none that is known."""
        bias: Any = None
        product: Product | None = None
        x: Any = None
        weight: Any = None
        if func is nn.functional.linear:
            product, (x, weight, bias) = LINEAR, _arguments(args, kwargs, "input", "weight", "bias")
        elif func is torch.addmm and len(args) == 3 and not kwargs:
            product, (bias, x, weight) = RIGHT, args
        elif func in _GROUPED and len(args) == 2 and [k for k, v in kwargs.items() if v is not None] == ["offs"]:
            product, (x, weight) = _grouped(kwargs["offs"]), args
        elif func is nn.functional.embedding:
            x, weight, padding, *options = _arguments(args, kwargs, *_EMBEDDING)
            usual = (padding is None or padding >= 0) and not any(options)
            product = _looked_up(padding) if usual and self._views[id(weight)].whole else None
        elif func in _MATMUL and len(args) == 2 and not kwargs:
            left, right = args
            if id(right) in self._views:
                x, weight = left, right
                product = RIGHT if right.dim() == 2 else RIGHT_OF_EACH if left.dim() == right.dim() == 3 else None
            elif left.dim() == right.dim() == 3:
                x, weight, product = right, left, LEFT_OF_EACH
        view = self._views.get(id(weight))
        others = any(id(value) in self._views for value in (x, bias))
        if product is None or view is None or others or not isinstance(x, Tensor) or not x.dim():
            return None
        if product in (LINEAR, RIGHT) and weight.dim() != 2:
            return None
        device = x.device.type
        if product.lower_precision and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        elif x.dtype != weight.dtype and func is not nn.functional.embedding:
            return None
        if bias is not None:
            if bias.dim() != 1:
                return None
            bias = bias.to(x.dtype)
        self._layer._deferred.setdefault(self._names[id(view.parameter)], True)
        pending = self._layer._weight_gradients
        made: Tensor = _Deferring.apply(pending, product, view, x, bias, view.parameter)  # type: ignore[no-untyped-call]
        return made


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
_MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm}
_GROUPED = {*GROUPED_PRODUCTS}
_TRANSPOSE = {torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes}
_PROPERTIES: Any = Tensor
_TRANSPOSED = {_PROPERTIES.mT.__get__}
_T = {_PROPERTIES.T.__get__, Tensor.t, torch.t}


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any], *names: str) -> list[Any]:
    """Arguments by their names, None for those that are not given."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]


def _tensors(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple | list) else [result]
    return [part for part in parts if isinstance(part, Tensor)]


class DeferredProducts(Deferred):
    """Base of the classes of layers whose products with their own matrices are deferred.

    `_deferred` says of each matrix that a forward has used whether all its uses were such products.
    """

    _deferred: dict[str, bool]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the original forward, within `Products` if the layer splits its backward."""
        splitting = self._weight_gradients.splitting
        forward = self._plain.forward
        if splitting is Splitting.NONE or torch.compiler.is_compiling() or not self.may_split():
            return forward(self, *inputs, **named)
        if splitting is Splitting.LARGE and not any(
            p.numel() * p.itemsize >= LARGE_BYTES for p in matrices(self).values()
        ):
            return forward(self, *inputs, **named)
        with Products(self):
            return forward(self, *inputs, **named)

    def may_split(self) -> bool:
        """True if there are matrices to train, and none is a DTensor or has hooks that need autograd."""
        own = matrices(self).values()
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks or is_distributed(p) for p in own)
        return bool(own) and not hooked

    def left(self) -> list[nn.Parameter]:
        """Matrices whose gradients autograd computes in B, in all or in part; before a forward all."""
        own = matrices(self)
        return [p for name, p in own.items() if not (self.may_split() and self._deferred.get(name))]


def matrices(layer: nn.Module) -> dict[str, nn.Parameter]:
    """A layer's own parameters of at least two dimensions that are trained."""
    own = layer._parameters.items()
    lazy = nn.parameter.is_lazy
    return {n: p for n, p in own if p is not None and not lazy(p) and p.requires_grad and p.dim() > 1}
