"""Measuring the methods: suites of instances with recorded results, runs with their curves, and what has changed."""
