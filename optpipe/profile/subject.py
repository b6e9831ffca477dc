"""Subject of a profile: a model from a user's callable, checked, as a chain of stages."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from optpipe.errors import InputError, Issue, TrainingError
from optpipe.models.cut import Unit, joined, parse_cut
from optpipe.models.loss import PerToken, is_counted
from optpipe.partition import name_with_sizes
from optpipe.runtime.loss import Loss, total_loss
from optpipe.runtime.messages import MessageSpec, Spec, Tree, leaves, map_leaves, message_spec, output_spec, spec_text
from optpipe.runtime.module_state import unchanged
from optpipe.runtime.probe import Sample
from optpipe.runtime.shapes import alike
from optpipe.runtime.shared_parameters import with_own_modules
from optpipe.runtime.slices import SlicedLoss, cut_sequences
from optpipe.runtime.stage import Stage, evaluating, first_trained
from optpipe.runtime.weight_gradients import accumulate_in_float32, compiler_failure

RETURNS = "(stages, inputs, targets, loss)"
"""Return value of a model callable: a list of modules, one microbatch and its target, and loss(output, target)."""


DATA_RETURNS = "(inputs, targets), two lists with one entry a microbatch"
"""Return value of a data callable, which is called with the number of a step."""


class ValuesNeededError(Exception):
    """An op that does not run without values as it does with them (`optpipe.profile.without_values`)."""

    def __init__(self, detail: str, place: str) -> None:
        super().__init__(f"{detail}{place}. Maybe measure it, without --machine.")


SAMPLES = 4
"""Most microbatches measured in a profile: enough to detect sizes that depend on the data."""


@dataclass(frozen=True)
class Subject:
    """Model to profile: `stages` are applied in order to `inputs`, one microbatch; `loss(output, targets)` is its mean;
    a loss with a `count` is a `CountedLoss`.

    `more`: inputs and targets of further microbatches, for stages whose sizes depend on the data. `compared`: on how
    many microbatches the stages were found to compute what the uncut model does.
    """

    name: str
    stages: Sequence[nn.Module]
    inputs: Tree
    targets: Tree
    loss: Loss
    more: Sequence[tuple[Tree, Tree]] = ()
    compared: int = 0

    @property
    def microbatch_size(self) -> int:
        """Sequences in the microbatch: the length of its first tensor, 1 for a scalar."""
        first: Tensor = leaves(self.inputs)[0]
        return first.shape[0] if first.dim() else 1


def load_subject(name: str) -> Subject:
    """Call `package.module:callable` without arguments and check the model that it returns.

    The current folder is importable. Raises InputError with the place of the error.
    """
    build = Named("model", name)
    return _checked(build, build())


class Data(Protocol):
    """A data callable, or what reads loaders in its place."""

    name: str

    def __call__(self, step: int, /) -> Any:
        """The batch of a step."""
        ...

    def refuse(self, code: str, detail: str) -> NoReturn:
        """Raise InputError naming it."""
        ...


def batch_of(
    data: Data,
    step: int,
    model: str,
    like: tuple[Tree, Tree],
    microbatches: int | None = None,
    *,
    varies: bool = False,
    hint: str = "",
) -> tuple[list[Tree], list[Tree]]:
    """Call the data callable for a step: inputs and targets, one entry per microbatch, each shaped as in `like`.

    If `varies`, sizes may differ; forms, dtypes and numbers of dimensions may not. `hint`: for sizes that may not.

    Raises InputError for another return value, or another number than `microbatches` (None: any number above 0).
    """
    returned = data(step)
    if not isinstance(returned, tuple) or len(returned) != 2:
        data.refuse("wrong_return", f"returns {type(returned).__name__}, but must return {DATA_RETURNS}.")
    inputs, targets = returned
    for field, entries, tree in (("inputs", inputs, like[0]), ("targets", targets, like[1])):
        if not isinstance(entries, list | tuple):
            data.refuse(
                "wrong_return", f"returns {type(entries).__name__} for {field}, but must return {DATA_RETURNS}."
            )
        expected = len(inputs) or 1 if microbatches is None else microbatches
        if len(entries) != expected:
            detail = f"returns {len(entries)} {field} for step {step}, but a step has {expected} microbatches."
            data.refuse("wrong_count", detail)
        for i, entry in enumerate(entries):
            if entry is None and not isinstance(data, Named):  # a loader's, that other processes read
                continue
            check_tensors(data.name, f"{field}[{i}]", entry, "data")
            own, expected_spec = message_spec(entry), message_spec(tree)
            shape, wanted = spec_text(own), spec_text(expected_spec)
            if shape != wanted and not (varies and alike(own, expected_spec)):
                detail = f"returns {shape} as {field}[{i}] of step {step}, but {model} returns {wanted}."
                data.refuse("wrong_shape", detail + (hint if alike(own, expected_spec) else ""))
    return list(inputs), list(targets)


def with_cut(subject: Subject, cut: str, stages: int | None, field: str) -> Subject:
    """Join the subject's stages to fewer, of so many as the cut says (`parse_cut`)."""
    units = [Unit((f"stages[{n}]",)) for n in range(len(subject.stages))]
    sizes = parse_cut(cut, units, stages, field)
    return replace(subject, name=name_with_sizes(subject.name, sizes), stages=joined(subject.stages, sizes))


