"""Checkpoints: written whole or not at all, and resumed exactly."""
