"""Settings of a training run: frozen pydantic dataclasses. Imports no torch.

The docstring under a field is its text in `--help` and in docs/train.md; its limits are pydantic's (ge, gt, le).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs, ErrorDetails, PydanticKnownError, to_jsonable_python

from optpipe.errors import InputError, Issue, shown
from optpipe.mode_names import OFFLOAD, parse_modes
from optpipe.placement import devices_of_stages

if TYPE_CHECKING:
    import torch

    from optpipe.schedule import Schedule

MAX_NUMBER = 10**30
"""Limit of settings without one of their own: far above any sensible value, far below where floats end."""
MAX_SEED = 2**63 - 1
WARM_UP_STEPS = 3
"""Steps trained before one is recorded, if the run has as many: the first take longer, threads start, memory is got."""
PICTURES = (".png", ".svg", ".pdf", ".html")

DeviceChoice = Literal["auto", "cpu", "cuda"]


def _from_folder_of_file(value: Any, info: ValidationInfo) -> Any:
    """Resolve a path of a configuration file against that file's folder, the validation context."""
    return info.context / value if isinstance(value, str) and info.context is not None else value


def _model_from_folder_of_file(value: Any, info: ValidationInfo) -> Any:
    """Resolve the path in ``hf:FOLDER`` of a configuration file against that file's folder."""
    if not isinstance(value, str) or not value.startswith("hf:"):
        return value
    return f"hf:{_from_folder_of_file(value.removeprefix('hf:'), info)}"


def _cut_from_folder_of_file(value: Any, info: ValidationInfo) -> Any:
    """Resolve the path of a cut of a configuration file against that file's folder."""
    return str(_from_folder_of_file(value, info)) if isinstance(value, str) and value.endswith(".json") else value


InputPath = Annotated[Path, BeforeValidator(_from_folder_of_file), Field(strict=True)]


def _is_schedule(value: Any) -> Any:
    """Refuse what is not a Schedule. It is imported where one is given, since `--help` does without numpy."""
    from optpipe.schedule import Schedule

    if not isinstance(value, Schedule):
        raise PydanticKnownError("is_instance_of", {"class": "Schedule"})
    return value


if TYPE_CHECKING:
    LoadedSchedule = Schedule
else:
    LoadedSchedule = Annotated[Any, PlainValidator(_is_schedule)]


RULES = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
"""Rules of every group. Its validator is built where the first is made: `--help` needs its fields alone."""


@dataclass(frozen=True, config=RULES)
class Group:
    """Settings that belong together: a table of the TOML file, a panel of `--help`.

    Raises InputError that lists every field that is wrong, with its value and limit; then conflicts between fields.
    """

    __pydantic_fields__: ClassVar[Mapping[str, FieldInfo]]

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, ArgsKwargs):  # of another group or a file, which collect what is wrong in all tables
            return handler(data)
        try:
            group = handler(data)
        except ValidationError as error:
            raise InputError(issues_of(cls, error)) from None
        if issues := list(group.conflicts()):
            raise InputError(issues)
        return group

    def to_data(self) -> dict[str, Any]:
        """All settings as JSON values, those of groups in it under their names."""
        data: dict[str, Any] = to_jsonable_python(self, exclude={"schedule"})
        return data

    def conflicts(self) -> Iterator[Issue]:
        """Issues between fields that are right each by itself."""
        yield from ()


class GPTSize(NamedTuple):
    """Width, heads and longest sequence; the schedule decides how many layers there are."""

    width: int
    heads: int
    sequence: int


SIZES = {"tiny": GPTSize(32, 2, 32), "small": GPTSize(256, 8, 128), "medium": GPTSize(384, 6, 256)}
"""Sizes of the GPT, of 13 thousand, 0.8 million and 1.8 million parameters a layer."""


@dataclass(frozen=True)
class GPTShape:
    """The numbers that fix the shape of every parameter."""

    width: int
    heads: int
    sequence: int
    layers: int


