"""Runs a program in PyTorch: one interpreter a device, real split backwards, real offload."""

from optpipe.runtime.gloo import Gloo
from optpipe.runtime.interpreter import Pipeline
from optpipe.runtime.memory_meter import MemoryMeter
from optpipe.runtime.stage import Stage
from optpipe.runtime.transport import Mailbox, MessageSpec, Transport

__all__ = ["Gloo", "Mailbox", "MemoryMeter", "MessageSpec", "Pipeline", "Stage", "Transport"]
