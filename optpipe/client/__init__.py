"""Schedules from an OptPipe server: `Client(url, key).solve(problem)`. Needs httpx (``pip install
'optpipe[serve]'``)."""

from optpipe.client.client import Client, JobState, Progress, ServerResult

__all__ = ["Client", "JobState", "Progress", "ServerResult"]
