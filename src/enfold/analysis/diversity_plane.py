"""Diversity against accuracy: the disagreement of a network with a base network, normalized by its error.

    y = d(network, base) / (1 - a),   a: the network's accuracy                                                    (1)

With a* the accuracy of the base and K classes, d lies between that of a network with errors independent of the base,
and that of the base with predictions replaced at random until its accuracy is a:

    upper: d = 1 - (a* a + (1 - a*)(1 - a) / (K - 1))                                                              (2)
    lower: d = (a* - a) / (a* - (1 - a*) / (K - 1))                                                                (3)

Both are divided by 1 - a. They meet at a = 1/K. Independently trained networks are near (2) at full accuracy; samples
around one network are below and lose accuracy.

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics import accuracy, per_member
from enfold.metrics.distributions import member_log_probs
from enfold.metrics.predictions import Predictions


@dataclass(frozen=True)
class Limits:
    """Equations (2) and (3) over accuracy."""

    accuracy: Tensor
    upper: Tensor
    lower: Tensor


def compute_diversity(base: Predictions, predictions: Predictions) -> tuple[Tensor, Tensor]:
    """Return the accuracy and equation (1) of every network in `predictions`, two tensors (K,).

    Without disagreement (1) is 0; with disagreement and without errors it is infinite.

    Args:
        base: Predictions of the base network, M = 1.
        predictions: Predictions of the networks, one member each.
    """
    if base.num_members != 1 or not torch.equal(base.labels, predictions.labels):
        raise EnfoldError(
            f"base must be one network on the same examples, got {base.num_members} networks and "
            f"{len(base)} and {len(predictions)} examples: pass predictions.member(k)"
        )
    differs = compute_disagreement(base, predictions)
    accuracies = per_member(accuracy, predictions)
    return accuracies, torch.where(differs > 0, differs / (1 - accuracies), 0.0)  # (1)


def compute_disagreement(base: Predictions, predictions: Predictions) -> Tensor:
    """Return the fraction of examples for which each network predicts another class than the base, (K,).

    Args:
        base: Predictions of the base network, M = 1.
        predictions: Predictions of the networks, one member each.
    """
    return (member_log_probs(predictions).argmax(-1) != member_log_probs(base)[0].argmax(-1)).double().mean(-1)


def compute_limits(base_accuracy: float, num_classes: int, *, points: int = 200) -> Limits:
    """Return equations (2) and (3), divided by 1 - a, from chance to the accuracy of the base.

    Args:
        base_accuracy: Accuracy a of the base network.
        num_classes: Number of classes.
        points: Number of accuracies.
    """
    if num_classes < 2 or not 1 / num_classes <= base_accuracy < 1:
        raise EnfoldError(
            f"base_accuracy must be at least 1/{num_classes} (chance) and below 1, got {base_accuracy:.4g}: "
            "choose a base network that is better than chance and has errors"
        )
    a = torch.linspace(1 / num_classes, base_accuracy, points, dtype=torch.float64)
    return Limits(a, upper_limit(a, base_accuracy, num_classes), lower_limit(a, base_accuracy, num_classes))


def upper_limit(a: Tensor, base: float, num_classes: int) -> Tensor:
    """Return equation (2) divided by 1 - a: independent errors."""
    return independent(a, base, num_classes) / (1 - a)


def lower_limit(a: Tensor, base: float, num_classes: int) -> Tensor:
    """Return equation (3) divided by 1 - a: the base with random changes; 0 for a >= a*."""
    return flip_fraction(a, base, num_classes) / (1 - a)


def independent(a: Tensor, base: float, num_classes: int) -> Tensor:
    """Return equation (2): disagreement of independent errors, uniform over wrong classes."""
    return 1 - (base * a + (1 - base) * (1 - a) / (num_classes - 1))  # (2)


def flip_fraction(a: Tensor, base: float, num_classes: int) -> Tensor:
    """Return equation (3): the fraction of predictions to replace until the accuracy is a."""
    margin = base - (1 - base) / (num_classes - 1)  # 0 for a base at chance
    lost = (base - a).clamp_min(0)
    return torch.where(lost > 0, lost / margin, 0.0)  # (3)
