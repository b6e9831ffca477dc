"""Finds schedules: published ones from their rules, and better ones by optimisation."""
