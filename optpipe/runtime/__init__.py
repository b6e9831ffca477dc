"""Execution of programs in PyTorch: one executor per device, split backwards, offload to pinned host memory."""

from optpipe.runtime.distributed import Gloo, Nccl
from optpipe.runtime.messages import MessageSpec
from optpipe.runtime.parts import Part
from optpipe.runtime.pipeline import Pipeline
from optpipe.runtime.probe import learn_messages, learn_shapes
from optpipe.runtime.recorder import MemoryMeter
from optpipe.runtime.shapes import MessageShapes
from optpipe.runtime.slices import SliceContext, slice_context
from optpipe.runtime.stage import Stage
from optpipe.runtime.transport import Mailbox, Transport, local_transport
from optpipe.runtime.weight_gradients import SplitBackward, register_deferred

__all__ = [
    "Gloo",
    "Mailbox",
    "MemoryMeter",
    "MessageShapes",
    "MessageSpec",
    "Nccl",
    "Part",
    "Pipeline",
    "SliceContext",
    "SplitBackward",
    "Stage",
    "Transport",
    "learn_messages",
    "learn_shapes",
    "local_transport",
    "register_deferred",
    "slice_context",
]