@dataclass(frozen=True)
class ModelConfig(Group):
    """The model, cut into the schedule's stages, and its batches."""

    name: Annotated[StrictStr, BeforeValidator(_model_from_folder_of_file)] = "small"
    """GPT of a size (tiny, small, medium), package.module:callable with stages of your own, or hf: with a folder or
    configuration of transformers"""
    cut: Annotated[StrictStr | None, BeforeValidator(_cut_from_folder_of_file)] = None
    """layers of each stage, such as 5,6,6,5, or a JSON file with the names of its modules; default:
    that of the plan, else spread evenly"""
    layers: StrictInt | None = Field(default=None, ge=1, le=2000)
    """blocks of the GPT; default: one per stage"""
    sequence: StrictInt | None = Field(default=None, ge=1, le=MAX_NUMBER)
    """bytes of text in a sequence; default: the model's maximum, for a model of transformers at most 512"""
    microbatch_size: StrictInt = Field(default=4, ge=1, le=4096)
    """sequences in a microbatch"""
    lengths: Literal["equal", "varying"] = "equal"
    """varying: microbatches differ in their sizes, from one to the next and from step to step"""
    length_distribution: Literal["log-normal", "bimodal"] = "log-normal"
    """lengths that are drawn for text: log-normal, or bimodal: one of four about eight times as long as the others"""
    length_file: InputPath | None = None
    """draw them from the lengths in this file instead: a JSON list, or a line for each"""
    length_seed: StrictInt | None = Field(default=None, ge=0, le=MAX_SEED)
    """seed of these draws; default: that of the run"""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """precision of weights and of what is not cast; of bfloat16 the optimizer keeps float32 copies"""
    autocast: Literal["bfloat16"] | None = None
    """precision of matrix products; weights stay float32"""
    tied: StrictBool = False
    """the output head of the GPT uses the embedding's weights, on whichever devices the two are"""
    data: StrictStr | None = None
    """package.module:callable that returns the batch of a step, for stages of your own"""
    loader: StrictStr | None = None
    """package.module:callable that returns, for a replica, a loader of its microbatches, such as a DataLoader"""
    evaluation_loader: StrictStr | None = None
    """the same for the batches to evaluate"""

    @property
    def own(self) -> bool:
        """True if the stages are the user's own."""
        return ":" in self.name and not self.hugging_face

    @property
    def hugging_face(self) -> bool:
        """True for a model of transformers."""
        return self.name.startswith("hf:")

    @property
    def varies(self) -> bool:
        """True if microbatches differ in their sizes."""
        return self.lengths == "varying"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Precision of weights."""
        import torch

        return {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[self.dtype]

    @property
    def torch_autocast(self) -> torch.dtype | None:
        """Precision that autocast computes in, if it is on."""
        import torch

        return torch.bfloat16 if self.autocast else None

    def shape(self, stages: int) -> GPTShape:
        """The GPT that is trained, of a model that is not `own`."""
        size = SIZES[self.name]
        sequence = size.sequence if self.sequence is None else self.sequence
        return GPTShape(size.width, size.heads, sequence, stages if self.layers is None else self.layers)

    def conflicts(self) -> Iterator[Issue]:
        """Own stages have sizes of their own; the GPT has a longest sequence; autocast is from float32."""
        if self.own:
            for name in ("layers", "sequence", "microbatch_size", "dtype", "tied"):
                if (value := getattr(self, name)) != self.__pydantic_fields__[name].default:
                    anyway = ": a parameter that its stages share is one anyway" if name == "tied" else ""
                    detail = f"is {value!r}, but {self.name} decides that{anyway}. Maybe leave it out."
                    yield Issue(name, "meaningless", detail)
        elif self.hugging_face:
            for name in ("layers", "tied"):
                if (value := getattr(self, name)) != self.__pydantic_fields__[name].default:
                    detail = f"is {value!r}, but the configuration of {self.name} decides that. Maybe leave it out."
                    yield Issue(name, "meaningless", detail)
        elif self.name not in SIZES:
            detail = f"is {self.name!r} but must be one of {', '.join(SIZES)}, hf:FOLDER, or package.module:callable."
            yield Issue("name", "unknown", detail)
        else:
            longest = SIZES[self.name].sequence
            if self.sequence is not None and self.sequence > longest:
                yield Issue("sequence", "out_of_range", f"is {self.sequence} but must be from 1 to {longest}.")
            for name in ("data", "loader"):
                if (value := getattr(self, name)) is not None:
                    detail = (
                        f"is {value!r}, but the GPT is trained on text. Maybe name stages of your own in model.name."
                    )
                    yield Issue(name, "meaningless", detail)
        source = self.data or self.loader or (self.name if self.own else None)
        for name in ("length_distribution", "length_file", "length_seed"):
            if (value := getattr(self, name)) == self.__pydantic_fields__[name].default:
                continue
            if not self.varies:
                yield Issue(name, "meaningless", f"is {str(value)!r}, but lengths is 'equal'. Maybe 'varying'.")
            elif source is not None:
                detail = f"is {str(value)!r}, but {source} decides the lengths. Maybe leave it out."
                yield Issue(name, "meaningless", detail)
        if self.length_file is not None and self.length_distribution != "log-normal":
            detail = (
                f"is {str(self.length_file)!r}, but length_distribution is {self.length_distribution!r}. Maybe leave "
                "one out."
            )
            yield Issue("length_file", "conflict", detail)
        if self.data is not None and self.loader is not None:
            yield Issue("loader", "conflict", f"is {self.loader!r}, but data is {self.data!r}. Maybe leave one out.")
        if self.evaluation_loader is not None and self.loader is None:
            detail = f"is {self.evaluation_loader!r}, but it is read beside a loader alone. Maybe add --loader."
            yield Issue("evaluation_loader", "no_loader", detail)
        if self.autocast and self.dtype != "float32":
            detail = (
                f"is {self.dtype!r} with autocast to {self.autocast}, but autocast leaves all but float32 alone. "
                "Maybe leave one of them out."
            )
            yield Issue("dtype", "autocast", detail)


OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class OptimizerConfig(Group):
    """The optimizer of every stage, its learning rate over the steps, and what is done about large gradients."""

    name: StrictStr = "adamw"
    """update rule: adamw, sgd, or package.module:callable that makes one for the named parameters of a stage"""
    learning_rate: StrictFloat = Field(default=1e-3, gt=0, le=MAX_NUMBER)
    """learning rate after warm-up"""
    weight_decay: StrictFloat = Field(default=0.01, ge=0, le=1)
    """decoupled weight decay of AdamW, L2 penalty of SGD"""
    decay_vectors: StrictBool = False
    """weight decay of biases and the weights of norms, too"""
    beta1: StrictFloat = Field(default=0.9, ge=0, le=0.999999)
    """decay of AdamW's first moment; momentum of SGD"""
    beta2: StrictFloat = Field(default=0.999, ge=0, le=0.999999)
    """decay of AdamW's second moment"""
    warm_up_steps: StrictInt = Field(default=0, ge=0, le=10**9)
    """steps in which the learning rate rises from 0"""
    decay: Literal["none", "cosine", "wsd"] = "none"
    """schedule of the learning rate after warm-up, to its floor after the last step; wsd: a line over the last steps"""
    decay_floor: StrictFloat = Field(default=0.0, ge=0, le=1)
    """share of the learning rate that is left after its decay"""
    decay_steps: StrictInt | None = Field(default=None, ge=1, le=10**9)
    """last steps, in which wsd decays the learning rate; default: a fifth of all"""
    clip_norm: StrictFloat | None = Field(default=None, gt=0, le=MAX_NUMBER)
    """largest norm of all gradients together; default: not clipped"""
    optimistic: StrictBool = True
    """under torchrun update weights before the global norm is known, and roll back if clipping or a NaN requires it"""
    on_not_finite: Literal["stop", "skip"] = "stop"
    """what to do if a loss or gradient is infinite or NaN: stop the run, or skip the update"""

    def conflicts(self) -> Iterator[Issue]:
        """SGD has one moment; a floor and steps are those of a decay."""
        if self.name not in OPTIMIZERS and ":" not in self.name:
            detail = f"is {self.name!r} but must be one of {', '.join(OPTIMIZERS)}, or package.module:callable."
            yield Issue("name", "unknown", detail)
        if self.decay == "none" and self.decay_floor:
            yield Issue("decay_floor", "meaningless", f"is {self.decay_floor}, but there is no decay. Maybe cosine.")
        if self.decay != "wsd" and self.decay_steps is not None:
            detail = f"is {self.decay_steps}, but decay is {self.decay}. Maybe wsd."
            yield Issue("decay_steps", "meaningless", detail)
        if self.name == "sgd" and self.beta2 != 0.999:
            yield Issue("beta2", "meaningless", f"is {self.beta2}, but sgd has no second moment. Maybe leave it out.")


