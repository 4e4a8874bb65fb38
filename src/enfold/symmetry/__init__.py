"""Permutation symmetries: which axes of which parameters can be permuted together without changing the outputs.

How it works:

1. `tracer.py` runs the network once under a dispatch mode and gives every axis of every value a label.
2. `rules/` state, for each operation, which axes it ties together, keeps, or fixes.
3. `labels.py` holds the labels: a union-find in which labels are unified, split by reshapes and cut by slices.
4. `candidates.py` reads from the labels which groups of parameter axes could be permuted.
5. `verify.py` proves every group: with random weights in float64, random permutations must not change the outputs.
6. `bilinear.py` finds pairs of axes contracted with each other (queries and keys) and assigns their roles.
7. `permute.py` applies permutations or matrices to a state dict; `matching.py` finds permutations that align two
   networks, by coordinate ascent (`ascent.py`) over linear assignment problems (`assignment.py`).
"""

from enfold.symmetry.axes import Axis, Fixed, Group, Symmetry
from enfold.symmetry.find import symmetries
from enfold.symmetry.matching import match_state, match_weights
from enfold.symmetry.permute import permute, permute_state, soft

__all__ = [
    "Axis",
    "Fixed",
    "Group",
    "Symmetry",
    "match_state",
    "match_weights",
    "permute",
    "permute_state",
    "soft",
    "symmetries",
]
