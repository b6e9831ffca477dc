"""Schedules in the formats of other tools."""