@dataclass(frozen=True)
class CheckpointConfig(Group):
    """Folder and interval of checkpoints, and resuming from them; without a folder nothing is kept."""

    folder: InputPath | None = None
    """folder of the checkpoints; under torchrun on a file system that all hosts share"""
    every_steps: StrictInt = Field(default=100, ge=1, le=MAX_NUMBER)
    """steps between two checkpoints; one more is written at the end"""
    keep: StrictInt = Field(default=2, ge=1, le=10**6)
    """newest checkpoints that are kept"""
    asynchronous: StrictBool = False
    """checkpoints are written while training continues, from a copy of the state in the host's memory"""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume from the newest complete checkpoint, if there is any; must: from the newest, which must be
    complete; never: begin anew, in a folder without checkpoints"""

    def conflicts(self) -> Iterator[Issue]:
        """Going on needs something to go on from."""
        if self.folder is None and self.resume == "must":
            yield Issue("resume", "no_folder", "is 'must', but folder does not say from where. Maybe add --checkpoint.")
        if self.folder is None and self.asynchronous:
            detail = "is true, but folder does not say where to write. Maybe add --checkpoint."
            yield Issue("asynchronous", "no_folder", detail)


@dataclass(frozen=True)
class OnlineConfig(Group):
    """Profiling and solving: before training if no schedule is given, and re-solving while training."""

    mode: Literal["off", "first", "online"] = "off"
    """off: train as a given schedule says; first: profile and solve, then train; online: start training immediately,
    re-solve in the background and switch schedules between two steps"""
    devices: StrictInt | None = Field(default=None, ge=1, le=4096)
    """devices of the pipeline, if no schedule is given"""
    placement: StrictStr = "linear"
    """placement of stages on devices: linear, interleaved-2 (or more), v (or v-4)"""
    microbatches: StrictInt | None = Field(default=None, ge=1, le=65536)
    """microbatches in a step; default: two per device"""
    memory_bytes: StrictInt | None = Field(default=None, ge=1, le=MAX_NUMBER)
    """memory of a device, weights and optimizer included; default: no limit, or what a given schedule takes"""
    memory_margin: StrictFloat = Field(default=0.0, ge=0, le=0.9)
    """share of the memory left free, such as 0.1 or 10%, for sizes that depend on the data; so far a measured peak may
    exceed plan and budget"""
    modes: StrictStr = OFFLOAD
    """options for activations that are not kept, by commas, as in 'optpipe profile': offload, full, selective, each
    but the first also with +offload; those of a given schedule are always measured"""
    time_limit_s: StrictFloat = Field(default=30.0, gt=0, le=1e6)
    """time limit of each search in seconds"""
    workers: StrictInt = Field(default=1, ge=1, le=1024)
    """threads of a search during the training"""
    rounds: StrictInt = Field(default=8, ge=1, le=10000)
    """rounds in which each op is measured before the first step"""
    first_step: StrictInt = Field(default=3, ge=0, le=10**9)
    """first training step whose ops are timed"""
    record_steps: StrictInt = Field(default=3, ge=1, le=1000)
    """steps whose ops are timed each time"""
    every_steps: StrictInt = Field(default=100, ge=1, le=10**9)
    """steps between two timings"""
    drift: StrictFloat = Field(default=0.1, gt=0, le=MAX_NUMBER)
    """share by which a device's op times must change before a new solve"""
    least_gain: StrictFloat = Field(default=0.01, ge=0, le=1)
    """share of the step that a new schedule must save to be taken"""
    save: InputPath | None = None
    """output file for the schedule in use at the end"""

    @property
    def on(self) -> bool:
        """True if anything is measured or solved."""
        return self.mode != "off"

    def placed(self, prefix: str = "--") -> tuple[int, ...]:
        """The device of each stage, where no schedule says so. Raises InputError; fields are named after `prefix`."""
        return devices_of_stages(self.placement, self.devices, None, prefix)

    @property
    def mode_names(self) -> Sequence[str]:
        """The names in `modes`."""
        return parse_modes(self.modes, "modes")

    def conflicts(self) -> Iterator[Issue]:
        """Only modes that can be measured; and a new schedule is judged by steps that are not timed op by op."""
        try:
            parse_modes(self.modes, "modes")
        except InputError as error:
            yield from error.issues
        if self.every_steps <= self.record_steps:
            detail = (
                f"is {self.every_steps} but must be above record_steps, which is {self.record_steps}. "
                "Maybe it is meant in steps, not in seconds."
            )
            yield Issue("every_steps", "too_small", detail)


