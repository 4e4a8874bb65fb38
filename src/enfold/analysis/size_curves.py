"""Scores as a function of the size of an ensemble, in members or in modes.

    score(k) = mean over all subsets of k of the M members of the score of their mean probability                  (1)

A mode is the result of one training, and samples are drawn around it. Over modes, each mode predicts with the mean of
its samples (or with its averaged weights) and counts as one member. More modes improve more than more samples of one
mode, above all on corrupted inputs.

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


def compute_size_curve(
    predictions: Predictions,
    sizes: Sequence[int] | None = None,
    *,
    limit: int = 50,
    seed: int = 0,
    scores: Sequence[str] = SCORES,
) -> Curves:
    """Return equation (1) for every score and size.

    Args:
        predictions: Predictions of all members.
        sizes: The sizes; None for 1 to M.
        limit: The largest number of random subsets per size.
        seed: The seed of the subsets.
        scores: Names of metrics.

    Returns:
        For each score a tensor (sizes,).
    """
    chosen = range(1, predictions.num_members + 1) if sizes is None else sizes
    rows = []
    for size in chosen:
        means = (
            predictions.subset(members).mean()
            for members in subsets(predictions.num_members, size, limit=limit, seed=seed)
        )
        values = [[METRICS[name].function(mean) for name in scores] for mean in means]
        rows.append(torch.tensor(values, dtype=torch.float64).mean(0))  # (1)
    found = torch.stack(rows)  # (sizes, scores)
    return {name: found[:, column] for column, name in enumerate(scores)}


def compute_curves_by_severity(
    predictions: Mapping[int, Sequence[Predictions]],
    sizes: Sequence[int] | None = None,
    *,
    limit: int = 50,
    seed: int = 0,
) -> dict[int, Curves]:
    """Return `compute_size_curve` for each severity (0 is clean), averaged over the kinds of corruption.

    Args:
        predictions: Predictions of all modes by severity, one for each kind of corruption.
        sizes: The sizes of ensembles; all by default.
        limit: The maximum number of subsets of one size.
        seed: The seed.
    """
    found: dict[int, Curves] = {}
    for severity, kinds in predictions.items():
        if not kinds:
            raise EnfoldError(f"every severity needs predictions, got none for {severity}: omit it, or pass some")
        curves = [compute_size_curve(each, sizes, limit=limit, seed=seed) for each in kinds]
        found[severity] = {name: torch.stack([curve[name] for curve in curves]).mean(0) for name in SCORES}
    return found


def compare_samples_and_modes(
    modes: Sequence[Predictions], *, limit: int = 50, seed: int = 0, scores: Sequence[str] = SCORES
) -> tuple[Curves, Curves]:
    """Return the curves over samples of one mode (mean over modes), and over modes (mean of all their samples).

    Args:
        modes: Predictions of the samples of each mode.
        limit: The maximum number of subsets of one size.
        seed: The seed.
        scores: The scores, names of `enfold.metrics`.
    """
    inside = [compute_size_curve(mode, limit=limit, seed=seed, scores=scores) for mode in modes]
    within = {name: torch.stack([curve[name] for curve in inside]).mean(0) for name in scores}
    return within, compute_size_curve(over_modes(modes), limit=limit, seed=seed, scores=scores)
