"""Client of an OptPipe server: `Client(url, key).solve(problem)`. Requires httpx: ``pip install 'optpipe[serve]'``."""

from optpipe.client.client import Client, JobState, Progress, ServerPlan, ServerResult

__all__ = ["Client", "JobState", "Progress", "ServerPlan", "ServerResult"]
