"""`[model]`: what is trained, and on what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from optpipe.errors import Issue
from optpipe.train.config.setting import Group, setting
from optpipe.train.gpt_sizes import SIZES, GPTShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelConfig(Group):
    """The model, cut into the schedule's stages, and its batches."""

    table: ClassVar[str] = "model"

    name: str = setting("small", "our GPT of a size (tiny, small, medium), or package.module:callable", flag="model")
    layers: int | None = setting(None, "blocks of the GPT; default: one a stage", least=1, most=2000)
    sequence: int | None = setting(None, "bytes of text in a sequence; default: the model's longest", least=1)
    microbatch_size: int = setting(4, "sequences in a microbatch", least=1, most=4096)
    dtype: Literal["float32", "float64"] = setting("float32", "precision of weights and of what is not cast")
    autocast: Literal["bfloat16"] | None = setting(None, "compute matrix products in it; weights stay float32")
    tied: bool = setting(False, "the output head uses the embedding's weights, on whichever devices the two are")
    data: str | None = setting(
        None, "package.module:callable that gives the batch of a step number to stages of your own"
    )

    @property
    def own(self) -> bool:
        """Whether the stages are the user's own."""
        return ":" in self.name

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of weights."""
        import torch

        return {"float32": torch.float32, "float64": torch.float64}[self.dtype]

    @property
    def torch_autocast(self) -> torch.dtype | None:
        """What autocast computes in, if it is on."""
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
            yield from self._meaningless()
        elif self.name not in SIZES:
            detail = f"is {self.name!r} but must be one of {', '.join(SIZES)}, or package.module:callable."
            yield Issue("name", "unknown", detail)
        else:
            yield from self._of_the_gpt()
        if self.autocast and self.dtype != "float32":
            detail = (
                f"is {self.dtype!r} with autocast to {self.autocast}, but autocast leaves all but float32 alone. "
                "Maybe leave one of them out."
            )
            yield Issue("dtype", "autocast", detail)

    def _of_the_gpt(self) -> Iterator[Issue]:
        longest = SIZES[self.name].sequence
        if self.sequence is not None and self.sequence > longest:
            yield Issue("sequence", "out_of_range", f"is {self.sequence} but must be from 1 to {longest}.")
        if self.data is not None:
            detail = f"is {self.data!r}, but the GPT is trained on text. Maybe name stages of your own in model.name."
            yield Issue("data", "meaningless", detail)

    def _meaningless(self) -> Iterator[Issue]:
        defaults = {"layers": None, "sequence": None, "microbatch_size": 4, "dtype": "float32", "tied": False}
        for field, default in defaults.items():
            if getattr(self, field) != default:
                detail = f"is {getattr(self, field)!r}, but {self.name} decides that. Maybe leave it out."
                yield Issue(field, "meaningless", detail)
