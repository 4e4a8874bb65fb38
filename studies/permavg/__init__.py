"""Permutation averaging: the tables, figures and records of the permAVG study."""
