"""What a step of training really did, and how that differs from its plan. No torch: recording is the runtime's."""

from optpipe.trace.document import MeasuredAction, MeasuredDevice, MemoryOverTime, Trace

__all__ = ["MeasuredAction", "MeasuredDevice", "MemoryOverTime", "Trace"]
