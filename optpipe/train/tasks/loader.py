"""Batches from loaders of the user's, such as those of `torch.utils.data`: each replica reads its own microbatches.

A loader is read in its order, again from its beginning when it is through. What it draws from torch's generator is a
function of seed, replica and epoch, so the processes of a replica that read it (those with the first or the last stage)
read the same, and a run that is resumed reads on where the checkpoint was written: by the loader's own state, if it has
`state_dict` and `load_state_dict` as torchdata's `StatefulDataLoader`, else by reading up to there again.

Microbatches are of one shape, unless lengths vary. What can be known of that is said before training: the last batch of
an epoch is made ahead where the loader has a length, and those for evaluation are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from optpipe.errors import CheckpointError
from optpipe.profile.subject import Named, check_tensors, error_text
from optpipe.runtime.messages import Spec, Tree, leaves, message_spec, spec_text
from optpipe.runtime.module_state import unchanged
from optpipe.runtime.shapes import alike
from optpipe.train.config import TrainingConfig
from optpipe.train.launch import CPU, Launch

YIELDS = "(inputs, target) or a dict with labels, of one microbatch"
"""Items of a loader, for messages."""

VARYING = " Maybe --lengths varying, where microbatches differ in their sizes."
"""Hint for a loss that counts its tokens."""


class LoadedBatches:
    """Microbatches of the loaders that the callable of `config.model.loader` returns for a replica of so many.

    Called with the number of a step, as a data callable: inputs and targets by microbatch, of all replicas. Those that
    this process does not need are None: those of other replicas, and all of them where it has neither the first stage
    nor the last. Steps after the last of the run are those of the evaluation loader. Before `read_for` the first step
    alone is there, of all replicas where stages are to be measured or checked.
    """

    def __init__(self, config: TrainingConfig, microbatches: int, launch: Launch) -> None:
        assert config.model.loader is not None, "there is a loader"
        self.name = config.model.loader
        self._config, self._launch = config, launch
        self._microbatches = microbatches // launch.replicas
        self._build = Named("loader", config.model.loader)
        evaluated = config.model.evaluation_loader
        self._build_evaluation = Named("loader", evaluated) if evaluated else None
        self._reader: _Reader | None = None
        self._like: Spec | None = None
        self._reads = self._reads_targets = True
        self._training = False
        self._step = -1
        self._first: tuple[list[Any], list[Any]] | None = None
        self._last: list[tuple[Tree, Tree]] = []
        self._evaluated: list[list[tuple[Tree, Tree]]] = []

    def __call__(self, step: int) -> tuple[list[Any], list[Any]]:
        """Inputs and targets of a step; steps of the run are asked for in their order."""
        if not self._training:
            self._first = self._first or self._first_step()
            return self._first
        after = step - self._config.steps
        return self._placed({self._launch.replica: self._of_step(step) if after < 0 else self._of_evaluation(after)})

    def refuse(self, code: str, detail: str) -> NoReturn:
        """Raise InputError naming the loader."""
        self._build.refuse(code, detail)

    def read_for(self, stages: Collection[int], count: int) -> None:
        """Read, from now on, what these stages of so many need: inputs of the first, targets of the last."""
        self._training = True
        self._reads_targets = count - 1 in stages
        # Where sizes differ, every process knows all of them from the inputs: no message has to tell its receiver.
        self._reads = 0 in stages or self._reads_targets or self._config.model.varies
        self._reader, self._step, self._first = None, -1, None

    def tokens(self, own: int) -> int:
        """Tokens of the batch, from those of the targets that this process has.

        The processes that run the last stage of each replica call this together.
        """
        if not self._training or self._launch.same_device is None:
            return own
        return self._launch.sum_over_replicas(own)

    def state(self) -> dict[str, Any] | None:
        """State of the loader between two steps, to be kept with a checkpoint; None where nothing is read."""
        if not self._reads:
            return None
        return {"read": self._of_replica().state(), "replicas": self._launch.replicas}

    def load(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on before a step, with the state that was kept there. Raises CheckpointError for other replicas' state."""
        if not self._reads:
            return
        if state is None or state["replicas"] != self._launch.replicas:
            before = "none" if state is None else state["replicas"]
            raise CheckpointError(
                f"the checkpoint has the loaders of {before} replica(s), but there are {self._launch.replicas}, each "
                "with its own part of the data. Maybe go on with as many."
            )
        self._reader = _Reader(self._build, self._config.seed, self._launch.replica, self._launch.replicas)
        self._reader.load(state["read"])
        self._step = step - 1

    def _of_replica(self) -> _Reader:
        if self._reader is None:
            self._reader = _Reader(self._build, self._config.seed, self._launch.replica, self._launch.replicas)
        return self._reader

    def _of_step(self, step: int) -> list[tuple[Tree, Tree]]:
        if not self._reads:
            return []
        if step != self._step:
            assert step == self._step + 1, "steps are in order"
            reader = self._of_replica()
            read = [reader.next() for _ in range(self._microbatches)]
            for item in read:
                self._check(self._build, item, f"in step {step}")
            self._last, self._step = read, step
        return self._last

    def _of_evaluation(self, batch: int) -> list[tuple[Tree, Tree]]:
        """A batch of the evaluation loader, which is read once."""
        assert self._build_evaluation is not None, "the configuration has refused evaluations without it"
        if not self._reads:
            return []
        if not self._evaluated:
            reader = _Reader(self._build_evaluation, self._config.seed, self._launch.replica, self._launch.replicas)
            read = [[reader.next() for _ in range(self._microbatches)] for _ in range(self._config.evaluate)]
            for item in (item for batch in read for item in batch):
                self._check(self._build_evaluation, item, "to evaluate")
            self._evaluated = read
        return self._evaluated[batch]

    def _first_step(self) -> tuple[list[Any], list[Any]]:
        config, own, replicas = self._config, self._launch.replica, self._launch.replicas
        wanted = range(replicas) if config.check or config.online.on else [own]
        read = {}
        for replica in wanted:
            reader = _Reader(self._build, config.seed, replica, replicas)
            read[replica] = [reader.next() for _ in range(self._microbatches)]
            for item in read[replica]:
                self._check(self._build, item, "in step 0")
            self._check_last_of_epoch(reader)
        read.setdefault(0, read[own])  # of which only the first is looked at, for its shape
        return self._placed(read)

    def _check(self, build: Named, item: tuple[Tree, Tree], where: str) -> None:
        """Raise InputError unless a microbatch has the shapes of the first one, or sizes may vary."""
        for part in item:
            check_tensors(build.name, "a microbatch", part, "loader")
        self._like = self._like or message_spec(item)
        if (found := message_spec(item)) != self._like and not self._is_varied(found):
            build.refuse(
                "wrong_shape",
                f"returns {spec_text(found)} {where}, but {self.name} returned {spec_text(self._like)} first."
                f"{_hint(found, self._like)}",
            )

    def _check_last_of_epoch(self, reader: _Reader) -> None:
        """Raise InputError if the run comes to a last batch of an epoch that is smaller than the others."""
        ahead = reader.last_of_epoch()
        if ahead is None or ahead[0] >= self._config.steps * self._microbatches:
            return
        number, item = ahead
        if (found := message_spec(item)) != self._like and not self._is_varied(found):
            self._build.refuse(
                "wrong_shape",
                f"will return {spec_text(found)} in step {number // self._microbatches}, at the end of its epoch, but "
                f"{self.name} returned {spec_text(self._like)} first.{_hint(found, self._like)}",
            )

    def _is_varied(self, found: Spec) -> bool:
        return self._config.model.varies and alike(found, self._like)

    def _placed(self, of_replicas: dict[int, list[tuple[Tree, Tree]]]) -> tuple[list[Any], list[Any]]:
        none: list[Any] = [(None, None)] * self._microbatches
        batch = [pair for r in range(self._launch.replicas) for pair in of_replicas.get(r) or none]
        return [x for x, _ in batch], [y if self._reads_targets else None for _, y in batch]


