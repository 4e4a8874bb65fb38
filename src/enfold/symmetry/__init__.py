"""Symmetry: which axes of which parameters may be permuted together, found from the network's graph and verified."""

from enfold.symmetry.axes import Axis, Fixed, Group, Symmetry
from enfold.symmetry.find import symmetries
from enfold.symmetry.matching import matched_to, weight_matching
from enfold.symmetry.permute import permute, permuted, soft

__all__ = [
    "Axis",
    "Fixed",
    "Group",
    "Symmetry",
    "matched_to",
    "permute",
    "permuted",
    "soft",
    "symmetries",
    "weight_matching",
]
