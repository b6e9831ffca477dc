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

from optpipe.runtime.torch_private import ANY_LEAF, GROUPED_PRODUCTS, is_transforming
from optpipe.runtime.weight_gradients.split import (
    LARGE_BYTES,
    Deferred,
    Splitting,
    WeightGradients,
    as_autocast,
    check_versions,
    gradient_dtype,
    gradient_of,
    gradients_of,
    is_distributed,
    is_leaf,
    leaves_to_autograd,
    rows,
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

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        shape = self.parameter.shape
        if self.index is not None:
            shape = (self.index.shape if isinstance(self.index, Tensor) else torch.Size()) + shape[1:]
        return torch.Size([*shape[:-2], shape[-1], shape[-2]]) if self.transposed else shape

    def value(self, dtype: torch.dtype) -> Tensor:
        """The values now, apart from autograd."""
        return self.of(self.parameter.detach()).to(dtype)

    def of(self, parameter: Tensor) -> Tensor:
        """The view of a tensor that has the parameter's shape."""
        values = parameter if self.index is None else parameter[self.index]
        return values.mT if self.transposed else values

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of the view to the parameter's."""
        of_all = gradient_of(self.parameter)
        gradient = (gradient.mT if self.transposed else gradient).to(of_all.dtype)
        if isinstance(self.index, Tensor):
            of_all.index_add_(0, self.index, gradient)
        else:
            (of_all if self.index is None else of_all[self.index]).add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add `left @ right`, summed where the view was broadcast, without room for it where possible."""
        shape = self.shape
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
        in_place = len(shape) < 4 and batch == shape[:-2] and left.dtype == gradient_dtype(self.parameter)
        if isinstance(self.index, Tensor) or not in_place:
            self.add((left @ right).sum_to_size(shape))
            return
        target = gradient_of(self.parameter)
        target = target if self.index is None else target[self.index]
        target = target.mT if self.transposed else target
        add = target.baddbmm_ if batch else target.addmm_
        add(left.expand(*batch, -1, -1), right.expand(*batch, -1, -1))


@dataclass(frozen=True)
class Product:
    """A product of x and a weight, plus a bias: its value, its gradient of x, what adds the weight's to a view."""

    value: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    add_weight_gradient: Callable[[View, Tensor, Tensor], None]
    lower_precision: bool = True
    """True if autocast computes it in its own dtype."""


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
        of_all.index_add_(0, index.reshape(-1), rows(gradient).to(of_all.dtype))

    return Product(
        lambda index, weight, _: nn.functional.embedding(index, weight, padding),
        lambda gradient, _: gradient,  # not called: indices have no gradient
        add,
        lower_precision=False,
    )


LINEAR = Product(
    nn.functional.linear,
    lambda gradient, weight: gradient @ weight.conj(),
    lambda view, x, gradient: view.add_product(rows(gradient).T, rows(x).conj()),
)
RIGHT = Product(
    lambda x, weight, bias: x @ weight if bias is None else torch.addmm(bias, x, weight),
    lambda gradient, weight: gradient @ weight.mH,
    lambda view, x, gradient: view.add_product(rows(x).mH, rows(gradient)),
)
RIGHT_OF_EACH = replace(RIGHT, add_weight_gradient=lambda view, x, gradient: view.add_product(x.mH, gradient))
LEFT_OF_EACH = Product(
    lambda x, weight, _: weight @ x,
    lambda gradient, weight: weight.mH @ gradient,
    lambda view, x, gradient: view.add_product(gradient, x.mH),
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
        _leaf: Tensor,
    ) -> Tensor:
        ctx.pending, ctx.product, ctx.view, ctx.version = pending, product, view, view.parameter._version
        ctx.x_shape, ctx.bias_shape = x.shape, None if bias is None else bias.shape
        ctx.save_for_backward(x)
        with torch.autocast(x.device.type, enabled=False):
            dtype = x.dtype if x.is_floating_point() else view.parameter.dtype  # of indices, or complex as x is
            return product.value(x, view.value(dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        product, view, (x,) = ctx.product, ctx.view, ctx.saved_tensors
        _, _, _, of_x, of_bias, of_parameter, _ = ctx.needs_input_grad
        bias = gradient.sum_to_size(ctx.bias_shape) if of_bias else None
        if not ctx.pending.takes_tasks:
            with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
                y = product.value(x, view.of(view.parameter).to(gradient.dtype), None)
            x_gradient, its_own = gradients_of(y, (x, view.parameter), (of_x, of_parameter), gradient)
            return None, None, None, x_gradient, bias, its_own, None
        add = partial(product.add_weight_gradient, view, x.detach(), gradient)
        ctx.pending.add(ProductTask(view.parameter, add))
        found = None
        if of_x:
            check_versions([view.parameter], [ctx.version])
            found = product.input_gradient(gradient, view.value(gradient.dtype)).sum_to_size(ctx.x_shape)
        return None, None, None, found, bias, None, None


class ProductTask:
    """Adds the gradient of a parameter from one product."""

    __slots__ = ("_add", "parameters")

    def __init__(self, parameter: nn.Parameter, add: Callable[[], None]) -> None:
        self.parameters, self._add = (parameter,), add

    def __call__(self) -> None:
        """Add it, unless the parameter has been frozen since."""
        if self.parameters[0].requires_grad:
            self._add()


class Products(TorchFunctionMode):
    """Context of a layer's forward, in which products of its matrices are deferred."""

    def __init__(self, layer: DeferredProducts) -> None:
        super().__init__()
        self._layer = layer
        own = matrices(layer)
        self._names = {id(parameter): name for name, parameter in own.items()}
        self._views = {id(parameter): View(parameter) for parameter in own.values()}
        self._made: dict[int, tuple[Tensor, int]] = {id(p): (p, p._version) for p in own.values()}
        """The tensors of `_views`, which are kept or others would get their ids, and what they were when seen first."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; products and views of own matrices are recognised."""
        kwargs = kwargs or {}
        tracked = [value for value in (*args, *kwargs.values()) if id(value) in self._views]
        if not tracked or not torch.is_grad_enabled() or is_transforming():
            return func(*args, **kwargs)
        unchanged = all(tensor._version == version for tensor, version in map(self._made_of, tracked))
        with suppress(TypeError, KeyError):
            if unchanged and (made := self._product(func, args, kwargs)) is not None:
                return made
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.requires_grad and id(result) not in self._views:
            view = self._view_of(func, args, kwargs) if unchanged else None
            if view is not None:
                self._views[id(result)] = view
                self._made[id(result)] = result, result._version
                return result
        if any(part.requires_grad for part in _tensors(result) if id(part) not in self._views):
            for value in tracked:
                self._layer._deferred[self._names[id(self._views[id(value)].parameter)]] = False
        return result

    def _made_of(self, tracked: Any) -> tuple[Tensor, int]:
        return self._made[id(tracked)]

    def _view_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
        """The view that a function makes of a tracked one; None if it makes something else."""
        view = self._views.get(id(args[0])) if args else None
        if view is None or kwargs:
            return None
        dims = view.parameter.dim() - isinstance(view.index, int)
        if func is Tensor.__getitem__ and view.whole and dims == 3:
            index = args[1]
            if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32):
                if index.dim() == 0:
                    return replace(view, index=int(index))
                entries = index.detach().to(view.parameter.device) % len(view.parameter)  # -1 is the last one
                return replace(view, index=entries) if index.dim() == 1 else None
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
            x, weight = args
            product = _grouped(kwargs["offs"]) if (x.dim(), weight.dim()) == (2, 3) else None
        elif func is nn.functional.embedding:
            x, weight, padding, *options = _arguments(args, kwargs, *_EMBEDDING)
            usual = (padding is None or padding >= 0) and not any(options)
            product = _looked_up(padding) if usual and self._views[id(weight)].whole else None
        elif func in _MATMUL and len(args) == 2 and not kwargs:
            left, right = args
            if id(right) in self._views:
                x, weight = left, right
                product = RIGHT if right.dim() == 2 else RIGHT_OF_EACH if left.dim() > 1 else None
            elif left.dim() > 2 and right.dim() > 1:
                x, weight, product = right, left, LEFT_OF_EACH
        view = self._views.get(id(weight))
        others = any(id(value) in self._views for value in (x, bias))
        if product is None or view is None or others or not isinstance(x, Tensor) or not x.dim():
            return None
        if product in (LINEAR, RIGHT) and weight.dim() != 2:
            return None
        device = x.device.type
        if product.lower_precision and torch.is_autocast_enabled(device):
            x = as_autocast(x, torch.get_autocast_dtype(device))
        elif x.dtype != weight.dtype and func is not nn.functional.embedding:
            return None
        bias = None if bias is None else bias.to(x.dtype)
        self._layer._deferred.setdefault(self._names[id(view.parameter)], True)
        pending = self._layer._weight_gradients
        made: Tensor = _Deferring.apply(pending, product, view, x, bias, view.parameter, ANY_LEAF)  # type: ignore[no-untyped-call]
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
        if splitting is Splitting.NONE or leaves_to_autograd() or not self.may_split():
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


class ByHand(nn.Parameter):
    """A parameter to which autograd adds no gradient: whoever runs the schedule does."""


def matrices(layer: nn.Module) -> dict[str, nn.Parameter]:
    """A layer's own parameters of at least two dimensions that are trained by autograd."""
    own = [(name, p) for name, p in layer._parameters.items() if not isinstance(p, ByHand)]
    return {n: p for n, p in own if is_leaf(p) and not nn.parameter.is_lazy(p) and p.requires_grad and p.dim() > 1}
