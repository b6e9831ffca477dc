"""Models of transformers as stages: cut by layers, each process with the weights of its own stages alone.

Every stage is the model itself, whose modules of other stages are replaced by ones that pass on what they receive
(`Absent`). So masks, rotary embeddings and the like are computed by the model's own code, in each stage that needs
them. The whole model stands on the meta device, where it takes no memory. Parameters that it ties stay one.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from optpipe.errors import InputError, Issue, TrainingError, needs_extra
from optpipe.models.cut import Unit, evenly, parse_cut, ranges
from optpipe.models.loss import LabelLoss
from optpipe.runtime.messages import Tree
from optpipe.runtime.slices import SliceContext, slice_context
from optpipe.runtime.stage import evaluating

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PREFIX = "hf:"
"""Begin of the name of such a model, before the path of its folder or configuration."""

PART = "model."
"""Prefix of the names of a stage's parameters, before the names that the model gives them."""

_OWN_STAGES = "Maybe give stages of your own, as package.module:callable."

SLICED = ("gpt2", "llama", "qwen2", "qwen3")
"""Kinds of models (`model_type`) whose attention may run slice by slice."""

HIDDEN, EXPERTS = "hidden_states", "experts"
"""Entries of a message that is more than the hidden states."""


class HuggingFace:
    """A model of transformers, in a folder with `config.json` and weights, or drawn at random for a configuration.

    `units` are its layers, the first with all that runs before it, and last the norm and head behind them. `cut` is how
    many of them each of `stages` stages has, or the names of their modules (`parse_cut`); None spreads the layers
    evenly and leaves norm and head to the last stage. Errors about the cut name `cut_field`.

    Raises InputError where the folder, the configuration or the cut is wrong.
    """

    def __init__(
        self,
        name: str,
        stages: int | None = None,
        cut: str | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        cut_field: str = "cut",
    ) -> None:
        self.name, self._seed, self._dtype = name, seed, dtype
        self._path = Path(name.removeprefix(PREFIX))
        with needs_extra("hf", "models of transformers"):
            import transformers
        self.config = self._read_config()
        self.kind = self._class()
        self.weights = sorted(self._path.glob("*.safetensors")) if self._path.is_dir() else []
        if (
            not self.weights
            and self._path.is_dir()
            and (others := [*self._path.glob("*.bin"), *self._path.glob("*.pt")])
        ):
            what = f"has weights in {others[0].name}, which are not read, and none in safetensors"
            self._refuse("no_safetensors", f"{what}. Maybe save it anew, by save_pretrained of transformers.")
        with torch.device("meta"), _default_dtype(dtype):
            self._whole = self.kind(self._run_config())
        self._spine, self._layers = self._find_layers()
        self.units = self._find_units()
        layers = len(self.units) - 1
        if cut is not None:
            self.sizes = parse_cut(cut, self.units, stages, cut_field)
        elif stages is None:
            self.sizes = (1,) * len(self.units)
        elif layers < stages:
            self._refuse("too_few_layers", f"has {layers} layers, but there are {stages} stages. Maybe fewer.")
        else:
            self.sizes = tuple(n + (s == stages - 1) for s, n in enumerate(evenly(layers, stages)))
        self.causal = self.kind.__name__ in _names(transformers.models.auto.modeling_auto)
        self._balanced = self._balancing()

    @property
    def vocabulary(self) -> int | None:
        """Entries of the vocabulary; None for a model that reads no tokens."""
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        return size if isinstance(size, int) and self._whole.main_input_name == "input_ids" else None

    @property
    def longest(self) -> int | None:
        """The longest sequence that the configuration allows, if it says so."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def takes_slices(self) -> bool:
        """True if the stages may run slices of sequences: full causal attention that reads keys from a cache."""
        config = self.config.get_text_config()
        full = {*(getattr(config, "layer_types", None) or ())} <= {"full_attention"}
        return self.causal and self._balanced is None and full and config.model_type in SLICED

    @property
    def loss(self) -> LabelLoss:
        """Cross entropy by tokens, and the model's auxiliary loss of experts where the configuration asks for it."""
        return LabelLoss(shift=self.causal, coefficient=self._balanced.coefficient if self._balanced else 0.0)

    def build_stages(self, own: Collection[int] | None = None, sample: Tree | None = None) -> list[nn.Module]:
        """New stages on the CPU, equal at each call; those not in `own` (None: all are) stay on the meta device.

        Parameters that the model ties are one parameter in all stages. With a `sample`, a microbatch, the stages, which
        must all be this process's, are run and compared with the model before it is cut. Raises InputError where they
        compute something else.
        """
        with torch.device("meta"), _default_dtype(self._dtype):
            whole = self.kind(self._run_config())
        parts = ranges(self.sizes)
        stages: list[nn.Module] = [self._stage(whole, s) for s in range(len(parts))]
        wanted = [u for s, part in enumerate(parts) if own is None or s in own for u in part]
        if wanted:
            valued = self._with_values({name for u in wanted for name in self.units[u].modules})
            _give_values(stages, whole, valued)
            if sample is not None:
                self._compare(stages, valued, sample)
            for s, stage in enumerate(stages):
                if own is None or s in own:
                    _check_complete(self.name, s, stage)
        return stages

    def alike(self) -> list[int]:
        """For each unit the first that is equal to it but for the values of its weights."""
        types = getattr(self.config.get_text_config(), "layer_types", None) or ()
        first: dict[Any, int] = {}
        found = []
        for u, unit in enumerate(self.units):
            modules = [self._whole.get_submodule(name) for name in unit.modules]
            shapes = [[(n, p.shape, p.dtype) for n, p in module.named_parameters()] for module in modules]
            kind = types[u] if u < len(types) else None
            found.append(first.setdefault(f"{[type(m) for m in modules]} {shapes} {kind}", u))
        return found

    def identity(self) -> dict[str, Any]:
        """JSON values that tell this model from others, its cut aside."""
        data = json.loads(self.config.to_json_string(use_diff=False))
        volatile = ("_name_or_path", "transformers_version", "use_cache")
        data = {key: value for key, value in data.items() if key not in volatile}
        files = {path.name: path.stat().st_size for path in self.weights}
        return {"model": self.kind.__name__, "configuration": data, "weights": files, "dtype": str(self._dtype)}

    def _compare(self, stages: Sequence[nn.Module], uncut: Any, sample: Tree) -> None:
        """Run a microbatch through stages and uncut model: layers of some hand on more than hidden states."""
        message = sample
        with torch.no_grad(), evaluating([*stages, uncut]):
            expected = (uncut(**sample) if isinstance(sample, dict) else uncut(sample)).logits
            for stage in stages:
                message = stage(message)
        logits = message["logits"] if isinstance(message, dict) else message
        difference, scale = float((logits - expected).abs().max()), float(expected.abs().max())
        if not difference <= scale * torch.finfo(self._dtype).eps ** 0.5:
            self._refuse(
                "cut_differs",
                f"computes something else when it is cut: its logits differ by {difference:.2g} of {scale:.2g}. "
                f"{_OWN_STAGES}",
            )

    def _read_config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        file = self._path / "config.json" if self._path.is_dir() else self._path
        if not file.is_file():
            self._refuse(
                "not_found",
                f"has no configuration at {file}. Maybe it is the name of a model on the Hugging Face hub: then "
                "download it first, with 'hf download NAME --local-dir FOLDER'.",
            )
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(str(file), local_files_only=True)
        except Exception as error:
            self._refuse("no_config", f"has a configuration that transformers does not read: {_line(error)}")
        return config

    def _run_config(self) -> PretrainedConfig:
        """A copy for the model that runs: without the cache of `generate`, and the losses of its own."""
        config = copy.deepcopy(self.config)
        config.use_cache = False
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False
        return config

    def _class(self) -> type[PreTrainedModel]:
        """The class that the configuration names, or else the causal language model of its kind."""
        import transformers

        names = self.config.architectures or []
        found = getattr(transformers, names[0], None) if names else None
        if found is None and not names:
            found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self.config), None)
        if found is None:
            what = f"architectures {names}, which transformers does not have" if names else "no causal language model"
            self._refuse("no_model", f"is a configuration of {self.config.model_type} with {what}.")
        kind: type[PreTrainedModel] = found
        return kind

    def _find_layers(self) -> tuple[list[str], str]:
        """The modules from the whole model down to the one with the layers, and the name of the list of layers."""
        count = getattr(self.config.get_text_config(), "num_hidden_layers", None)
        lists = [
            name
            for name, module in self._whole.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        if len(outer) != 1:
            found = f"{len(outer)} lists of modules are that long" if outer else "no list of modules is that long"
            self._refuse(
                "no_layers",
                f"is {self.kind.__name__} with num_hidden_layers {count}, but {found}, so it cannot be cut by layers. "
                f"{_OWN_STAGES}",
            )
        parts = outer[0].split(".")
        return [".".join(parts[:n]) for n in range(len(parts))], outer[0]

    def _find_units(self) -> list[Unit]:
        """Each layer; with the first what runs before, with the last one what runs behind.

        Modules without parameters that run before (rotary embeddings) are in every stage, dropout excepted: it is for
        embeddings alone.
        """
        order = self._order_of_run()
        layers = [n for n, name in enumerate(order) if name.startswith(f"{self._layers}.")]
        first, last = min(layers), max(layers)
        before: list[str] = []
        behind: list[str] = []
        for parent, child in zip(self._spine, [*self._spine[1:], self._layers], strict=True):
            module = self._whole.get_submodule(parent)
            if direct := next(iter(module._parameters), None):
                detail = f"has the parameter {parent or self.kind.__name__}.{direct} beside its layers."
                self._refuse("loose_parameter", f"{detail} {_OWN_STAGES}")
            seen = False
            for name, other in module.named_children():
                full = f"{parent}.{name}" if parent else name
                seen = seen or full == child
                if full == child:
                    continue
                runs = [n for n, ran in enumerate(order) if ran == full]
                held = next(other.parameters(), None) is not None
                if held and any(first < n < last for n in runs):
                    self._refuse("between", f"runs {full} between its layers, so it cannot be cut. {_OWN_STAGES}")
                if min(runs, default=-1) > last or (not runs and seen and held):
                    behind.append(full)
                elif held or isinstance(other, nn.Dropout):
                    before.append(full)
        behind.sort(key=lambda name: order.index(name) if name in order else len(order))
        count = len(self._whole.get_submodule(self._layers))  # type: ignore[arg-type]
        names = [(f"{self._layers}.{n}",) for n in range(count)]
        return [Unit((*before, *names[0])), *map(Unit, names[1:]), Unit(tuple(behind))]

    def _order_of_run(self) -> list[str]:
        """The layers and the modules beside them in the order in which the model runs them.

        Found by running the model on two tokens, with all of these absent: with layers that return hidden states, or,
        where those do not reach the last layer so, that return them in a tuple. Where it runs in neither way, found by
        its pipeline plan.
        """
        self._in_tuple: str | None = None
        order, error = self._probe()
        if error is not None:
            self._in_tuple = self._layers
            in_tuples, other = self._probe()
            if other is None:
                order, error = in_tuples, None
            else:
                self._in_tuple = None
        if error is not None:
            plan = list(getattr(self.config.get_text_config(), "base_model_pp_plan", None) or ())
            trunk, _, own = self._layers.rpartition(".")
            if own not in plan:
                what = "does not run with layers that hand on one tensor, and has no pipeline plan"
                self._refuse("not_run", f"{what}: {_line(error)} {_OWN_STAGES}")
            order = [f"{trunk}.{name}" + (".0" if name == own else "") for name in plan]
        if not any(name.startswith(f"{self._layers}.") for name in order):
            self._refuse("no_layers", f"does not run {self._layers}. {_OWN_STAGES}")
        return order

    def _probe(self) -> tuple[list[str], Exception | None]:
        """The order of a run in which all are absent, and why it failed, if it did."""
        order: list[str] = []
        shapes: set[torch.Size] = set()
        model = _pruned_copy(self._whole, self._spine, (), Probe, self._in_tuple)
        blocks: Any = model.get_submodule(self._layers)
        for block in blocks:
            block.register_forward_pre_hook(lambda _, inputs: shapes.update(x.shape for x in inputs[:1]))
        for parent in (*self._spine, self._layers):
            for name, child in model.get_submodule(parent).named_children():
                full = f"{parent}.{name}" if parent else name
                if full not in self._spine:
                    child.register_forward_hook(lambda *_, name=full: order.append(name))
        x = torch.zeros(1, 2, dtype=torch.int64)
        if self._whole.main_input_name == "pixel_values":
            size, channels = self.config.image_size, self.config.num_channels
            x = torch.zeros(1, channels, size, size, dtype=self._dtype)
        try:
            with torch.no_grad():
                nn.Module.eval(model)(x)
            if len(shapes) > 1:  # an entry of the hidden states was taken for the first of a tuple
                raise ValueError("layers receive tensors of different shapes")
        except Exception as error:
            return order, error
        return order, None

    def _stage(self, whole: PreTrainedModel, s: int) -> ModelStage:
        part = ranges(self.sizes)[s]
        own = {name for u in part for name in self.units[u].modules}
        model = _pruned_copy(whole, self._spine, own | self._everywhere(whole), in_tuple=self._in_tuple)
        last = s == len(self.sizes) - 1
        stage = ModelStage(
            model, self._layers, part, last=last, balanced=self._balanced, in_tuple=self._in_tuple is not None
        )
        stage.takes_slices = self.takes_slices
        return stage

    def _everywhere(self, whole: PreTrainedModel) -> set[str]:
        """Modules beside the layers that belong to no unit: those without parameters."""
        cut = {name for unit in self.units for name in unit.modules}
        parents = [(parent, whole.get_submodule(parent)) for parent in self._spine]
        names = {
            f"{parent}.{name}" if parent else name for parent, module in parents for name, _ in module.named_children()
        }
        return names - cut - {*self._spine, self._layers}

    def _with_values(self, modules: Collection[str]) -> PreTrainedModel:
        """A model with values for these modules and those that their parameters are tied to; the others are absent."""
        keep = {*modules, *self._everywhere(self._whole)}
        units = [name for unit in self.units for name in unit.modules]
        for names in _tied_names(self._whole):
            holders = [next((u for u in units if name.startswith(f"{u}.")), None) for name in names]
            if keep.intersection(holders):
                keep.update(name for name in holders if name)
        spine, wanted = self._spine, keep

        def build(model: Any, config: PretrainedConfig, *args: Any, **options: Any) -> None:
            self.kind.__init__(model, config, *args, **options)
            _prune(model, spine, wanted, Absent)

        # Of the same name, by which transformers finds how weights in files are named.
        members = {"__init__": build, "_keys_to_ignore_on_load_unexpected": [".*"], "__module__": self.kind.__module__}
        kind: Any = type(self.kind.__name__, (self.kind,), members)
        return self._loaded(kind) if self.weights else self._drawn(kind)

    def _loaded(self, kind: Any) -> PreTrainedModel:
        import transformers

        level, bar = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model, info = kind.from_pretrained(
                str(self._path),
                config=self._run_config(),
                dtype=self._dtype,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:
            self._refuse("not_loaded", f"has weights that transformers does not load: {_line(error)}")
        finally:
            transformers.logging.set_verbosity(level)
            if bar:
                transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        missing = sorted({*info["missing_keys"]})
        if missing:
            self._refuse("weights_missing", f"has no weights for {', '.join(missing[:4])}. Maybe a file is missing.")
        loaded: PreTrainedModel = model
        return loaded

    def _drawn(self, kind: Any) -> PreTrainedModel:
        """Weights as the model draws them; those of a module depend on the seed and its name alone, not on the cut."""
        with torch.device("meta"), _default_dtype(self._dtype):
            model: Any = kind(self._run_config())
        model.to_empty(device="cpu")
        model.tie_weights(recompute_mapping=False)
        tied = {name for names in _tied_names(model) for name in names}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for name, module in _inside_out(model):
                torch.manual_seed(int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:7]))
                model._init_weights(module)
                for own, parameter in module.named_parameters(name, recurse=False):
                    if own in tied:
                        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # its second module would draw other values
        drawn: PreTrainedModel = model
        return drawn

    def _balancing(self) -> Balancing | None:
        """Inputs of the auxiliary loss of the model's experts, where its configuration adds one."""
        if not getattr(self.config, "output_router_logits", False):
            return None
        recorder = (getattr(self.kind, "_can_record_outputs", None) or {}).get("router_logits")
        experts, top_k = (getattr(self._whole, name, None) for name in ("num_experts", "num_experts_per_tok"))
        coefficient: Any = getattr(self._whole, "router_aux_loss_coef", 0.0)
        module = sys.modules[self.kind.__module__]
        if recorder is None or experts is None or top_k is None or not hasattr(module, "load_balancing_loss_func"):
            self._refuse(
                "no_balancing",
                f"sets output_router_logits, but how {self.kind.__name__} balances its experts is not known. Maybe "
                "leave it false, and add the loss in stages of your own.",
            )
        return Balancing(int(experts), int(top_k), float(coefficient), recorder)

    def _refuse(self, code: str, detail: str) -> NoReturn:
        raise InputError([Issue("", code, detail)], f"model {self.name}")


