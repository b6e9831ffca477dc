"""Runs a program in PyTorch: one interpreter a device, real split backwards, real offload."""

from optpipe.runtime.gloo import Gloo
from optpipe.runtime.interpreter import Pipeline
from optpipe.runtime.local import local_transport
from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.message_shapes import learn_messages
from optpipe.runtime.messages import MessageSpec
from optpipe.runtime.nccl import Nccl
from optpipe.runtime.stage import Stage
from optpipe.runtime.transport import Mailbox, Transport
from optpipe.runtime.weight_gradients import SplitBackward, register_deferred

__all__ = [
    "Gloo",
    "Mailbox",
    "MemoryMeter",
    "MessageSpec",
    "Nccl",
    "Pipeline",
    "SplitBackward",
    "Stage",
    "Transport",
    "learn_messages",
    "local_transport",
    "register_deferred",
]
