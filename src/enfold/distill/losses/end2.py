"""EnD²: one network learns the distribution of the members' probabilities as a Dirichlet distribution.

    α_k = exp(z_k / T) + offset,   α_0 = Σ_k α_k                                                       (1)
    π_m = (1 - ε) softmax(z_m / T) + ε / C                                                             (2)
    L   = -(1/M) Σ_m ln Dir(π_m; α)
        = Σ_k ln Γ(α_k) - ln Γ(α_0) - Σ_k (α_k - 1) (1/M) Σ_m ln π_mk                                  (3)
    T   = start_temperature until `hold`, then linearly down to 1 within `anneal`                      (4)

A. Malinin, B. Mlodozeniec, M. Gales: Ensemble Distribution Distillation, ICLR 2020, arXiv:1905.00076.

The members are samples of that distribution: its mean is the ensemble's prediction, and its width the disagreement of
the members, which the probabilities of one network do not have. The result is a network of the members' class;
`Dirichlet(network, offset)` gives means, concentrations and uncertainties.

Without (4) the loss is hard to minimise for many classes: the densities of confident members are huge at the corners.
ε avoids an infinite density of a member that is certain of a class; it is 1e-7 in the authors' code, and larger in
their later code. For equal members no distribution is most likely: the loss stays finite, but concentrations grow with
training. (1) to (3) are computed in float64, with logits clipped to ±230.

The network of the last epoch is returned: the validation NLL of the mean, by which epochs are chosen otherwise, does
not depend on the width, and would select a start that predicts well but has no distribution.

Differs from the paper: the schedule of the temperature differs between published settings; from the start on, over half
of the training, is ours. The labels' term (alpha below 1) is computed from softmax(z). The student may start from a
member, and may be an ensemble. Nothing else known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from enfold.arguments import checked
from enfold.distill.dirichlet import DirichletLoss
from enfold.distill.loss import Fraction, Temperature, Weight
from enfold.errors import EnfoldError
from enfold.metrics.dirichlet import concentrations, log_beta


@checked
@dataclass(frozen=True)
class EnD2(DirichletLoss):
    """Match the distribution of the teachers' probabilities by a Dirichlet distribution.

    The result is a network whose logits are log concentrations: read it with `Dirichlet(network, offset)`.

    Args:
        alpha: Weight of the teachers' term; the labels have the weight 1 - alpha.
        start_temperature: T at the start of the training.
        hold: Fraction of the training in which T stays at its start.
        anneal: Fraction of the training after that in which T falls to 1.
        offset: Constant added to all concentrations.
        smoothing: ε, weight of the uniform distribution in the teachers' probabilities.
    """

    alpha: Fraction = 1.0
    start_temperature: Temperature = 10.0
    hold: Weight = 0.0
    anneal: Weight = 0.5
    offset: Weight = 0.0
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 1e-7

    def __post_init__(self) -> None:
        if self.hold + self.anneal > 1:
            raise EnfoldError(
                f"hold and anneal must sum to at most 1, the complete training, got {self.hold} and {self.anneal}: "
                "lower one of them"
            )

    def target(self, logits: Tensor) -> Tensor:
        """Return the teachers' logits, because the temperature changes: (T, N, C) -> (T, N, C)."""
        return logits

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """Return equation (3) for each student.

        Args:
            logits: The students' logits, (S, B, C).
            target: The target (..., B, K), or (..., S, B, K) if each student has its own batch.
            progress: The completed fraction of the training.
        """
        temperature = self.temperature_at(progress)
        alphas = concentrations(logits / temperature, self.offset)  # (1): (S, B, C)
        mean = self.mean_log_probs(target, temperature)  # (B, C) or (S, B, C)
        return (log_beta(alphas) - ((alphas - 1) * mean).sum(-1)).mean(-1)  # (3)

    def mean_log_probs(self, logits: Tensor, temperature: float) -> Tensor:
        """Return (1/M) Σ_m ln π_m of equation (2): (T, ..., C) -> (..., C)."""
        log_probs = torch.log_softmax(logits.double() / temperature, dim=-1)
        if self.smoothing:
            uniform = log_probs.new_tensor(math.log(self.smoothing / log_probs.shape[-1]))
            log_probs = torch.logaddexp(math.log1p(-self.smoothing) + log_probs, uniform)  # (2)
        return log_probs.mean(0)

    def temperature_at(self, progress: float) -> float:
        """Return equation (4)."""
        if progress < self.hold:
            return self.start_temperature
        if progress >= self.hold + self.anneal:
            return 1.0
        done = (progress - self.hold) / self.anneal
        return self.start_temperature + done * (1.0 - self.start_temperature)  # (4)
