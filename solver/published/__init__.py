"""The published schedules: each a function of the Problem that gives orders, or says why it cannot."""
