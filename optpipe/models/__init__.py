"""Models that come whole, such as those of transformers, as the stages of a pipeline."""
