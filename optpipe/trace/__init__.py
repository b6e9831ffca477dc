"""Measured training steps and their comparison with the plan. Without torch: the runtime records."""

from optpipe.trace.document import MeasuredAction, MeasuredDevice, MemoryOverTime, Trace

__all__ = ["MeasuredAction", "MeasuredDevice", "MemoryOverTime", "Trace"]
