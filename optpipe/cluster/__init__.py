"""Models, machines and what a training step costs on them: facts and formulas, nothing measured here, no solver."""