def with_samples(subject: Subject, data: str) -> Subject:
    """Replace the subject's microbatch by those of step 0 of the data callable `data`, at most `SAMPLES`."""
    inputs, targets = batch_of(Named("data", data), 0, subject.name, (subject.inputs, subject.targets))
    return sampled(subject, list(zip(inputs, targets, strict=True)))


def sampled(subject: Subject, batch: Sequence[tuple[Tree, Tree]]) -> Subject:
    """Replace the subject's microbatch by the first of a batch, at most `SAMPLES`, without repetitions."""
    different: list[tuple[Tree, Tree]] = []
    for sample in batch[:SAMPLES]:
        if all(sample[0] is not other[0] for other in different):
            different.append(sample)
    (inputs, targets), *more = different
    return replace(subject, inputs=inputs, targets=targets, more=more)


def _checked(build: Named, returned: Any) -> Subject:
    if not isinstance(returned, tuple) or len(returned) != 4:
        kind = type(returned).__name__
        shape = f"{kind} of {len(returned)}" if hasattr(returned, "__len__") else kind
        article = "an" if kind[0] in "aeiou" else "a"
        build.refuse("wrong_return", f"returns {article} {shape}, but must return the tuple {RETURNS}.")
    stages, inputs, targets, loss = returned
    if not isinstance(stages, list | tuple | nn.ModuleList | nn.Sequential) or not len(stages):
        build.refuse("no_stages", f"returns {type(stages).__name__} for stages, but must return a list of modules.")
    for s, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            build.refuse("no_module", f"returns stages[{s}] of type {type(stage).__name__}, but each must be a Module.")
    check_tensors(build.name, "inputs", inputs)
    check_tensors(build.name, "targets", targets)
    if not callable(loss):
        what = "but must return a function of output and target."
        build.refuse("no_loss", f"returns {type(loss).__name__} for loss, {what}")
    _initialise_lazy(build, stages, inputs)
    return Subject(build.name, list(stages), inputs, targets, loss)


def _initialise_lazy(build: Named, stages: Iterable[nn.Module], inputs: Tree) -> None:
    """Run the stages forward once if any of them has lazy parameters, whose shapes their first input tells."""
    stages = list(stages)
    if not any(_lazy_in(stage) for stage in stages):
        return
    received = inputs
    with torch.no_grad(), evaluating(stages):
        for s, stage in enumerate(stages):
            try:
                received = stage(received)
            except Exception as error:
                detail = f"has lazy parameters, but stages[{s}] fails on its first input: {error_text(error)}."
                build.refuse("lazy", detail)
            if lazy := _lazy_in(stage):
                detail = f"returns stages[{s}] with the lazy {lazy[0]}, which its forward does not use. Maybe drop it."
                build.refuse("lazy", detail)


def _lazy_in(stage: nn.Module) -> list[str]:
    named = chain(stage.named_parameters(), stage.named_buffers())
    return [name for name, tensor in named if nn.parameter.is_lazy(tensor)]


