"""Proxy-EnD²: one network learns the Dirichlet distribution with the mean and the spread of the members.

    π̄   = (1/M) Σ_m π_m,   MKL = (1/M) Σ_m KL(π̄ || π_m),   β_0 = (C - 1) / (2 MKL + ε)                (1)
    β_k = β_0 π̄_k + target_offset,   the proxy, of precision β_0' = β_0 + C target_offset              (2)
    α_k = exp(z_k) + offset                                                                            (3)

    forward:  L = KL(Dir(β) || Dir(α))
                = ln Γ(β_0') - Σ_k ln Γ(β_k) + Σ_k ln Γ(α_k) - ln Γ(α_0)
                  + Σ_k (β_k - α_k) (ψ(β_k) - ψ(β_0'))                                                 (4a)
    reverse:  L = -Σ_k π̄_k (ψ(α_k) - ψ(α_0)) - H[Dir(α)] / β_0'                                        (4b)

M. Ryabinin, A. Malinin, M. Gales: Scaling Ensemble Distribution Distillation to Many Classes with Proxy Targets,
NeurIPS 2021, arXiv:2105.06987.

In EnD² the smallest probabilities of the members dominate the loss if there are many classes. Here the members are
first replaced by one distribution, whose precision is Stirling's approximation to the most likely one, and which the
student matches. The result is a network of the members' class; `Dirichlet(network, offset)` gives means, concentrations
and uncertainties.

The paper argues for the reverse divergence, which is the default; the authors' ImageNet command is the forward one.
(4b) is theirs: up to constants in z it is KL(Dir(α) || Dir(1 + β_0' π̄)) / β_0', so for a target_offset of 1 its minimum
is C more precise than (2). ε is 1.2e-7, that of float32: equal members have a large, finite precision. (1) to (4) are
computed in float64; z is clipped to ±230, because ln Γ is infinite at the published bound on α, the largest number
over C.

The network of the last epoch is returned: the validation NLL of the mean, by which epochs are chosen otherwise, does
not depend on the width, and would select a start that predicts well but has no distribution.

Differs from the paper: the bound on z. The labels' term (alpha below 1) is computed from softmax(z), not from the mean
of the distribution. The student may start from a member, and may be an ensemble. Nothing else known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from enfold.arguments import checked
from enfold.distill.dirichlet import DirichletLoss
from enfold.distill.loss import Fraction, Weight
from enfold.metrics.dirichlet import concentrations, differential_entropy, expected_log_probs, log_beta
from enfold.metrics.predictions import mean_log_probs

Direction = Literal["reverse", "forward"]

EPSILON = torch.finfo(torch.float32).eps


@checked
@dataclass(frozen=True)
class ProxyEnD2(DirichletLoss):
    """Match a Dirichlet distribution with the mean and the spread of the teachers.

    The result is a network whose logits are log concentrations: read it with `Dirichlet(network, offset)`.

    Args:
        alpha: Weight of the teachers' term; the labels have the weight 1 - alpha.
        direction: Direction of the divergence from the proxy, equation (4a) or (4b).
        offset: Constant added to the student's concentrations.
        target_offset: Constant added to the concentrations of the proxy.
    """

    alpha: Fraction = 1.0
    direction: Direction = "reverse"
    offset: Weight = 1.0
    target_offset: Weight = 1.0

    def target(self, logits: Tensor) -> Tensor:
        """Return π̄ and, in a last column, β_0 of equation (1): (T, N, C) -> (N, C + 1), in float64."""
        log_probs = torch.log_softmax(logits.double(), dim=-1)
        mean = mean_log_probs(log_probs)  # (N, C)
        divergence = (mean.exp() * (mean - log_probs.mean(0))).sum(-1, keepdim=True).clamp(min=0.0)
        precision = (mean.shape[-1] - 1) / (2 * divergence + EPSILON)  # (1)
        return torch.cat([mean.exp(), precision], dim=-1)

    def loss(self, logits: Tensor, target: Tensor, progress: float) -> Tensor:
        """Return equation (4) for each student.

        Args:
            logits: The students' logits, (S, B, C).
            target: The target (..., B, K), or (..., S, B, K) if each student has its own batch.
            progress: The completed fraction of the training.
        """
        mean, precision = target.double().split([logits.shape[-1], 1], dim=-1)  # (..., B, C), (..., B, 1)
        alphas = concentrations(logits, self.offset)  # (3): (S, B, C)
        betas = self.proxy(mean, precision)
        divergence = forward_kl(alphas, betas) if self.direction == "forward" else reverse_kl(alphas, mean, betas)
        return divergence.mean(-1)

    def proxy(self, mean: Tensor, precision: Tensor) -> Tensor:
        """Return β of equation (2): (..., C) and (..., 1) -> (..., C)."""
        return mean * precision + self.target_offset  # (2)


def forward_kl(alphas: Tensor, betas: Tensor) -> Tensor:
    """Return KL(Dir(β) || Dir(α)): (..., C) -> (...)."""
    return log_beta(alphas) - log_beta(betas) + ((betas - alphas) * expected_log_probs(betas)).sum(-1)  # (4a)


def reverse_kl(alphas: Tensor, mean: Tensor, betas: Tensor) -> Tensor:
    """Return equation (4b), the scaled KL(Dir(α) || Dir(β)) without constants in α: (..., C) -> (...)."""
    return -(mean * expected_log_probs(alphas)).sum(-1) - differential_entropy(alphas) / betas.sum(-1)  # (4b)
