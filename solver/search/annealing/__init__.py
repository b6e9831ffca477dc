"""Simulated annealing over one merged sequence of ops per device group."""
