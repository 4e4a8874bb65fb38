"""The plane of diversity and accuracy: how often a network differs from a base network, for how accurate it is.

    y = d(network, base) / (1 - a),   a: the network's accuracy                                                    (1)

With a* the base's accuracy and K classes, d lies between that of a network that errs independently of the base, and
that of the base itself with so many answers exchanged for random ones that its accuracy falls to a:

    upper: d = 1 - (a* a + (1 - a*)(1 - a) / (K - 1))                                                              (2)
    lower: d = (a* - a) / (a* - (1 - a*) / (K - 1))                                                                (3)

Both are divided by 1 - a as well. They meet at a = 1/K. Independent trainings lie near (2) at full accuracy, samples
around one network below, paying for diversity with accuracy.

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
    """Both curves over accuracy."""

    accuracy: Tensor
    upper: Tensor
    lower: Tensor


def diversity_points(base: Predictions, said: Predictions) -> tuple[Tensor, Tensor]:
    """Accuracy, and equation (1), of every member of `said`: each (K,).

    No difference counts 0 also where there are no errors; a difference without errors is infinite.
    """
    if base.num_members != 1 or not torch.equal(base.labels, said.labels):
        raise EnfoldError(
            f"the base is one network asked about the same examples, got {base.num_members} networks and "
            f"{len(base)} against {len(said)} examples: use member(k) of one part's predictions"
        )
    differs = disagreement_with(base, said)
    accuracies = per_member(accuracy, said)
    return accuracies, torch.where(differs > 0, differs / (1 - accuracies), 0.0)  # (1)


def disagreement_with(base: Predictions, said: Predictions) -> Tensor:
    """The fraction of examples that each network answers otherwise than the base does, (K,)."""
    return (member_log_probs(said).argmax(-1) != member_log_probs(base)[0].argmax(-1)).double().mean(-1)


def limits(base_accuracy: float, num_classes: int, *, points: int = 200) -> Limits:
    """Both curves from chance to the base's accuracy."""
    if num_classes < 2 or not 1 / num_classes <= base_accuracy < 1:
        raise EnfoldError(
            f"the limits are known between chance, 1/{num_classes}, and 1, got a base accuracy of {base_accuracy:.4g}: "
            "take a base network that is better than chance and errs at least once"
        )
    a = torch.linspace(1 / num_classes, base_accuracy, points, dtype=torch.float64)
    return Limits(a, upper_limit(a, base_accuracy, num_classes), lower_limit(a, base_accuracy, num_classes))


def upper_limit(a: Tensor, base: float, num_classes: int) -> Tensor:
    """Equation (2), divided by 1 - a: errors that are independent of the base's."""
    return independent(a, base, num_classes) / (1 - a)


def lower_limit(a: Tensor, base: float, num_classes: int) -> Tensor:
    """Equation (3), divided by 1 - a: the base with answers exchanged for random ones; 0 from a = a* on."""
    return flipped(a, base, num_classes) / (1 - a)


def independent(a: Tensor, base: float, num_classes: int) -> Tensor:
    """Equation (2): how often two networks differ that err independently, each wrong class as likely as another."""
    return 1 - (base * a + (1 - base) * (1 - a) / (num_classes - 1))  # (2)


def flipped(a: Tensor, base: float, num_classes: int) -> Tensor:
    """Equation (3): how many answers must be exchanged for the accuracy to fall to a."""
    room = base - (1 - base) / (num_classes - 1)  # 0 where the base is at chance: nothing is there to lose
    lost = (base - a).clamp_min(0)
    return torch.where(lost > 0, lost / room, 0.0)  # (3)
