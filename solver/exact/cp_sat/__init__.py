"""The schedule as a constraint model of intervals, solved by OR-Tools CP-SAT."""