class Named:
    """Callable given by name, ``package.module:callable``; `role` names it in errors, such as "model" or "data"."""

    def __init__(self, role: str, name: str) -> None:
        self.role, self.name = role, name
        with _current_folder_importable():
            self._call = self._find()

    def __call__(self, *arguments: Any) -> Any:
        """Call it. Raises InputError with the place in the user's file that raised an exception."""
        with _current_folder_importable():
            try:
                return self._call(*arguments)
            except ValuesNeededError as error:
                self.refuse("needs_values", str(error))
            except Exception as error:
                numbers = ", ".join(str(argument) for argument in arguments if isinstance(argument, int))
                given = f" when called with {numbers}" if numbers else ""
                self.refuse("failed", f"raises {error_text(error)}{given}.")

    def refuse(self, code: str, detail: str) -> NoReturn:
        """Raise InputError naming this callable."""
        refuse(self.name, code, detail, self.role)

    def _find(self) -> Callable[..., Any]:
        module_name, _, attribute = self.name.partition(":")
        if not module_name or not attribute:
            self.refuse("bad_name", "is not of the form package.module:callable. Maybe my_module:my_callable.")
        try:
            module = import_module(module_name)
        except Exception as error:
            maybe = " Maybe run from the folder that it is in." if isinstance(error, ModuleNotFoundError) else ""
            self.refuse("not_imported", f"cannot be imported: {error_text(error)}.{maybe}")
        found = getattr(module, attribute, None)
        if not callable(found):
            callables = [name for name, value in vars(module).items() if callable(value)]
            close = get_close_matches(attribute, callables, n=1)
            maybe = f"you meant {close[0]}" if close else "it is in another module"
            what = "has no" if found is None else "has no callable"
            self.refuse("no_callable", f"module {module_name} {what} {attribute}. Maybe {maybe}.")
        call: Callable[..., Any] = found
        return call


def refuse(name: str, code: str, detail: str, role: str = "model") -> NoReturn:
    """Raise InputError naming a model, or a callable of another role."""
    raise InputError([Issue("", code, detail)], f"{role} {name}")


def check_tensors(name: str, field: str, tree: Any, role: str = "model") -> None:
    """Raise InputError unless `tree` is a tensor, or a tuple, list or dict of them, with at least one."""
    parts = leaves(tree)
    for part in parts:
        if not isinstance(part, Tensor):
            what = "but a tensor, or a tuple, list or dict of them is needed."
            refuse(name, "no_tensor", f"returns {type(part).__name__} in {field}, {what}", role)
    if not parts:
        refuse(name, "no_tensor", f"returns no tensor in {field}.", role)


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code may have changed the path itself
            sys.path.remove(folder)


def error_text(error: Exception) -> str:
    """Text of an exception, with the place in the user's file that raised it."""
    text, frames = str(error), traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, str(frame.lineno)) for frame in frames[-1:]]
    if "\nOriginal Traceback" in text:  # of a process that loads data: a text of many lines
        places = re.findall(r'File "(.+)", line (\d+)', text)[-1:]
        text = text.strip().splitlines()[-1].removeprefix(f"{type(error).__name__}: ")
    outside = not places or places[0][0].startswith("<frozen") or places[0][0] == __file__
    place = "" if outside else f" at {Path(places[0][0]).name}:{places[0][1]}"
    return f"{type(error).__name__}: {text.rstrip('.')}{place}"


GRADIENT_SCALE = 1e-3
"""Standard deviation of sampled gradients: far above denormal numbers, which a CPU computes with slowly."""


