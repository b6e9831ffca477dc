"""Schedules from an OptPipe server: `Client(url, key).solve(problem)`. Needs httpx (``pip install 'optpipe[serve]'``).

client.py     the calls, and solve: submit, follow, fetch
connection.py requests that are repeated until the server answers, errors as ours
events.py     server-sent events
jobs.py       what the server says of a job
"""

from optpipe.client.client import Client
from optpipe.client.jobs import JobState, Progress, ServerResult

__all__ = ["Client", "JobState", "Progress", "ServerResult"]
