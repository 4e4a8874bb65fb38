"""Symmetry: which axes of which parameters may be permuted together, found from the network's graph and verified."""

from enfold.symmetry.axes import Axis, Fixed, Group, Symmetry
from enfold.symmetry.find import symmetries
from enfold.symmetry.matching import match_state, match_weights
from enfold.symmetry.permute import permute, permuted, soft

__all__ = [
    "Axis",
    "Fixed",
    "Group",
    "Symmetry",
    "match_state",
    "match_weights",
    "permute",
    "permuted",
    "soft",
    "symmetries",
]
