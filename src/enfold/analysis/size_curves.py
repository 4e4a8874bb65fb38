"""Curves over the size of an ensemble: what each further member, or each further mode, gives.

    score(k) = mean over all subsets of k of the M members of the score of their mean probability                  (1)

A mode is one training. Members inside a mode are samples around its end; over modes, each mode first answers with the
mean of its own samples (or with its averaged weights) and then counts as one member: weight averaging and ensembling
add to each other, and further modes give more than further samples of one, the more so on corrupted inputs.

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics import METRICS, over_modes
from enfold.metrics.predictions import Predictions
from enfold.metrics.subsets import subsets

SCORES = ("accuracy", "nll", "brier", "ece")
Curves = dict[str, Tensor]  # score -> (sizes,)


def size_curve(
    said: Predictions,
    sizes: Sequence[int] | None = None,
    *,
    limit: int = 50,
    seed: int = 0,
    scores: Sequence[str] = SCORES,
) -> Curves:
    """Equation (1) for every score and size; at most `limit` random subsets of a size are asked."""
    chosen = range(1, said.num_members + 1) if sizes is None else sizes
    rows = []
    for size in chosen:
        means = (said.subset(members).mean() for members in subsets(said.num_members, size, limit=limit, seed=seed))
        values = [[METRICS[name].function(mean) for name in scores] for mean in means]
        rows.append(torch.tensor(values, dtype=torch.float64).mean(0))  # (1)
    found = torch.stack(rows)  # (sizes, scores)
    return {name: found[:, column] for column, name in enumerate(scores)}


def curves_by_severity(
    said: Mapping[int, Sequence[Predictions]], sizes: Sequence[int] | None = None, *, limit: int = 50, seed: int = 0
) -> dict[int, Curves]:
    """`size_curve` for each severity, 0 being clean, as the mean over the kinds of corruption given for it."""
    found: dict[int, Curves] = {}
    for severity, kinds in said.items():
        if not kinds:
            raise EnfoldError(f"every severity needs predictions, got none for {severity}: leave it out, or pass some")
        curves = [size_curve(each, sizes, limit=limit, seed=seed) for each in kinds]
        found[severity] = {name: torch.stack([curve[name] for curve in curves]).mean(0) for name in SCORES}
    return found


def within_and_over(
    modes: Sequence[Predictions], *, limit: int = 50, seed: int = 0, scores: Sequence[str] = SCORES
) -> tuple[Curves, Curves]:
    """What samples add inside a mode, as the mean over modes, and what modes add, each the mean of all its samples."""
    inside = [size_curve(mode, limit=limit, seed=seed, scores=scores) for mode in modes]
    within = {name: torch.stack([curve[name] for curve in inside]).mean(0) for name in scores}
    return within, size_curve(over_modes(modes), limit=limit, seed=seed, scores=scores)
