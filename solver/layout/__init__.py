"""Layout of a model: how its layers are cut into stages, placed and batched, and whether they may offload."""
