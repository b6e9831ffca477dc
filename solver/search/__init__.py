"""Local search over merged sequences of ops."""