def save_weights(identity: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model as transformers does: configuration and safetensors, for `from_pretrained`.

    `identity` is that of `HuggingFace`, `weights` has parameters and buffers by their names in the model, those that it
    ties at least once. Raises InputError where a weight is missing.
    """
    with needs_extra("hf", "models of transformers"):
        import transformers
    data = dict(identity["configuration"])
    config: Any = transformers.CONFIG_MAPPING[data["model_type"]].from_dict(data)
    dtype: torch.dtype = getattr(torch, str(identity["dtype"]).removeprefix("torch."))
    with torch.device("meta"), _default_dtype(dtype):
        model: Any = getattr(transformers, str(identity["model"]))(config)
    values = dict(weights)
    for names in _tied_names(model):
        known = next((values[name] for name in names if name in values), None)
        values |= {name: known for name in names if known is not None}
    wanted = model.state_dict().keys()
    if missing := sorted(wanted - values.keys()):
        raise InputError([Issue("", "weights_missing", f"has no {missing[0]}. Maybe a file is missing.")])
    model.load_state_dict({name: values[name] for name in wanted}, assign=True)
    model.tie_weights(recompute_mapping=False)
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


class Balancing:
    """The auxiliary loss of Switch Transformer over all layers of a model, as transformers computes it.

    It is no sum over layers, so stages hand on what it is made of: for each expert the number of tokens that chose it
    and the sum of its probabilities, and the number of rows; a float32 tensor of shape (2 * experts + 1,).
    """

    def __init__(self, experts: int, top_k: int, coefficient: float, recorder: Any) -> None:
        self.experts, self.top_k, self.coefficient, self._recorder = experts, top_k, coefficient, recorder

    def routers(self, model: nn.Module) -> Iterator[nn.Module]:
        """The modules of the model that choose experts."""
        kind = getattr(self._recorder, "target_class", self._recorder)
        part = getattr(self._recorder, "layer_name", None)
        for name, module in model.named_modules():
            if isinstance(module, kind) and (part is None or part in name):
                yield module

    def logits_of(self, output: Any) -> Tensor:
        """The logits in the output of a router."""
        logits: Tensor = output[getattr(self._recorder, "index", 0)] if isinstance(output, tuple) else output
        return logits

    def sums(self, logits: Sequence[Tensor], mask: Tensor | None, before: Tensor) -> Tensor:
        """Add those of the layers of a stage to those of the stages before."""
        chosen, probabilities, rows = torch.split(before, [self.experts, self.experts, 1])
        for layer in logits:
            shares = torch.softmax(layer, dim=-1).float()
            weight = shares.new_ones(len(shares)) if mask is None else mask.reshape(-1).to(shares.dtype)
            picked = torch.topk(shares, self.top_k, dim=-1).indices.reshape(-1)
            counts = torch.zeros_like(chosen).scatter_add(0, picked, weight.repeat_interleave(self.top_k))
            chosen, probabilities = chosen + counts, probabilities + (shares * weight.unsqueeze(-1)).sum(0)
            rows = rows + weight.sum()
        return torch.cat([chosen, probabilities, rows])

    def loss(self, sums: Tensor) -> Tensor:
        """The loss of a microbatch: 1 where all experts are chosen alike, and their number times `top_k` at most."""
        chosen, probabilities, rows = torch.split(sums, [self.experts, self.experts, 1])
        loss: Tensor = (chosen / rows * (probabilities / rows)).sum() * self.experts
        return loss


class Absent(nn.Module):
    """Stands where a module of another stage does, and passes on its first argument; zero for an embedding to be added.

    Attributes are those of the module that it stands for, which stays on the meta device. With `in_tuple` what it
    passes on is alone in a tuple, in which layers of some models return it.
    """

    def __init__(self, stands_for: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__()
        self.__dict__["_stands_for"] = stands_for  # not a child
        self.__dict__["in_tuple"] = in_tuple

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_stands_for":
                raise
            return getattr(self.__dict__["_stands_for"], name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The first argument; nothing to be added for an embedding."""
        if isinstance(self.__dict__["_stands_for"], nn.Embedding):
            return torch.zeros((), dtype=self.weight.dtype)
        return self._returned(inputs[0] if inputs else next(iter(named.values())))

    def _returned(self, value: Any) -> Any:
        return (value,) if self.__dict__["in_tuple"] else value

    def __repr__(self) -> str:
        return f"{type(self.__dict__['_stands_for']).__name__} of another stage"


class Probe(Absent):
    """Stands for a module while the order of modules is found: an embedding gives zeros of its shape."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The first argument, or embeddings of zero."""
        received, module = inputs[0] if inputs else next(iter(named.values())), self.__dict__["_stands_for"]
        if isinstance(module, nn.Embedding) and isinstance(received, Tensor):
            return torch.zeros(*received.shape[:2], module.embedding_dim, dtype=module.weight.dtype)
        return self._returned(received)


class Received(Absent):
    """Stands for the layer before a stage's own: returns what the stage has received, whatever came before it."""

    def __init__(self, stands_for: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__(stands_for, in_tuple=in_tuple)
        self.__dict__["received"] = None

    def forward(self, *_inputs: Any, **_named: Any) -> Any:
        """The hidden states from the stage before."""
        return self._returned(self.__dict__["received"])


class ModelStage(nn.Module):
    """The units `part` of a model that has all others absent; `last` returns logits.

    The first stage takes the model's main input, or a dict of its arguments. Further arguments (masks, positions) go on
    to the stages behind, beside the hidden states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: str,
        part: range,
        *,
        last: bool,
        balanced: Balancing | None,
        in_tuple: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.takes_slices = False
        self._first, self._last, self._balanced = part.start == 0, last, balanced
        arguments = inspect.signature(type(model).forward).parameters
        self._main = model.main_input_name
        self._takes = self._main if self._first or "inputs_embeds" not in arguments else "inputs_embeds"
        blocks: Any = model.get_submodule(layers)
        self._before: list[Received] = []
        if not self._first:
            absent = blocks[part.start - 1]
            received = Received(absent.__dict__["_stands_for"], in_tuple=absent.in_tuple)
            blocks[part.start - 1] = received
            self._before.append(received)  # in a list, so that it is registered once
        self._sent: Tensor | None = None
        own = [blocks[n] for n in part if n < len(blocks)]
        for block in own:
            block.register_forward_hook(_refuse_tuples if not in_tuple else _refuse_tensors)
        if not last:
            own[-1].register_forward_hook(self._send)
        self._heard: list[Tensor] | None = None
        self._running = False
        if balanced is not None:
            for router in balanced.routers(model):
                router.register_forward_hook(self._hear)

    def forward(self, received: Tree) -> Tree:
        """The message to the next stage: hidden states, or a dict with them; of the last stage logits."""
        message = dict(received) if isinstance(received, dict) else {self._main if self._first else HIDDEN: received}
        sums = message.pop(EXPERTS, None)
        states = message.pop(self._main if self._first else HIDDEN)
        cached: dict[str, Any] = {}
        if slice_context() is not None:
            if message:
                raise TrainingError(
                    f"the batch has {', '.join(sorted(message))} beside {self._main}, which slices of sequences do not "
                    "take yet. Maybe leave it out, or solve without slices."
                )
            cached["past_key_values"] = _slice_cache()()
        for before in self._before:
            before.__dict__["received"] = states
        heard: list[Tensor] | None = [] if self._balanced else None
        self._heard, self._running = heard, True
        model: Any = self.model if self._last else self.model.base_model
        try:
            found = model(**{self._takes: states}, **message, **cached, return_dict=True)
            result: Tree = found.logits if self._last else self._sent
        finally:
            self._heard, self._sent, self._running = None, None, False
            for before in self._before:
                before.__dict__["received"] = None
        if self._balanced is not None and heard is not None:
            if sums is None:
                sums = torch.zeros(2 * self._balanced.experts + 1, device=result.device)
            sums = self._balanced.sums(heard, message.get("attention_mask"), sums)
            if self._last:
                return {"logits": result, "auxiliary": self._balanced.loss(sums)}
            message[EXPERTS] = sums
        return {HIDDEN: result, **message} if message and not self._last else result

    def _send(self, _layer: nn.Module, _inputs: Any, output: Any) -> None:
        """Note the output of the last layer within `forward`: what the model computes behind it is not this stage's."""
        if self._running:
            self._sent = output[0] if isinstance(output, tuple) else output

    def _hear(self, _router: nn.Module, _inputs: Any, output: Any) -> None:
        """Note the logits of a router within `forward`; a checkpoint that runs it again does so without effect."""
        if self._heard is not None and self._balanced is not None:
            self._heard.append(self._balanced.logits_of(output))


@functools.cache
def _slice_cache() -> Any:
    """The class of caches that hand the keys and values of a layer to the slice that runs (`slice_context`)."""
    from transformers import Cache

    def running() -> SliceContext:
        context = slice_context()
        assert context is not None, "stages give the cache to slices alone"
        return context

    class SliceCache(Cache):
        """Keeps nothing itself: a block that is recomputed asks the same cache again."""

        def __init__(self) -> None:
            super().__init__(layers=[])

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            """Keys and values of a layer, of all slices so far."""
            keys, values = running().extend(layer_idx, key_states, value_states)
            return keys, values

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            """Positions before the slice."""
            return running().offset

        def get_query_offset(self, *_: Any, **__: Any) -> int:
            """Position of the first query: that of the slice."""
            return running().offset

        def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
            """Number of keys, and the position of the first."""
            context = running()
            return context.offset + context.length, 0

    return SliceCache


def _refuse_tensors(layer: nn.Module, _inputs: Any, output: Any) -> None:
    if not isinstance(output, tuple) or not isinstance(output[0], Tensor):
        kinds = type(layer).__name__, type(output).__name__
        raise TrainingError(f"a layer of kind {kinds[0]} returns {kinds[1]}, but others a tuple. {_OWN_STAGES}")


def _refuse_tuples(layer: nn.Module, _inputs: Any, output: Any) -> None:
    if not isinstance(output, Tensor):
        kinds = type(layer).__name__, type(output).__name__
        raise TrainingError(f"a layer of kind {kinds[0]} returns {kinds[1]}, but only tensors are sent. {_OWN_STAGES}")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _pruned_copy(
    whole: PreTrainedModel,
    spine: Sequence[str],
    keep: Collection[str],
    absent: type[Absent] | None = None,
    in_tuple: str | None = None,
) -> PreTrainedModel:
    """A model with the very modules to `keep`, those without parameters copied, and absent ones in other places.

    `in_tuple`: name of the list of layers, if these return tuples.
    """
    memo: dict[int, nn.Module] = {}
    for name in reversed(spine):
        module = whole.get_submodule(name)
        new = copy.copy(module)
        for table in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
            new.__dict__[table] = copy.copy(module.__dict__[table])
        memo[id(module)] = new
    for parent in spine:
        new = memo[id(whole.get_submodule(parent))]
        for name, child in new._modules.items():
            if child is None:
                continue
            if id(child) in memo:
                new._modules[name] = memo[id(child)]
            elif isinstance(child, nn.ModuleList) and (f"{parent}.{name}" if parent else name) not in keep:
                new._modules[name] = nn.ModuleList(child)
            elif next(child.parameters(), None) is None and not isinstance(child, nn.ModuleList):
                new._modules[name] = copy.deepcopy(child)
    model: Any = memo[id(whole)]
    _prune(model, spine, keep, absent or Absent, in_tuple)
    pruned: PreTrainedModel = model
    return pruned


def _prune(
    model: nn.Module,
    spine: Sequence[str],
    keep: Collection[str],
    absent: type[Absent],
    in_tuple: str | None = None,
) -> None:
    """Put absent modules in the place of all beside and in the list of layers but those to keep."""
    for parent in spine:
        for name, child in model.get_submodule(parent).named_children():
            full = f"{parent}.{name}" if parent else name
            if full in spine or full in keep:
                continue
            if isinstance(child, nn.ModuleList):
                for n, layer in enumerate(child):
                    if f"{full}.{n}" not in keep:
                        child[n] = absent(layer, in_tuple=full == in_tuple)
            else:
                setattr(model.get_submodule(parent), name, absent(child))
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {one: other for one, other in tied.items() if one in names and other in names}  # type: ignore[assignment]


def _tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def _inside_out(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules, children before their parents, as transformers initialises them."""
    for child, module in model.named_children():
        yield from _inside_out(module, f"{name}.{child}" if name else child)
    if not isinstance(model, Absent):
        yield name, model


def _give_values(stages: Sequence[nn.Module], whole: nn.Module, valued: nn.Module) -> None:
    """Replace parameters and buffers of the stages by those of the same name in `valued`, one for one."""
    names = dict(valued.named_parameters(remove_duplicate=False))
    values = {id(p): names[n] for n, p in whole.named_parameters(remove_duplicate=False) if n in names}
    buffers = dict(valued.named_buffers(remove_duplicate=False))
    for stage in stages:
        for prefix, module in stage.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in values:
                    setattr(module, name, values[id(parameter)])
            for name, buffer in module._buffers.items():
                full = f"{prefix}.{name}".removeprefix(PART)
                if buffer is not None and full in buffers:
                    module._buffers[name] = buffers[full].clone()


def _check_complete(model: str, number: int, stage: nn.Module) -> None:
    """Raise InputError for a stage of this process of which a part has no values."""
    for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
        if tensor.is_meta:
            detail = f"has no values for {name.removeprefix(PART)} of stages[{number}]."
            raise InputError([Issue("", "no_values", detail)], f"model {model}")


def _names(module: Any) -> set[str]:
    """Class names of causal language models."""
    names = module.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return {one for name in names for one in (name if isinstance(name, tuple) else (name,))}


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}."