@dataclass(frozen=True)
class OutputConfig(Group):
    """Files that rank 0 writes besides the checkpoints."""

    metrics: InputPath | None = None
    """JSON lines, one for each step"""
    tensorboard: InputPath | None = None
    """folder of TensorBoard scalars"""
    wandb: StrictStr | None = None
    """project of Weights & Biases to log to; WANDB_MODE=offline keeps it in files"""
    callback: StrictStr | None = None
    """package.module:callable that returns a callback, or a list of them, to follow the run"""
    plot: InputPath | None = None
    """picture of the run (.png, .svg, .pdf, .html), drawn at its end"""
    trace: InputPath | None = None
    """output file for a measured step, for 'optpipe trace'"""
    trace_step: StrictInt | None = Field(default=None, ge=0, le=MAX_NUMBER)
    """step to record, counted from 0; default: one after warm-up"""
    profile_steps: StrictStr | None = None
    """steps to profile by torch.profiler, counted from 0, such as 10 or 10-12"""
    profile_folder: InputPath = Path("profile")
    """folder of the profiles, a Chrome trace for each process"""

    @property
    def profiled_steps(self) -> range:
        """Steps to profile."""
        first, _, last = (self.profile_steps or "").partition("-")
        return range(int(first), int(last or first) + 1) if first else range(0)

    def conflicts(self) -> Iterator[Issue]:
        """Pictures have a few formats."""
        if self.plot is not None and self.plot.suffix.lower() not in PICTURES:
            yield Issue("plot", "unknown_format", f"is {str(self.plot)!r} but must end in {', '.join(PICTURES)}.")
        steps = self.profile_steps
        if steps is not None and not (re.fullmatch(r"\d{1,9}(-\d{1,9})?", steps) and self.profiled_steps):
            detail = f"is {steps!r} but must be a step or the first and last of several. Maybe 10-12."
            yield Issue("profile_steps", "no_steps", detail)


