"""Jobs: their records in PostgreSQL, the queue, and the workers that solve them.

Routes use `store`; a worker claims jobs through `leases`, which checks that a job is still its own. Both share
`queue` (pgqueuer), `queries`, `results` (schedules, solutions of equal problems) and `tables`.
"""