@dataclass(frozen=True)
class Chain:
    """Stages profiled by this process, by number, out of `count`; `messages[b]` crosses from stage b to b + 1.

    `batch`: the microbatches with their targets. `samples[s]`: the inputs of stage s with the targets, for the first
    stage those of the batch, for the others the outputs of the preceding stages, kept on the CPU. `loss`,
    `gradient_scale` and `autocast` are those of the stages. Stages before `first_trained` need no backward.
    """

    stages: Mapping[int, Stage]
    count: int
    batch: Sequence[Sample]
    samples: Mapping[int, Sequence[Sample]]
    messages: list[Spec]
    loss: Loss
    gradient_scale: float
    autocast: torch.dtype | None
    first_trained: int = 0

    @property
    def inputs(self) -> Tree:
        """Inputs of the first microbatch."""
        return self.batch[0][0]

    @property
    def targets(self) -> Tree:
        """Targets of the first microbatch."""
        return self.batch[0][1]

    def before(self, stage: int) -> Spec | None:
        """Message from the preceding stage; None for the first stage."""
        return self.messages[stage - 1] if stage else None

    def after(self, stage: int) -> Spec | None:
        """Message to the next stage; None for the last stage."""
        return self.messages[stage] if stage < len(self.messages) else None

    def received(self, stage: int, device: torch.device, sample: int = 0) -> Tree:
        """Input of a stage: the microbatch itself, or a new copy of the preceding stage's message."""
        inputs = self.samples[stage][sample][0]
        return map_leaves(lambda leaf: leaf.to(device, copy=True), inputs) if stage else inputs

    def target(self, stage: int, sample: int = 0) -> Tree | None:
        """Target for the loss of the last stage; None for the others."""
        return self.batch[sample][1] if self.after(stage) is None else None

    def gradient(self, stage: int, device: torch.device) -> Any:
        """Random gradient of a stage's output; None for the last stage, and for integers."""
        after = self.after(stage)
        return None if after is None else map_leaves(lambda spec: random_gradient(spec, device), after)

    def in_slices(self, lengths: Sequence[int]) -> list[Chain]:
        """Chains of the slices of these lengths, all with the same new stages, which take the modules over from these.

        Raises TrainingError if a stage does not take slices, or if a tensor cannot be cut.
        """
        count, counted = len(lengths), isinstance(self.loss, PerToken)
        shares = [length / sum(lengths) for length in lengths]
        loss = self.loss if counted else SlicedLoss(self.loss)
        modules = {s: stage.module for s, stage in self.stages.items()}
        stages = _build_stages(modules, self.count, loss, self.gradient_scale, self.autocast, count, self.first_trained)
        for stage in stages.values():
            stage.sequences.length = sum(lengths)

        def cut_targets(targets: Tree) -> list[Tree]:
            parts = cut_sequences(targets, lengths)
            return parts if counted else list(zip(parts, shares, strict=True))

        def cut_sample(sample: Sample) -> list[Sample]:
            return list(zip(cut_sequences(sample[0], lengths), cut_targets(sample[1]), strict=True))

        def cut_message(message: Spec) -> list[Spec]:
            whole = map_leaves(lambda spec: spec.empty(torch.device("meta")), message)
            return [message_spec(part) for part in cut_sequences(whole, lengths)]

        batch = [cut_sample(sample) for sample in self.batch]
        samples = {s: [cut_sample(sample) for sample in of_stage] for s, of_stage in self.samples.items() if s}
        messages = [cut_message(message) for message in self.messages]
        return [
            replace(
                self,
                stages=stages,
                batch=[of_slices[q] for of_slices in batch],
                samples={s: [of_slices[q] for of_slices in of_stage] for s, of_stage in (samples | {0: batch}).items()},
                messages=[of_slices[q] for of_slices in messages],
                loss=loss,
            )
            for q in range(count)
        ]


