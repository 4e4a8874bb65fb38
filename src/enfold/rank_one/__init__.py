"""Rank one: when M networks are a BatchEnsemble, and how to get near one."""

from enfold.rank_one.match import match_units
from enfold.rank_one.quotient import hadamard_rank_defect
from enfold.rank_one.reconstruct import Reconstruction, reconstruct
from enfold.rank_one.representable import LayerDefect, Representability, representable
from enfold.rank_one.tie import Tied

__all__ = [
    "LayerDefect",
    "Reconstruction",
    "Representability",
    "Tied",
    "hadamard_rank_defect",
    "match_units",
    "reconstruct",
    "representable",
]
