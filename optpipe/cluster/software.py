"""Trainers: what of their kernels and options changes the memory of a rank, by the group of measured rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from optpipe.errors import InputError, Issue, shown

GIB = 2**30


@dataclass(frozen=True)
class Software:
    """A trainer with its kernels. The default is Megatron-Core of 2025 with Transformer Engine.

    `gradient_bytes`: of a parameter. `norm_bytes`: kept of a norm for each element of the hidden width, besides its
    input. `score_bytes`: kept of a score of attention, 0 where it is fused. `inner_recomputed`: the output of the
    activation function is computed again in B. `loss_bytes`: what the loss makes of a logit; logits are divided by
    tensor parallelism unless `logits_divided` is False. `reserved`: memory that the allocator reserves over what is
    allocated. `context_bytes`: taken by the driver, communicators and libraries. `recipes_recompute`: its published
    layouts recompute where they must, without saying so. `with_blocks`: schedules in which it runs blocks.
    """

    sequence_parallel: bool = True
    gradient_bytes: int = 4
    norm_bytes: float = 2
    score_bytes: float = 0
    inner_recomputed: bool = False
    loss_bytes: float = 4
    logits_divided: bool = True
    reserved: float = 1.05
    context_bytes: int = 2 * GIB
    recipes_recompute: bool = False
    with_blocks: tuple[str, ...] = ("1f1b", "interleaved-1f1b")

    def usable_bytes(self, memory_bytes: int) -> int:
        """Memory of a device without what driver, communicators and the allocator's fragments take."""
        return max(0, int((memory_bytes - self.context_bytes) / self.reserved))


MEGATRON = Software()

_RECIPES = Software(recipes_recompute=True)
_ALEPH_ALPHA = Software(
    sequence_parallel=False,
    gradient_bytes=2,
    norm_bytes=12,
    loss_bytes=14,
    logits_divided=False,
    reserved=1.1,
    context_bytes=3 * GIB,
)

SOFTWARE: Mapping[str, Software] = {
    "aleph-alpha-layouts": _ALEPH_ALPHA,
    "aleph-alpha-layouts/flash_attention2 + rms kernel": replace(_ALEPH_ALPHA, norm_bytes=4),
    "aleph-alpha-layouts/torch": replace(_ALEPH_ALPHA, score_bytes=6),
    "aleph-alpha-layouts/fused": replace(_ALEPH_ALPHA, score_bytes=4),
    "bigscience": Software(sequence_parallel=False, gradient_bytes=2),
    "nvidia-mbridge": _RECIPES,
    "nvidia-dgxc": _RECIPES,
    "nvidia-nemo": _RECIPES,
    "nvidia-automodel": _RECIPES,
    "moe-modelzoo": _RECIPES,
    "torchtitan": Software(with_blocks=("dualpipe-v",)),
}
"""By group of measured rows, and by kernels behind a ``/``. What Aleph Alpha's trainer keeps was chosen so that most of
the 216 layouts that ran fit, and most of the 376 that ran out of memory do not (`docs/accuracy.md`)."""


def software_of(name: str) -> Software:
    """The entry of a name, else of the group before its last ``/``, else the default."""
    while name:
        if name in SOFTWARE:
            return SOFTWARE[name]
        name = name.rpartition("/")[0]
    return MEGATRON


def require_software(name: str, measured: Iterable[str], field: str) -> Software:
    """The entry of a name that a user gives. Raises InputError where its group is neither known nor `measured`."""
    groups = sorted({one.partition("/")[0] for one in (*SOFTWARE, *measured)} - {""})
    if name and name.partition("/")[0] not in groups:
        close = get_close_matches(name, groups, 1) or ["leave it out: any, with Megatron-Core's memory"]
        detail = f"is {shown(name)} but must be of {', '.join(groups)}. Maybe {close[0]}."
        raise InputError([Issue(field, "unknown_software", detail)])
    return software_of(name)
