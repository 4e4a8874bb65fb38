"""The theory of averaging on the stored predictions of a run: votes, Jensen's gap, decompositions, Theorem 1.

The identities are exact: of each, the tree has the difference of its sides, which is that of rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from enfold.ensemble import Ensemble
from enfold.ensembles.rank_one.representable import representable
from enfold.metrics import accuracy, mean_member, nll
from enfold.metrics.predictions import Predictions
from enfold.metrics.theory import (
    ambiguity_decomposition,
    bias_variance_covariance,
    jensen_gap,
    majority_vote_accuracy,
)
from enfold.metrics.theory_scores import theory_scores
from enfold.run.seed_run import SeedRun

ACCURACY = 0.45  # of voters worse than chance
VOTERS = (1, 11, 101)
RANK_ONE = "batch-ensemble"  # the step whose members form a BatchEnsemble


def theory_tree(seed_run: SeedRun) -> dict[str, Any]:
    """Return the numbers of the theory for the members of one seed."""
    predictions = seed_run.run.read_predictions("ensemble")
    found: dict[str, Any] = {"voters": {str(count): majority_vote_accuracy(count, 1 - ACCURACY) for count in VOTERS}}
    if predictions is not None:
        test = predictions["test"]
        found |= {"ensemble": _scores(test), "ambiguity": _ambiguity(test), "bias and variance": _variance(test)}
    steps = {step.label: step for step in seed_run.recipe.steps}
    if RANK_ONE in steps and seed_run.is_done("steps", RANK_ONE):
        members = seed_run.members()
        models = {"ensemble": members, RANK_ONE: seed_run.step(steps[RANK_ONE], members)}
        found["rank-one defect"] = {name: _defect(each) for name, each in models.items() if isinstance(each, Ensemble)}
    return found


def _scores(p: Predictions) -> dict[str, float]:
    own = {
        "nll": nll(p),
        "member_nll": mean_member(nll, p),
        "member_accuracy": mean_member(accuracy, p),
        "smallest_jensen_gap": jensen_gap(p).min().item(),
    }
    return theory_scores(p) | own


def _outputs(p: Predictions) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities (M, N, C) and one-hot labels (N, C), for identities of the squared error."""
    return p.log_probs.double().exp(), F.one_hot(p.labels, p.num_classes).double()


def _ambiguity(p: Predictions) -> dict[str, float]:
    parts = ambiguity_decomposition(*_outputs(p))
    ensemble, members, ambiguity = (each.mean().item() for each in (parts.ensemble, parts.members, parts.ambiguity))
    return {
        "ensemble": ensemble,
        "members": members,
        "ambiguity": ambiguity,
        "difference": abs(ensemble - (members - ambiguity)),
    }


def _variance(p: Predictions) -> dict[str, float]:
    """Return the expected error of two averaged members over draws, each pair of members being one draw."""
    outputs, labels = _outputs(p)
    size = 2
    draws = outputs[: p.num_members // size * size].unflatten(0, (-1, size))  # (S, 2, N, C)
    parts = bias_variance_covariance(draws, labels)
    error, squared_bias, variance, covariance = (
        each.mean().item() for each in (parts.error, parts.bias.square(), parts.variance, parts.covariance)
    )
    total = squared_bias + variance / size + (1 - 1 / size) * covariance
    return {
        "error": error,
        "squared bias": squared_bias,
        "variance": variance,
        "covariance": covariance,
        "difference": abs(error - total),
    }


def _defect(model: Ensemble) -> float:
    """Return the largest rank-one defect of a layer by Theorem 1, 0 for a BatchEnsemble."""
    return max(layer.defect for layer in representable(model).layers)