@dataclass(frozen=True)
class TrainingConfig(Group):
    """One training run."""

    schedule: LoadedSchedule | None = None
    """the schedule to run, its sizes and times need not match this model; None: it is solved for first"""
    model: ModelConfig = Field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig)
    online: OnlineConfig = Field(default_factory=OnlineConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)
    steps: StrictInt = Field(default=20, ge=1, le=10**9)
    """optimizer steps, those before a resumed checkpoint included"""
    seed: StrictInt = Field(default=0, ge=0, le=MAX_SEED)
    """seed of weights, of the order of data and of random numbers in layers"""
    device: DeviceChoice = "auto"
    """device type; auto: CUDA if available"""
    data_parallel: StrictInt = Field(default=1, ge=1, le=4096)
    """replicas of the pipeline, each with its part of the batch; more than one needs torchrun"""
    accumulate: StrictInt = Field(default=1, ge=1, le=10**6)
    """runs of the schedule in a step, one after the other, whose gradients add up to one update"""
    check: StrictBool = False
    """before training, compare gradients with the plain step and memory with the plan"""
    evaluate: StrictInt = Field(default=0, ge=0, le=10**6)
    """batches to evaluate at the end, forward only: those of the steps that would follow"""
    evaluate_every: StrictInt | None = Field(default=None, ge=1, le=10**9)
    """steps between two evaluations of the same batches; default: at the end alone"""
    timeout_seconds: StrictFloat = Field(default=300.0, gt=0, le=1e6)
    """under torchrun: longest wait for another process in seconds"""

    @property
    def sums_gradients(self) -> bool:
        """True if gradients of a stage are summed over replicas."""
        return self.data_parallel > 1

    def recorded_step(self, first_step: int) -> int | None:
        """Step before which to record one, in a run that begins with `first_step`; None: none is recorded."""
        if self.output.trace_step is None and self.output.trace is not None:
            return min(first_step + WARM_UP_STEPS, self.steps - 1)
        return self.output.trace_step

    def conflicts(self) -> Iterator[Issue]:
        """Conflicts of every group, then between groups: schedule and layers, steps and the step to record."""
        for table in filter(None, GROUPS):
            for issue in getattr(self, table).conflicts():
                yield Issue((table, *issue.loc), issue.code, issue.detail)
        if self.schedule is not None:
            stages = len(self.schedule.problem.stages)
        elif not self.online.on:
            detail = 'is missing. Maybe schedule = "schedule.json", or --solve to have one found.'
            yield Issue("schedule", "missing", detail)
            return
        elif self.online.devices is None:
            yield Issue(("online", "devices"), "missing", "is missing, and no schedule says how many. Maybe 4.")
            return
        else:
            try:
                stages = len(self.online.placed("online."))
            except InputError as error:
                yield from error.issues
                return
        if self.schedule is not None and self.online.on and (n := self.schedule.problem.slice_count) > 1:
            detail = (
                f"cuts sequences into {n} slices, but --online measures and solves for whole ones. "
                "Maybe leave --online out, or begin with a schedule without slices."
            )
            yield Issue("schedule", "slices", detail)
        layers, trace_step = self.model.layers, self.output.trace_step
        if layers is not None and layers < stages:
            detail = (
                f"is {layers} but the schedule has {stages} stages, and each needs a layer. "
                f"Maybe leave layers out, or solve for at most {layers} stages."
            )
            yield Issue(("model", "layers"), "too_few", detail)
        if trace_step is not None and trace_step >= self.steps:
            detail = f"is {trace_step} but must be from 0 to {self.steps - 1}: the run has {self.steps} steps."
            yield Issue(("output", "trace_step"), "out_of_range", detail)
        if self.evaluate and self.model.loader is not None and self.model.evaluation_loader is None:
            detail = f"is {self.evaluate}, but a loader has no batches beyond the run. Maybe add --evaluation-loader."
            yield Issue("evaluate", "no_loader", detail)
        if self.model.varies and self.output.trace is not None:
            detail = (
                f"is {str(self.output.trace)!r}, but model.lengths is 'varying', and a measured step is compared with "
                "a plan for microbatches of planned sizes. Maybe leave one of them out."
            )
            yield Issue(("output", "trace"), "unequal_microbatches", detail)
        if self.evaluate_every is not None and not self.evaluate:
            detail = f"is {self.evaluate_every}, but evaluate is 0. Maybe --evaluate 4: the batches to evaluate."
            yield Issue("evaluate_every", "no_batches", detail)