class _Reader:
    """The microbatches of a replica in their order, epoch after epoch."""

    def __init__(self, build: Named, seed: int, replica: int, replicas: int) -> None:
        self._build, self._seed, self._replica = build, seed, replica
        with self._drawing(0, -1):
            self._loader = build(replica, replicas)
        if not hasattr(self._loader, "__iter__"):
            build.refuse("no_loader", f"returns {type(self._loader).__name__}, but must return a loader of {YIELDS}.")
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._index = 0, 0

    def next(self) -> tuple[Tree, Tree]:
        """The next microbatch."""
        item = self._next()
        if item is None:
            self._iterator, self._epoch, self._index = None, self._epoch + 1, 0
            item = self._next()
        if item is None:
            once = isinstance(self._loader, Iterator)
            maybe = " Maybe return a DataLoader or a list: an iterator is read once." if once else ""
            self._build.refuse("empty", f"returns a loader that yields nothing in epoch {self._epoch}.{maybe}")
        return self._split(item)

    def last_of_epoch(self) -> tuple[int, tuple[Tree, Tree]] | None:
        """Number and contents of the last batch of an epoch, if it has fewer rows than others and can be made ahead."""
        loader = self._loader
        if isinstance(loader, Sequence) and loader:
            return len(loader) - 1, self._split(loader[-1])
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return None
        batches: Any = loader.batch_sampler
        try:
            with unchanged([batches], CPU), self._drawing(0, -2):
                if isinstance(batches, Sequence):
                    full, rows = len(batches) - 1, batches[-1]
                elif type(batches) is BatchSampler and not batches.drop_last:
                    full, left = divmod(len(batches.sampler), batches.batch_size)  # type: ignore[arg-type]
                    rows = list(islice(batches.sampler, left))
                else:
                    return None
                if not rows:
                    return None
                [item] = DataLoader(
                    loader.dataset,
                    batch_sampler=[rows],
                    collate_fn=loader.collate_fn,
                    num_workers=min(loader.num_workers, 1),  # a data set may open files in each of its processes
                    worker_init_fn=loader.worker_init_fn,
                    multiprocessing_context=loader.multiprocessing_context,
                )
        except Exception:  # of the user's, which the epoch itself shows where it happens
            return None
        return full, self._split(item)

    def state(self) -> dict[str, Any]:
        """Position, and what the loader says of itself."""
        own = self._loader.state_dict() if self._stateful and self._iterator is not None else None
        return {"epoch": self._epoch, "index": self._index, "loader": encode(own)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on at a position."""
        self._epoch = state["epoch"]
        own = decode(state["loader"])
        if own is not None and self._stateful:
            self._loader.load_state_dict(own)
            self._index = state["index"]
            return
        while self._index < state["index"]:
            if self._next() is None:
                self._build.refuse("shorter", f"returns a loader with {self._index} microbatches, but had more before.")

    @property
    def _stateful(self) -> bool:
        return all(callable(getattr(self._loader, name, None)) for name in ("state_dict", "load_state_dict"))

    def _next(self) -> Any:
        """The next item of the epoch, None after the last."""
        begins = self._iterator is None
        with self._drawing(self._epoch, 0 if begins else self._index):
            if self._iterator is None:
                for part in (self._loader, getattr(self._loader, "sampler", None)):
                    if callable(set_epoch := getattr(part, "set_epoch", None)):
                        set_epoch(self._epoch)
                self._iterator = iter(self._loader)
            try:
                item = next(self._iterator)
            except StopIteration:
                return None
            except Exception as error:
                where = f"microbatch {self._index} of epoch {self._epoch}"
                self._build.refuse("failed", f"returns a loader that raises {error_text(error)}, for {where}.")
        self._index += 1
        return item

    def _drawing(self, epoch: int, index: int) -> Any:
        text = f"{self._seed} {self._replica} {epoch} {index}"
        return _Seeded(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]))

    def _split(self, item: Any) -> tuple[Tree, Tree]:
        if isinstance(item, dict) and "labels" in item:
            inputs = {name: value for name, value in item.items() if name != "labels"}
            return inputs["input_ids"] if inputs.keys() == {"input_ids"} else inputs, item["labels"]
        if not isinstance(item, tuple | list) or len(item) != 2:
            self._build.refuse("wrong_item", f"returns a loader of {type(item).__name__}, but must yield {YIELDS}.")
        return item[0], item[1]


class _Seeded:
    """Context in which torch's generator draws from a seed; restores it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *_error: object) -> None:
        torch.default_generator.set_state(self._before)


def _hint(found: Spec, like: Spec) -> str:
    """Likely fix of a microbatch's sizes."""
    rows, wanted = ({leaf.shape[:1] for leaf in leaves(spec)} for spec in (found, like))
    if len(rows) != 1 or len(wanted) != 1 or not all(map(tuple, rows | wanted)):
        return ""
    [[rows], [wanted]] = *rows, *wanted
    if rows < wanted:
        return " Maybe drop_last=True in its DataLoader or batch sampler: the last batch of an epoch has fewer rows."
    return f" Maybe batch_size={wanted} in its DataLoader." if rows > wanted else " Maybe pad them to one size."


def encode(value: Any) -> Any:
    """State of a loader as JSON values. Raises CheckpointError for what is no tensor, number, text or container."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            data = bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
            return {"tensor": data.hex(), "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        case bytes():
            return {"bytes": value.hex()}
        case tuple() | list():
            return {"tuple" if isinstance(value, tuple) else "list": [encode(entry) for entry in value]}
        case dict():
            return {"dict": [[encode(key), encode(entry)] for key, entry in value.items()]}
        case _:
            raise CheckpointError(
                f"the state of the loader holds {type(value).__name__}, but only tensors, numbers, texts and "
                "containers of them are written."
            )


def decode(value: Any) -> Any:
    """The state that was encoded."""
    match value:
        case {"tensor": data, "dtype": dtype, "shape": shape}:
            raw = torch.frombuffer(bytearray.fromhex(data) or bytearray(1), dtype=torch.uint8)[: len(data) // 2]
            return raw.clone().view(getattr(torch, dtype)).reshape(shape)
        case {"bytes": data}:
            return bytes.fromhex(data)
        case {"tuple": entries}:
            return tuple(map(decode, entries))
        case {"list": entries}:
            return list(map(decode, entries))
        case {"dict": entries}:
            return {decode(key): decode(entry) for key, entry in entries}
        case _:
            return value
