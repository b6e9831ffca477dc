"""Inputs of layers and head of a model besides hidden states, and its loss, found by running it with placeholders.

The model runs as it is and as a stage behind the first runs it, with layers and modules that return random numbers, on
one short sequence. Autograd then shows which tensors each layer and the logits depend on, and the values show what a
later stage would give them otherwise. No weight is needed, so every process finds the same before it loads any.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor, nn

from optpipe.errors import InputError, Issue
from optpipe.models.absent import Absent, give_buffers, on_meta, pruned_copy
from optpipe.models.loss import IGNORED, LabelLoss
from optpipe.runtime.loss import total_loss
from optpipe.runtime.torch_private import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN_STAGES = "Maybe give stages of your own, as package.module:callable."

TOKENS = 6
"""Length of the sequence, with two tokens of padding at its end."""


@dataclass(frozen=True)
class Cuttable:
    """A whole model on the meta device, its `name` in errors, and the names of its parts.

    `spine`: modules from the model itself, "", to the one with the list `layers`. `before`, `behind`: modules with
    parameters that run before the first layer and after the last. `everywhere`: modules that each stage has.
    `in_tuple`: name of the list of layers, if these return tuples.
    """

    name: str
    model: PreTrainedModel
    spine: Sequence[str]
    layers: str
    before: Collection[str]
    behind: Collection[str]
    everywhere: Collection[str]
    in_tuple: str | None

    @property
    def each_layer(self) -> list[str]:
        """Names of the layers."""
        return self._run([self.layers])

    @property
    def each_before(self) -> list[str]:
        """Names of the modules before the layers that run: those of a list one by one."""
        return self._run(self.before)

    @property
    def each_behind(self) -> list[str]:
        """Names of the modules behind the layers that run."""
        return self._run(self.behind)

    def _run(self, names: Collection[str]) -> list[str]:
        modules = [(name, self.model.get_submodule(name)) for name in names]
        return [
            own
            for name, module in modules
            for own in ([f"{name}.{n}" for n in range(len(module))] if isinstance(module, nn.ModuleList) else [name])
        ]


@dataclass(frozen=True)
class Reads:
    """`main`: stages behind the first read the model's main input too. `shift`: the loss shifts the labels.

    `head`: name of the module whose output the logits are, unchanged; None where they are computed from it.
    """

    main: bool
    shift: bool
    head: str | None


def examine(parts: Cuttable) -> Reads:
    """Run the model with placeholders.

    Raises InputError with the reason where a later stage cannot have what it reads, or for a loss that is not the cross
    entropy of labels; what the model raises where it does not run so.
    """
    with torch.enable_grad():  # which shows dependences, also for a caller who computes without gradients
        whole = _run_whole(parts)
        heads = [next((name for name, made in run.made.items() if made is run.output.logits), None) for run in whole]
        return Reads(_main_is_read(parts, whole), _shift(parts), heads[0] if len({*heads}) == 1 else None)


@dataclass
class _Run:
    """Arguments of each layer by name, the hidden states left out, and the logits. `roots`: tensors drawn, by name.

    `made`: what each other module has returned, where that is one tensor.
    """

    layers: list[str]
    arguments: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)
    hidden: dict[str, Tensor] = field(default_factory=dict)
    roots: list[tuple[str, Tensor]] = field(default_factory=list)
    made: dict[str, Any] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    output: Any = None


class _Drawn(Absent):
    """Placeholder that returns random numbers, the same for a name in each run, of the shapes of the module's output.

    They depend on its floating-point arguments, those of a layer on nothing.
    """

    def __init__(self, stands_for: nn.Module, name: str, run: _Run, *, in_tuple: bool) -> None:
        super().__init__(stands_for, in_tuple=in_tuple)
        self.__dict__ |= {"_name": name, "_run": run}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Random numbers in place of the module's output, noted with the arguments of a layer."""
        name, run = self.__dict__["_name"], self.__dict__["_run"]
        run.calls[name] += 1
        generator = torch.Generator().manual_seed(crc32(f"{name} {run.calls[name]}".encode()))

        def drawn(like: Tensor) -> Tensor:
            if not like.is_floating_point():
                return torch.zeros(like.shape, dtype=like.dtype)
            value = torch.randn(like.shape, generator=generator).to(like.dtype).requires_grad_()
            run.roots.append((name, value))
            return value

        floats = [x for x in tree_leaves((inputs, named)) if isinstance(x, Tensor) and x.is_floating_point()]
        if name in run.layers:
            self._note(run, name, inputs, named, floats)
            return self._returned(drawn(floats[0]))
        none = sum((0 * x.sum() for x in floats), start=torch.zeros(()))

        def dependent(like: Tensor) -> Tensor:
            value = drawn(like)
            return value + none.to(value.dtype) if value.is_floating_point() else value

        made = tree_map_only(Tensor, dependent, on_meta(self.__dict__["_stands_for"], inputs, named))
        run.made[name] = made
        return made

    def _note(
        self, run: _Run, name: str, inputs: Sequence[Any], named: Mapping[str, Any], floats: Sequence[Tensor]
    ) -> None:
        run.hidden[name] = floats[0]
        try:
            bound = inspect.signature(self.__dict__["_stands_for"].forward).bind(*inputs, **named).arguments
        except TypeError:
            bound = {f"argument {n}": value for n, value in enumerate(inputs)} | dict(named)
        run.arguments[name] = {
            key: [x for x in tree_leaves(value) if isinstance(x, Tensor) and x is not floats[0]]
            for key, value in bound.items()
        }