GROUPS: Mapping[str, type[Group]] = {
    "": TrainingConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "checkpoints": CheckpointConfig,
    "online": OnlineConfig,
    "output": OutputConfig,
}
"""All groups by the name of their table ("": the top of the file), which is also their field in `TrainingConfig`."""

KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def kind_of(info: FieldInfo) -> tuple[type, tuple[str, ...]]:
    """The type of a field, without None, and its choices if it has a few."""
    hint: Any = info.annotation
    if get_origin(hint) in (Union, UnionType):  # of a type and None
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint, ()


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of `Group.to_data` by names such as `optimizer.beta1`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def issues_of(group: type[Group], error: ValidationError) -> list[Issue]:
    """The errors that pydantic found in a group, in our words."""
    return [_issue(group, entry) for entry in error.errors(include_url=False)]


def _issue(group: type[Group], error: ErrorDetails) -> Issue:
    # Where arguments have no name, pydantic counts them.
    loc = [part if isinstance(part, str) else list(group.__pydantic_fields__)[part] for part in error["loc"]]
    home, field = GROUPS[loc[0]] if len(loc) > 1 else group, loc[-1]
    if error["type"] == "unexpected_keyword_argument":
        return Issue(loc, "unknown_field", "is not a setting." + _did_you_mean(home, field))
    if error["type"] == "dataclass_type":
        maybe = f" Maybe {field}.name is meant." if "name" in GROUPS[field].__pydantic_fields__ else ""
        return Issue(loc, "no_table", f"is {shown(error['input'])} but must be a table.{maybe}")
    value, info = error["input"], home.__pydantic_fields__[field]
    kind, choices = kind_of(info)
    limits = {name: getattr(m, name) for m in info.metadata for name in ("ge", "gt", "le") if hasattr(m, name)}
    unlimited, code = limits.get("le") == MAX_NUMBER, "out_of_range"
    match error["type"]:
        case "literal_error":
            code, must = "unknown", f"one of {', '.join(choices)}"
        case "finite_number":
            return Issue(loc, "not_finite", f"is {value} but must be finite.")
        case "greater_than":
            must = f"above {limits['gt']:g}"
        case "greater_than_equal" if unlimited:
            must = f"at least {limits['ge']}"
        case "less_than_equal" | "float_type" if unlimited and type(value) in (int, float):
            must = f"at most {MAX_NUMBER:g}"  # an integer of hundreds of digits is no float
        case "greater_than_equal" | "less_than_equal":
            must = f"from {limits['ge']} to {limits['le']}" if "ge" in limits else f"at most {limits['le']}"
        case _:
            code, must = "wrong_type", KINDS.get(kind, "a Schedule")
    return Issue(loc, code, f"is {shown(value)} but must be {must}.")


def _did_you_mean(group: type[Group], key: str) -> str:
    """Hint for an unknown key of a group, which may be misspelt or in the wrong table."""
    if close := get_close_matches(key, group.__pydantic_fields__, n=1):
        return f" Maybe you meant {close[0]}."
    for table, other in GROUPS.items():
        if key in other.__pydantic_fields__ and key not in GROUPS:
            return f" Maybe it belongs in [{table}]." if table else " Maybe it belongs before the first table."
    return ""
