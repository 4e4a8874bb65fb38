"""The zoo: networks that other people wrote, tried with everything that enfold does. `python -m tools.zoo`."""