def _hollow(parts: Cuttable, drawn: Collection[str]) -> tuple[Any, _Run]:
    """A copy of the model on the CPU, with placeholders that return random numbers for these modules."""
    model, run = (
        pruned_copy(parts.model, parts.spine, parts.everywhere, in_tuple=parts.in_tuple),
        _Run(parts.each_layer),
    )
    for name in drawn:
        module = parts.model.get_submodule(name)
        in_tuple = parts.in_tuple is not None and name in run.layers
        model.set_submodule(name, _Drawn(module, name, run, in_tuple=in_tuple))
    give_buffers(model)
    any_one = nn.Parameter(torch.zeros((), dtype=parts.model.dtype))  # some models ask for the type of one
    model.get_submodule(parts.spine[-1]).register_parameter("_any", any_one)
    return nn.Module.eval(model), run


def _inputs(parts: Cuttable) -> list[dict[str, Tensor]]:
    """Arguments of the model: the main input alone, and with a mask where it takes one."""
    model = parts.model
    if model.main_input_name == "pixel_values":
        return [{"pixel_values": image_like(model)}]
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    padding = padding if isinstance(padding, int) and padding >= 0 else 3
    ids = torch.tensor([[3 if padding != 3 else 4] * (TOKENS - 2) + [padding] * 2])
    masks = [{"attention_mask": torch.tensor([[1] * (TOKENS - 2) + [0] * 2])}]
    takes = inspect.signature(type(model).forward).parameters
    return [{model.main_input_name: ids} | mask for mask in ({}, *(masks if "attention_mask" in takes else ()))]


def image_like(model: PreTrainedModel) -> Tensor:
    """One image of the size that the configuration says."""
    config: Any = getattr(model.config, "vision_config", model.config)
    height, width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
    return torch.ones(1, config.num_channels, height, width, dtype=model.dtype)


def _run_whole(parts: Cuttable) -> list[_Run]:
    """Runs of the whole model for each of the inputs. Raises InputError where a layer or the head reads too much."""
    runs = []
    for inputs in _inputs(parts):
        model, run = _hollow(parts, [*parts.each_before, *parts.each_layer, *parts.each_behind])
        run.output = model(**inputs, return_dict=True)
        if [*run.arguments] != run.layers or any(run.calls[name] != 1 for name in run.layers):
            _refuse(parts, "layers_repeat", "does not run each of its layers once, one after the other.")
        for before, name in zip(run.layers, run.layers[1:], strict=False):
            for argument, tensors in {"hidden_states": [run.hidden[name]], **run.arguments[name]}.items():
                if read := _dependences(run, tensors) - {before}:
                    what = f"needs what {min(read)} returns in {name} ({argument}), which may be in another stage"
                    _refuse(parts, "reads_earlier", f"{what}.")
        logits = getattr(run.output, "logits", None)
        if not isinstance(logits, Tensor):
            found = ", ".join(run.output.keys())
            _refuse(parts, "no_logits", f"returns no logits but {found}, whose loss is not known.")
        if read := _dependences(run, [logits]) - {run.layers[-1], *parts.each_behind}:
            what = f"needs what {min(read)} returns for its logits, which may be in another stage"
            _refuse(parts, "reads_earlier", f"{what}.")
        runs.append(run)
    return runs


