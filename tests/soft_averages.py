"""Soft averages as permAVG learns them, without the merge."""

from __future__ import annotations

from functools import partial

from enfold.data import Data
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.merge.common.permutation_learning import (
    PermutationOptions,
    find_groups,
    learn_permutations,
)
from enfold.merge.common.soft import SoftAverage
from enfold.train import TrainConfig

SHORT = TrainConfig(epochs=2, batch_size=16, optimizer="adam", lr=0.1, weight_decay=0.0, select="last")


def learned(fold: partial, members: DeepEnsemble, data: Data) -> SoftAverage | None:
    """What `perm_avg` with these options learns."""
    options = PermutationOptions(**{name: value for name, value in fold.keywords.items() if name != "project"})
    members, symmetry = find_groups(members, data, options)
    return learn_permutations(members, data, symmetry, options)
