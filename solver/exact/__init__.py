"""Exact methods: models whose optimum is proved."""