def _dependences(run: _Run, tensors: Sequence[Tensor]) -> set[str]:
    """Names of the modules from whose outputs tensors were computed."""
    found = set()
    for tensor in tensors:
        if tensor.requires_grad:
            roots = [root for _, root in run.roots]
            total = tensor.abs().sum()
            gradients = torch.autograd.grad(total, roots, retain_graph=True, allow_unused=True)
            found |= {name for (name, _), gradient in zip(run.roots, gradients, strict=True) if gradient is not None}
    return found


def _main_is_read(parts: Cuttable, whole: Sequence[_Run]) -> bool:
    """True where a later stage computes the same only from the main input."""
    differing = _difference(parts, whole, main=False)
    if differing is None:
        return False
    if (differing := _difference(parts, whole, main=True)) is not None:
        _refuse(parts, "reads_more", f"needs more in later stages than they get: {differing} would be another.")
    return True


def _difference(parts: Cuttable, whole: Sequence[_Run], *, main: bool) -> str | None:
    """The first argument of a layer, or the logits, in which a later stage differs from the whole model."""
    for inputs, expected in zip(_inputs(parts), whole, strict=True):
        for base in (False, True):
            model, run = _hollow(parts, [*parts.each_layer, *parts.each_behind])
            states = torch.randn(expected.hidden[expected.layers[-1]].shape).to(parts.model.dtype)
            taken = dict(inputs)
            if not main:
                name = parts.model.main_input_name
                del taken[name]
                takes = inspect.signature(type(parts.model).forward).parameters
                taken["inputs_embeds" if "inputs_embeds" in takes else name] = states
            try:
                run.output = (model.base_model if base else model)(**taken, return_dict=True)
            except Exception as error:
                return f"a stage, which ends in {type(error).__name__}: {str(error).splitlines()[:1]}"
            if states._version:
                _refuse(parts, "in_place", "changes its embeddings in place, and so what a later stage receives.")
            for name in expected.layers[1:]:
                own, theirs = run.arguments[name], expected.arguments[name]
                for argument in own.keys() | theirs.keys():
                    if not _equal(own.get(argument, []), theirs.get(argument, [])):
                        return f"{argument} of {name}"
            if not base and not _equal([run.output.logits], [expected.output.logits]):
                return "logits"
    return None


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(some, others, strict=True)
    )


def _shift(parts: Cuttable) -> bool:
    """True if the model's own loss shifts the labels. Raises InputError where it is no cross entropy of labels."""
    [inputs, *_] = _inputs(parts)

    def run(**labels: Tensor) -> Any:
        model, _ = _hollow(parts, [*parts.each_before, *parts.each_layer, *parts.each_behind])
        return model(**inputs, **labels, return_dict=True)

    with torch.no_grad():
        logits = run().logits
        labels = torch.randint(logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(0))
        if labels.numel() > 2:
            labels.view(-1)[1] = IGNORED
        try:
            loss = run(labels=labels).loss
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            what = f"{type(error).__name__}: {lines[0].rstrip('.')}"
            _refuse(parts, "no_loss", f"has no loss of labels that are numbers of classes: {what}.")
        found = {shift: LabelLoss(shift=shift) for shift in (True, False)}
        values = {shift: own(logits, labels, torch.tensor(float(own.count(labels)))) for shift, own in found.items()}
    same = [
        shift
        for shift, value in values.items()
        if isinstance(loss, Tensor) and torch.allclose(total_loss(value).float(), loss.float(), rtol=1e-3)
    ]
    if not same:
        what = "has a loss that is not the mean cross entropy of its labels, which alone is trained"
        _refuse(parts, "other_loss", f"{what}.")
    return same[0]


def _refuse(parts: Cuttable, code: str, detail: str) -> NoReturn:
    detail = f"is {type(parts.model).__name__}, which {detail} {OWN_STAGES}"
    raise InputError([Issue("", code, detail)], parts.name)
