"""How much of an ensemble's gain one network recovers."""
