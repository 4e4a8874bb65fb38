"""EnD²: one network learns the distribution of the members' probabilities, as a Dirichlet distribution.

    α_k = exp(z_k / T) + offset,   α_0 = Σ_k α_k                                             (1)
    π_m = (1 - ε) softmax(z_m / T) + ε / C                                                   (2)
    L   = -(1/M) Σ_m ln Dir(π_m; α)
        = Σ_k ln Γ(α_k) - ln Γ(α_0) - Σ_k (α_k - 1) (1/M) Σ_m ln π_mk                        (3)
    T   = start_temperature until `hold`, then linearly down to 1 within `anneal`            (4)

A. Malinin, B. Mlodozeniec, M. Gales: Ensemble Distribution Distillation, ICLR 2020, arXiv:1905.00076.

The members are samples of that distribution: its mean is the ensemble's prediction, and how wide it is tells how much
the members disagree, which one network's probabilities cannot. What is returned is a network of the members' class;
`answering(network)` reads it as `Dirichlet`, which gives means, concentrations and uncertainties.

Without (4) the loss is hard to minimise where classes are many: densities of confident members are huge at the corners.
ε keeps a member that is sure of a class from an infinite density; it is 1e-7 in the authors' code, and larger in their
later ones. Members that are all alike have no widest distribution: the loss stays finite, but concentrations grow as
long as the network is trained. All of (1) to (3) is in float64, with logits kept within ±230.

The network of the last epoch is returned, because the validation NLL of its mean, by which others are chosen, says
nothing about the distribution: it would take the start, which never learned it, where that predicts well.

Differs from the paper: when the temperature falls is not one published setting; from the start on, over half of the
training, is ours. If labels are learned, too (alpha below 1), it is by softmax(z). The student may start from a member,
and may be a share. Nothing else known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.distill.dirichlet import DirichletStudent, require_offset, require_temperature
from enfold.errors import EnfoldError
from enfold.metrics.dirichlet import concentrations, log_beta


@dataclass(frozen=True)
class EnD2(DirichletStudent):
    """One network, or a share of it, whose logits are the concentrations of the members' distribution."""

    temperature: float = 1.0  # the last one, which is 1: concentrations are read as they are
    start_temperature: float = 10.0  # the first one
    hold: float = 0.0  # the part of the training in which it stays
    anneal: float = 0.5  # the part of the training in which it falls to 1 after that
    offset: float = 0.0  # added to all concentrations
    smoothing: float = 1e-7  # ε, the uniform part of the members' probabilities

    def __post_init__(self) -> None:
        super().__post_init__()
        require_temperature(self.temperature)
        require_offset(self.offset)
        if not 0 < self.start_temperature < math.inf:
            raise EnfoldError(f"the start_temperature must be above 0, got {self.start_temperature}: 10 is usual")
        if not (self.hold >= 0 and self.anneal >= 0 and self.hold + self.anneal <= 1):
            raise EnfoldError(
                f"hold and anneal are parts of one training, got {self.hold} and {self.anneal}: let them sum to 1 or "
                "less"
            )
        if not 0 <= self.smoothing < 1:
            raise EnfoldError(f"the smoothing must be in [0, 1), got {self.smoothing}: 1e-7 is usual")

    def target(self, logits: Tensor) -> Tensor:
        """The teachers' logits, of which each moment makes other probabilities: (T, N, C) -> (T, N, C)."""
        return logits

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """Equation (3), of each student."""
        temperature = self.temperature_at(progress)
        alphas = concentrations(logits / temperature, self.offset)  # (1): (S, B, C)
        mean = self.mean_log_probs(target, temperature)  # (B, C) or (S, B, C)
        return (log_beta(alphas) - ((alphas - 1) * mean).sum(-1)).mean(-1)  # (3)

    def mean_log_probs(self, logits: Tensor, temperature: float) -> Tensor:
        """(1/M) Σ_m ln π_m of equation (2): (T, ..., C) -> (..., C)."""
        log_probs = torch.log_softmax(logits.double() / temperature, dim=-1)
        if self.smoothing:
            uniform = log_probs.new_tensor(math.log(self.smoothing / log_probs.shape[-1]))
            log_probs = torch.logaddexp(math.log1p(-self.smoothing) + log_probs, uniform)  # (2)
        return log_probs.mean(0)

    def temperature_at(self, progress: float) -> float:
        """Equation (4)."""
        if progress < self.hold:
            return self.start_temperature
        if progress >= self.hold + self.anneal:
            return self.temperature
        done = (progress - self.hold) / self.anneal
        return self.start_temperature + done * (self.temperature - self.start_temperature)  # (4)
