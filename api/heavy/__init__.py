"""Work that would hold up the event loop, done in a few processes beside it, with limits on time and memory.

pool.py       who works for whom, and for how long: what routes use
process.py    one such process, from outside
child.py      what runs inside
tasks.py      what can be asked for
"""

from api.heavy.pool import Pool

__all__ = ["Pool"]
