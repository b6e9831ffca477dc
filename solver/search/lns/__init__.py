"""Large neighbourhood search: CP-SAT re-optimises one window of the best schedule."""
