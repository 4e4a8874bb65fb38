"""Rank one: test whether M networks form a BatchEnsemble, and fit the nearest one."""

from enfold.ensembles.rank_one.match import match_units
from enfold.ensembles.rank_one.quotient import hadamard_rank_defect
from enfold.ensembles.rank_one.reconstruct import Reconstruction, fit_batch_ensemble, reconstruct
from enfold.ensembles.rank_one.representable import LayerDefect, Representability, representable

__all__ = [
    "LayerDefect",
    "Reconstruction",
    "Representability",
    "fit_batch_ensemble",
    "hadamard_rank_defect",
    "match_units",
    "reconstruct",
    "representable",
]
