"""Costs of a model: by formula from a table of its sizes, or measured on this hardware."""
