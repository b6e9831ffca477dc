"""Chooses the layout of a model: how its layers are cut into stages, placed, batched, and whether they may offload."""
