"""Sharing: what the methods of `share/` are made of. A method file says the equations, this room does the rest."""

from enfold.sharing.base import (
    NormChoice,
    Share,
    Sharing,
    batch_norm_names,
    chosen_layers,
    refuse_ties,
    require_size,
)
from enfold.sharing.sampling import Sampled

__all__ = [
    "NormChoice",
    "Sampled",
    "Share",
    "Sharing",
    "batch_norm_names",
    "chosen_layers",
    "refuse_ties",
    "require_size",
]