def build_chain(
    subject: Subject,
    device: torch.device,
    microbatches: int,
    mine: Collection[int],
    autocast: torch.dtype | None = None,
) -> Chain:
    """Place the stages in `mine` on `device`, and run all stages forward to find the messages between them.

    Stages of other processes are on `device` only for that. `microbatches` scales the loss's gradient; `autocast` is
    that of `Stage`. Raises InputError if a stage fails on the output of the one before, or if the shape of its output
    depends on the microbatch.
    """
    all_inputs, all_targets = zip((subject.inputs, subject.targets), *subject.more, strict=True)
    if is_counted(subject.loss):
        loss = PerToken(subject.loss)
        subject, all_targets = replace(subject, loss=loss), tuple(loss.with_tokens(all_targets))
    batch = [
        (map_leaves(lambda x: x.to(device), inputs), map_leaves(lambda x: x.to(device), targets))
        for inputs, targets in zip(all_inputs, all_targets, strict=True)
    ]
    trees, messages, samples = [inputs for inputs, _ in batch], [], {0: batch}
    modules = with_own_modules(subject.stages)
    with torch.autocast(device.type, autocast) if autocast else nullcontext():
        for s, module in enumerate(modules):
            module.to(device)
            stage = Stage(module, first=s == 0, seed=0)
            trees = [_output(subject, s, stage, received) for received in trees]
            spec, *others = map(output_spec, trees)
            for other in others:
                if other != spec:  # a runtime allocates buffers of one shape
                    texts = f"{spec_text(spec)} for one microbatch but {spec_text(other)} for another"
                    detail = f"stages[{s}] returns {texts}. Maybe pad the microbatches to one shape."
                    refuse(subject.name, "message_varies", detail)
            messages.append(spec)
            if s + 1 in mine:
                sent = [map_leaves(lambda leaf: leaf.to("cpu"), tree) for tree in trees]
                samples[s + 1] = [(tree, targets) for tree, (_, targets) in zip(sent, batch, strict=True)]
            if s not in mine:
                module.to("cpu")
        for output, (_, targets) in zip(trees, batch, strict=True):
            _check_loss(subject, output, targets)
    # Again to the device: moving a stage of another process to the CPU also moved tensors shared with it.
    own = {s: module.to(device) for s, module in enumerate(modules) if s in mine}
    scale = 1 / microbatches
    first = first_trained(modules)
    stages = _build_stages(own, len(modules), subject.loss, scale, autocast, first_trained=first)
    return Chain(stages, len(modules), batch, samples, messages[:-1], subject.loss, scale, autocast, first)


def _build_stages(
    modules: Mapping[int, nn.Module],
    count: int,
    loss: Loss,
    gradient_scale: float,
    autocast: torch.dtype | None,
    slices: int = 1,
    first_trained: int = 0,
) -> dict[int, Stage]:
    stages = {
        s: Stage(
            module,
            first=s == 0,
            loss=loss if s == count - 1 else None,
            gradient_scale=gradient_scale,
            autocast=autocast,
            seed=0,
            slices=slices,
        )
        for s, module in modules.items()
    }
    for s, stage in stages.items():
        accumulate_in_float32(stage.module)
        stage.join(s, (), first_trained)
    return stages


def _output(subject: Subject, s: int, stage: Stage, received: Tree) -> Tree:
    try:
        output = stage.trial(0, received, None)
    except Exception as error:
        what = f"what stages[{s - 1}] returns" if s else "the inputs"
        text = str(error).strip().splitlines() or [""]
        kind: str = stage.module._get_name()  # type: ignore[no-untyped-call]
        if failure := compiler_failure(error):
            detail = f"stages[{s}]: torch.compile fails: {failure}. Maybe train without torch.compile."
            refuse(subject.name, "compiler_failed", detail)
        if isinstance(error, ValuesNeededError):
            refuse(subject.name, "needs_values", f"stages[{s}] ({kind}) {error}")
        refuse(
            subject.name,
            "stage_does_not_fit",
            f"stages[{s}] ({kind}) fails on {what}, {spec_text(message_spec(received))}: {type(error).__name__}: "
            f"{text[0]}. "
            "Maybe a stage is missing, or the sizes of two differ.",
        )
    check_tensors(subject.name, f"the output of stages[{s}]", output)
    return output


def _check_loss(subject: Subject, output: Tree, targets: Tree) -> None:
    with unchanged([subject.loss, getattr(subject.loss, "loss", None)], leaves(output)[0].device), torch.no_grad():
        try:
            total_loss(subject.loss(output, targets))
        except TrainingError as error:
            refuse(subject.name, "loss_no_scalar", str(error))
        except Exception as error:
            shown = f"{spec_text(message_spec(output))} and {spec_text(message_spec(targets))}"
            refuse(subject.name, "loss_does_not_fit", f"loss fails on {shown}: {type(error).__name__}: {error}.")


def random_gradient(spec: MessageSpec, device: torch.device) -> Tensor | None:
    """Random gradient of a message, by a generator of its own; None for integers."""
    generator = torch.Generator(device).manual_seed(0)
    return spec.empty(device).normal_(0, GRADIENT_SCALE, generator=generator) if spec.has_gradient else None
