"""Terms that the page explains where it shows them, each with the page of the documentation that says more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Term(NamedTuple):
    """A term: its name, a sentence or two, and the page of the site with its anchor."""

    name: str
    text: str
    page: str


PROBLEM = "reference/documents.html#problem"

TERMS: Mapping[str, Term] = {
    "devices": Term(
        "Devices",
        "What computes one op at a time: a GPU, or a group of GPUs that share one stage by tensor parallelism.",
        "concepts/placements.html",
    ),
    "microbatches": Term(
        "Microbatches",
        "Parts of a step's batch that pass through all stages one after the other. More of them leave a smaller share "
        "of bubble.",
        "concepts/passes.html",
    ),
    "forward": Term(
        "Forward (F)",
        "Time of the forward pass of one microbatch on one stage. One value holds for all stages; with commas there is "
        "one for each.",
        "concepts/passes.html",
    ),
    "backward-input": Term(
        "Backward input (B)",
        "Time of the gradient for the stage's input, which the stage before waits for.",
        "concepts/passes.html",
    ),
    "backward-weight": Term(
        "Backward weight (W)",
        "Time of the gradient for the stage's weights. Nothing waits for it, so it can fill bubbles.",
        "concepts/passes.html",
    ),
    "transfer": Term(
        "Transfer",
        "Time from the end of an op to the start of the op on another device that needs its result. It occupies no "
        "compute.",
        PROBLEM,
    ),
    "activation": Term(
        "Activation",
        "Memory that one microbatch takes on one stage when its forward starts.",
        "concepts/memory.html",
    ),
    "held": Term(
        "Held for W",
        "The part of the activation that stays after the backward for the input, until the one for the weights ends.",
        "concepts/memory.html",
    ),
    "budget": Term(
        "Memory budget",
        "What a device has for activations: its memory less weights, gradients and the optimizer's state. Empty: no "
        "limit.",
        "concepts/memory.html",
    ),
    "offload": Term(
        "Offload",
        "The part of an activation that may wait on the host between forward and backward. Empty: nothing may.",
        "concepts/offload.html",
    ),
    "offload-time": Term(
        "Copy to the host",
        "Time in which the offloaded part is copied to the host. Copies run while the device computes.",
        "concepts/offload.html",
    ),
    "reload-time": Term(
        "Copy back",
        "Time in which the offloaded part is copied back to the device. Copies run while the device computes.",
        "concepts/offload.html",
    ),
    "objective": Term(
        "Objective",
        "Makespan: the last end minus the first start over all devices. Device span: the longest such time of any one "
        "device, for an optimizer step without a global barrier.",
        "concepts/objectives.html",
    ),
    "method": Term(
        "Method",
        "Published methods place ops by a rule, at once. Searches look for something better and prove how good it is; "
        "auto uses all of them.",
        "reference/solving.html",
    ),
    "bound": Term(
        "Bound",
        "What no schedule of this problem can beat, proved.",
        "concepts/index.html#in-one-place",
    ),
    "gap": Term(
        "Gap",
        "(value - bound) / value: how far the schedule is at most from the optimum. 0 is proved optimal.",
        "concepts/index.html#in-one-place",
    ),
    "bubble": Term(
        "Bubble",
        "The share of its time in which the busiest device computes nothing.",
        "concepts/passes.html",
    ),
    "peak": Term(
        "Highest peak",
        "The most that activations take on any device at the predicted times.",
        "concepts/memory.html",
    ),
    "sequence": Term("Sequence", "Tokens of one sequence, which are the context length.", "plan.html"),
    "batch": Term(
        "Global batch",
        "Sequences of one step on all GPUs together. It is divided over data parallelism and microbatches.",
        "plan.html",
    ),
    "strategy": Term(
        "Strategy",
        "How the model is spread over the GPUs. Tensor parallelism divides matrices, context the sequence, pipeline "
        "the layers, data the batch, expert the experts of each layer.",
        "concepts/index.html#models-and-machines",
    ),
    "utilization": Term(
        "Model FLOP/s utilization (MFU)",
        "FLOPs that the model needs for a step, over what the GPUs could do at their peak in its time. Recomputation "
        "does not count.",
        "concepts/index.html#models-and-machines",
    ),
    "fullest": Term(
        "Fullest rank",
        "Memory of the GPU that has the least left: weights, gradients, optimizer, activations, and what the allocator "
        "loses.",
        "fits.html",
    ),
    "plan-bound": Term(
        "No strategy below",
        "A time for a step below which no strategy of the plan can be, by the same predicted costs.",
        "plan.html",
    ),
}
"""Terms by the name that templates give them."""
