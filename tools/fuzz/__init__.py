"""Fuzzing of everything that enfold reads: `python -m tools.fuzz`, or `make fuzz`."""
