"""Models of transformers as stages: cut by layers, each process with the weights of its own stages alone.

Every stage is the model itself, whose modules of other stages are replaced by ones that pass on what they receive
(`optpipe.models.absent`). So masks, rotary embeddings and the like are computed by the model's own code, in each stage
that needs them. The whole model stands on the meta device, where it takes no memory. Parameters that it ties stay one.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from optpipe.errors import InputError, Issue, needs_extra
from optpipe.models.absent import Absent, give_buffers, prune, pruned_copy
from optpipe.models.cut import Unit, evenly, parse_cut, ranges, structure
from optpipe.models.hugging_face_stage import Balancing, ModelStage
from optpipe.models.loss import LabelLoss, PerToken
from optpipe.models.reads import OWN_STAGES, Cuttable, Reads, examine, image_like
from optpipe.runtime.loss import total_loss
from optpipe.runtime.messages import Tree, map_leaves
from optpipe.runtime.stage import evaluating

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PREFIX = "hf:"
"""Begin of the name of such a model, before the path of its folder or configuration."""

PART = "model."
"""Prefix of the names of a stage's parameters, before the names that the model gives them."""

LAYER_COUNTS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
"""Fields that say how many layers there are: those of a decoder alone are the second and the third."""

SLICED = ("gpt2", "llama", "qwen2", "qwen3")
"""Kinds of models (`model_type`) whose attention may run slice by slice."""


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
            pass
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
        self._reads = self._examine()
        self._balanced = self._balancing()

    @property
    def vocabulary(self) -> int | None:
        """Entries of the vocabulary; None for a model that reads no tokens."""
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        return size if isinstance(size, int) and self.main_input == "input_ids" else None

    @property
    def longest(self) -> int | None:
        """The longest sequence that the configuration allows, if it says so."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def main_input(self) -> str:
        """Name of the argument that the first stage takes: the token ids, or the pixels of images."""
        return self._whole.main_input_name

    @property
    def causal(self) -> bool:
        """True if the model predicts the next token: its loss shifts the labels."""
        return self._reads.shift

    @property
    def takes_slices(self) -> bool:
        """True if the stages may run slices of sequences: full causal attention that reads keys from a cache."""
        config = self.config.get_text_config()
        full = {*(getattr(config, "layer_types", None) or ())} <= {"full_attention"}
        return self.causal and self._balanced is None and full and config.model_type in SLICED

    @property
    def loss(self) -> LabelLoss:
        """Cross entropy by tokens, and the model's auxiliary loss of experts where the configuration asks for it."""
        return LabelLoss(
            shift=bool(self._reads.shift), coefficient=self._balanced.coefficient if self._balanced else 0.0
        )

    def build_stages(
        self,
        own: Collection[int] | None = None,
        batch: Sequence[tuple[Tree, Tree]] = (),
        hardware: torch.device | None = None,
    ) -> list[nn.Module]:
        """New stages on the CPU, equal at each call; those not in `own` (None: all are) stay on the meta device.

        Parameters that the model ties are one parameter in all stages. With a `batch`, microbatches with their labels,
        the stages of `own`, the first and the last among them, are moved to `hardware` and compared with the model
        before it is cut, where the layers of other stages pass hidden states on. Raises InputError where they compute
        something else.
        """
        with torch.device("meta"), _default_dtype(self._dtype):
            whole = self.kind(self._run_config())
        parts = ranges(self.sizes)
        stages: list[nn.Module] = [self._stage(whole, s) for s in range(len(parts))]
        wanted = [u for s, part in enumerate(parts) if own is None or s in own for u in part]
        if wanted:
            valued = self._with_values({name for u in wanted for name in self.units[u].modules})
            _give_values(stages, whole, valued)
            for s, stage in enumerate(stages):
                if own is None or s in own:
                    _check_complete(self.name, s, stage)
            if batch:
                run = [stage for s, stage in enumerate(stages) if own is None or s in own]
                self._compare(run, valued, batch, hardware or torch.device("cpu"))
        return stages

    def compare(self, batch: Sequence[tuple[Tree, Tree]], hardware: torch.device, room_bytes: int) -> None:
        """Compare the cut model with the uncut one on a batch, where no process has all stages for longer.

        Where the model needs more than `room_bytes`, one layer of each kind is compared (`alike`), each as a stage.
        Raises InputError where they compute something else.
        """
        if sum(p.numel() * p.element_size() for p in self._whole.parameters()) <= room_bytes:
            self.build_stages(None, batch, hardware)
            return
        apart = copy.copy(self)
        apart.sizes = (1,) * len(self.units)
        apart.build_stages({*self.alike()}, batch, hardware)

    def alike(self) -> list[int]:
        """For each unit the first that is equal to it but for the values of its weights."""
        types = getattr(self.config.get_text_config(), "layer_types", None) or ()
        first: dict[str, int] = {}
        found = []
        for u, unit in enumerate(self.units):
            modules = [structure(self._whole.get_submodule(name)) for name in unit.modules]
            found.append(first.setdefault(f"{modules} {types[u] if u < len(types) else None}", u))
        return found

    def identity(self) -> dict[str, Any]:
        """JSON values that tell this model from others, its cut aside."""
        data = json.loads(self.config.to_json_string(use_diff=False))
        volatile = ("_name_or_path", "transformers_version", "use_cache")
        data = {key: value for key, value in data.items() if key not in volatile}
        files = {path.name: path.stat().st_size for path in self.weights}
        return {"model": self.kind.__name__, "configuration": data, "weights": files, "dtype": str(self._dtype)}

    def _compare(
        self, stages: Sequence[nn.Module], uncut: Any, batch: Sequence[tuple[Tree, Tree]], hardware: torch.device
    ) -> None:
        """Run microbatches through stages and uncut model, and compare logits and losses."""
        loss = PerToken(self.loss)
        options = {} if self._balanced is None else {"output_router_logits": True}
        for module in (*stages, uncut):
            module.to(hardware)
        with torch.no_grad(), evaluating([*stages, uncut]):
            for i, pair in enumerate(batch):
                inputs, labels = (map_leaves(lambda leaf: leaf.to(hardware), tree) for tree in pair)
                arguments = inputs if isinstance(inputs, dict) else {self.main_input: inputs}
                who = "fails"
                try:
                    expected = uncut(**arguments, **options, labels=labels, return_dict=True)
                    who, message = "fails when it is cut", inputs
                    for stage in stages:
                        message = stage(message)
                    [target] = loss.with_tokens([labels])
                    own = total_loss(loss(message, target))
                except Exception as error:
                    self._refuse("not_run", f"{who}, on microbatch {i} of step 0: {_line(error)}")
                logits = message["logits"] if isinstance(message, dict) else message
                scale = max(_largest(expected.logits), 1e-30)
                pairs = {"logits": (logits, expected.logits)}
                if self.loss.count(labels):
                    pairs["loss"] = (own, expected.loss)
                eps = torch.finfo(self._dtype).eps
                for what, (found, theirs) in pairs.items():
                    difference = _largest(_difference(found, theirs))
                    eps = max(eps, torch.finfo(theirs.dtype).eps)  # losses are float32 where logits are float64
                    if not difference <= scale * min(eps**0.5, 100 * eps):
                        where = f"in the {what} of microbatch {i}, whose largest logit is {scale:.2g}"
                        detail = f"computes something else when it is cut: a difference of {difference:.2g} {where}."
                        self._refuse("cut_differs", f"{detail} {OWN_STAGES}")

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
        """A copy for the model that runs: outputs by name, no cache of `generate`, and the losses of its own."""
        config = copy.deepcopy(self.config)
        config.use_cache = False
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part.return_dict = True  # models take the outputs of their parts apart by name
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
        config = self.config.get_text_config()
        counts = {name: count for name in LAYER_COUNTS if isinstance(count := getattr(config, name, None), int)}
        lists = [
            name
            for name, module in self._whole.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) in counts.values()
        ]
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        if len(outer) != 1:
            found = f"{len(outer)} lists of modules are that long" if outer else "no list of modules is that long"
            said = " and ".join(f"{name} {count}" for name, count in counts.items()) or "no number of layers"
            self._refuse(
                "no_layers",
                f"is {self.kind.__name__} with {said}, but {found}, so it cannot be cut by layers. {OWN_STAGES}",
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
                self._refuse("loose_parameter", f"{detail} {OWN_STAGES}")
            seen = False
            for name, other in module.named_children():
                full = f"{parent}.{name}" if parent else name
                seen = seen or full == child
                if full == child:
                    continue
                runs = [n for n, ran in enumerate(order) if ran == full]
                held = next(other.parameters(), None) is not None
                if held and any(first < n < last for n in runs):
                    self._refuse("between", f"runs {full} between its layers, so it cannot be cut. {OWN_STAGES}")
                if min(runs, default=-1) > last or (not runs and seen and held):
                    behind.append(full)
                elif held or isinstance(other, nn.Dropout):
                    before.append(full)
        behind.sort(key=lambda name: order.index(name) if name in order else len(order))
        count = len(self._whole.get_submodule(self._layers))  # type: ignore[arg-type]
        names = [(f"{self._layers}.{n}",) for n in range(count)]
        return [Unit((*before, *names[0])), *map(Unit, names[1:]), Unit(tuple(behind))]

    def _order_of_run(self) -> list[str]:
        """The layers and the other modules in the order in which the model runs them.

        Found by running the model on two tokens, with all of these absent: with layers that return hidden states, or,
        where those do not reach the last layer so, that return them in a tuple. Where it does neither, found by
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
                self._refuse("not_run", f"{what}: {_reason(error)} {OWN_STAGES}")
            order = [f"{trunk}.{name}" + (".0" if name == own else "") for name in plan]
        if not any(name.startswith(f"{self._layers}.") for name in order):
            self._refuse("no_layers", f"does not run {self._layers}. {OWN_STAGES}")
        return order

    def _examine(self) -> Reads:
        """Needs of a later stage, and the loss; found by placeholders."""
        before = [name for name in self.units[0].modules if not name.startswith(f"{self._layers}.")]
        behind, everywhere = self.units[-1].modules, self._everywhere(self._whole)
        named = f"model {self.name}"
        parts = Cuttable(named, self._whole, self._spine, self._layers, before, behind, everywhere, self._in_tuple)
        try:
            with _quiet():
                return examine(parts)
        except InputError:
            raise
        except Exception as error:
            what = f"is {self.kind.__name__}, which does not run with other modules in place of its layers, embeddings"
            self._refuse("not_examined", f"{what} and head: {_line(error)} {OWN_STAGES}")

    def _probe(self) -> tuple[list[str], Exception | None]:
        """The order of a run in which all are absent, and why it failed, if it did."""
        order: list[str] = []
        shapes: set[torch.Size] = set()
        model = pruned_copy(self._whole, self._spine, (), in_tuple=self._in_tuple)
        give_buffers(model)
        blocks: Any = model.get_submodule(self._layers)
        for block in blocks:
            block.register_forward_pre_hook(lambda _, inputs: shapes.update(x.shape for x in inputs[:1]))
        for parent in (*self._spine, self._layers):
            for name, child in model.get_submodule(parent).named_children():
                full = f"{parent}.{name}" if parent else name
                if full not in self._spine:
                    child.register_forward_hook(lambda *_, name=full: order.append(name))
        try:
            images = self.main_input == "pixel_values"
            x = image_like(self._whole) if images else torch.zeros(1, 2, dtype=torch.int64)
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
        model = pruned_copy(whole, self._spine, own | self._everywhere(whole), in_tuple=self._in_tuple)
        last = s == len(self.sizes) - 1
        stage = ModelStage(
            model,
            self._layers,
            part,
            last=last,
            balanced=self._balanced,
            in_tuple=self._in_tuple is not None,
            sends_main=self._reads.main,
            read_before=self._read_before,
        )
        stage.takes_slices = self.takes_slices
        if last and self._reads.head and self._balanced is None:
            parent, _, head = self._reads.head.rpartition(".")
            setattr(model.get_submodule(parent), "vocabulary_layer", head)  # noqa: B010  # modules have no such name
        return stage

    @property
    def _read_before(self) -> set[str]:
        """Arguments for models that run before the layers, such as the pixels for one of vision."""
        modules = [self._whole.get_submodule(name) for name in self.units[0].modules]
        return {str(module.main_input_name) for module in modules if hasattr(module, "main_input_name")}

    def _everywhere(self, whole: PreTrainedModel) -> set[str]:
        """Modules other than layers that belong to no unit: those without parameters."""
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
        spine, wanted, in_tuple = self._spine, keep, self._in_tuple

        def build(model: Any, config: PretrainedConfig, *args: Any, **options: Any) -> None:
            self.kind.__init__(model, config, *args, **options)
            prune(model, spine, wanted, Absent, in_tuple)

        # Of the same name, by which transformers finds how weights in files are named.
        members = {"__init__": build, "_keys_to_ignore_on_load_unexpected": [".*"], "__module__": self.kind.__module__}
        kind: Any = type(self.kind.__name__, (self.kind,), members)
        return self._loaded(kind) if self.weights else self._drawn(kind)

    def _loaded(self, kind: Any) -> PreTrainedModel:
        try:
            with _quiet():
                model, info = kind.from_pretrained(
                    str(self._path),
                    config=self._run_config(),
                    dtype=self._dtype,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except Exception as error:
            self._refuse("not_loaded", f"has weights that transformers does not load: {_line(error)}")
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
    with tempfile.TemporaryDirectory() as written:  # a file alone may hold infinity, as in Mamba-2's time_step_limit
        (Path(written) / transformers.utils.CONFIG_NAME).write_text(json.dumps(data))
        config: Any = transformers.CONFIG_MAPPING[data["model_type"]].from_pretrained(written)
    config.name_or_path = ""
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
    with _quiet():
        model.save_pretrained(folder)


def _reason(error: Exception) -> str:
    """Reason why a model failed with placeholders in place of its modules, where its error says so."""
    if isinstance(error, ValueError) and "to unpack" in str(error):
        return "the model takes more from each layer than hidden states."
    if isinstance(error, RuntimeError) and "meta" in str(error):
        return "the model computes with weights outside their modules, which may be in another stage."
    return _line(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which transformers shows neither warnings nor progress."""
    from transformers import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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


def _difference(found: Tensor, expected: Tensor) -> Tensor:
    """Entry by entry; 0 where both are infinite alike or not numbers, as in rows that a mask leaves without any key."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    return (found - expected).masked_fill(same, 0.0)


def _largest(tensor: Tensor) -> float:
    """The largest absolute value; not a number where one is."""
    return float(tensor.detach().abs().max())


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}."
