"""Searches for better schedules that prove nothing: annealing, large neighbourhood search, modulo scheduling."""
