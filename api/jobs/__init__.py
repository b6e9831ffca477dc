"""Jobs: their records in PostgreSQL, the queue, and the workers that solve them.

For the routes
    store.py        what they ask for; submitting, reading, best, keys and history do it
    records.py      what they are told;  errors.py: what can go wrong;  config.py: how a job may be solved

For the workers
    process.py      a worker as a process, and how `optpipe serve` keeps one
    worker.py       takes up jobs;  runs.py: one job from its begin to its end;  solving.py: in a child process
    leases.py       what a worker may write, and only while the job is its own
    patience.py     whether the silence of other workers means anything
    retention.py    what is removed, and when

Below both
    tables.py       the tables and their constraints;  migrate.py: brings a database there
    queue.py        pgqueuer's statements within our transactions
    solved.py       answers for equal problems
    database.py     addresses and transactions;  listener.py: LISTEN;  embedded.py: a PostgreSQL of our own
"""
