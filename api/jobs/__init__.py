"""Jobs: their records in PostgreSQL, the queue, and the workers that solve them.

store.py        what the routes ask for: submit, read, cancel, follow
leases.py       what a worker may write, and only while the job is its own
worker.py       claims jobs and lets solver threads run them
"""
