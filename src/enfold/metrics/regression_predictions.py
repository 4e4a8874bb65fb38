"""Predictions of numbers: what M members predict for N targets, for the metrics of regression.

Member m predicts for target n one of

    point       a number μ_mn                                                                           (1)
    Gaussian    N(μ_mn, a_mn + e_mn): aleatoric variance a, epistemic variance e of the member itself   (2)
    quantiles   q_mnk at the levels τ_k                                                                 (3)

The ensemble's mean is μ̄ = (1/M) Σ_m μ_m, its total variance the sum of

    aleatoric   a = (1/M) Σ_m a_m                                                                       (4)
    epistemic   e = (1/M) Σ_m (μ_m - μ̄)² + (1/M) Σ_m e_m                                                (5)

A member with quantiles has the mean μ and the standard deviation σ >= 0 of the normal distribution whose quantiles are
closest to its own, the line of least squares q_k ≈ μ + σ Φ⁻¹(τ_k):

    σ = max(0, Σ_k (z_k - z̄) q_k / Σ_k (z_k - z̄)²),   μ = q̄ - σ z̄,   z_k = Φ⁻¹(τ_k)                    (6)

With weights of the members, means over m are weighted. With one level, σ = 0. The quantiles of the ensemble are the
means of the members' (Lichtendahl, Grushka-Cockayne, Winkler, "Is it better to average probabilities or quantiles?",
Management Science 2013).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import ClassVar, Self

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.predictions import RowPredictions
from enfold.metrics.weights import Weights, as_weights, select_weights, weighted_mean


@dataclass(frozen=True)
class RegressionPredictions(RowPredictions):
    """Numbers predicted by M members for N targets, equation (1) to (3), in float64 on the CPU.

    Args:
        means: The mean of each member, (M, N).
        targets: Targets (N,).
        weights: Weights of the members in the ensemble's prediction; None for equal weights.

    Raises:
        EnfoldError: If the shapes do not fit or values are not finite.
    """

    means: Tensor
    targets: Tensor
    weights: Weights = field(default=None, kw_only=True)

    headline: ClassVar[tuple[str, ...]] = ("rmse", "mae", "r2", "crps")
    criterion: ClassVar[str] = "mse"
    score: ClassVar[str] = "rmse"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", as_weights(self.weights, len(self.means)))
        _store(self, "means", self.means)
        _store(self, "targets", self.targets)
        if self.means.ndim != 2:
            raise EnfoldError(
                f"means must have shape (M, N), got {tuple(self.means.shape)}: add the member axis with means[None] "
                "for one network"
            )
        if self.targets.shape != self.means.shape[1:]:
            raise EnfoldError(
                f"targets must have shape ({self.means.shape[1]},), one target per mean, got "
                f"{tuple(self.targets.shape)}: pass targets of shape (N,)"
            )
        if 0 in self.means.shape:
            raise EnfoldError(
                f"means must have at least one member and target, got shape {tuple(self.means.shape)}: check for an "
                "empty split or an empty selection of members"
            )
        require_finite("targets", self.targets, "remove or replace NaN and infinite targets")
        require_finite("means", self.means, "check for diverged weights or NaN in the inputs")

    @property
    def num_members(self) -> int:
        """The number of members M."""
        return len(self.means)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def aleatoric_variances(self) -> Tensor:
        """The aleatoric variance of each member, (M, N); 0 for point predictions."""
        return torch.zeros_like(self.means)

    @property
    def epistemic_variances(self) -> Tensor:
        """The epistemic variance that each member predicts itself, (M, N)."""
        return torch.zeros_like(self.means)

    def uncertainty(self) -> Tensor:
        """Return the variance of the ensemble for every target, (N,)."""
        _, aleatoric, epistemic = self.moments()
        return aleatoric + epistemic

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, aleatoric and epistemic variance of the ensemble, equations (4) and (5), each (N,)."""
        if self.weights is None:
            spread = self.means.var(0, correction=0)
            return self.means.mean(0), self.aleatoric_variances.mean(0), spread + self.epistemic_variances.mean(0)
        mean = weighted_mean(self.means, self.weights)
        epistemic = (self.means - mean).square() + self.epistemic_variances
        aleatoric = weighted_mean(self.aleatoric_variances, self.weights)
        return mean, aleatoric, weighted_mean(epistemic, self.weights)


@dataclass(frozen=True)
class PointPredictions(RegressionPredictions):
    """One number per member and target, equation (1).

    Args:
        means: The prediction of each member, (M, N).
        targets: Targets (N,).
        weights: Weights of the members in the ensemble's prediction; None for equal weights.

    Raises:
        EnfoldError: If the shapes do not fit or values are not finite.
    """

    def mean(self) -> PointPredictions:
        """Return the mean of the members as one predictor (M = 1)."""
        return PointPredictions(weighted_mean(self.means, self.weights)[None], self.targets)

    def subset(self, members: Sequence[int]) -> Self:
        """Return the predictions of these members."""
        chosen = list(members)
        return replace(self, means=self.means[chosen], weights=select_weights(self.weights, chosen))

    def select(self, index: Tensor) -> Self:
        """Return the predictions for the targets at these indices (n,)."""
        return replace(self, means=self.means[:, index], targets=self.targets[index])


@dataclass(frozen=True)
class GaussianPredictions(RegressionPredictions):
    """A Gaussian per member and target, equation (2).

    Args:
        means: The mean of each member, (M, N).
        targets: Targets (N,).
        aleatoric: The aleatoric variance of each member, (M, N).
        epistemic: The epistemic variance that each member predicts itself, (M, N); None for 0.
        weights: Weights of the members in the ensemble's prediction; None for equal weights.

    Raises:
        EnfoldError: If the shapes do not fit, values are not finite, or a variance is not positive.
    """

    aleatoric: Tensor
    epistemic: Tensor | None = None

    headline: ClassVar[tuple[str, ...]] = ("rmse", "nll", "crps", "coverage_90")
    criterion: ClassVar[str] = "nll"

    def __post_init__(self) -> None:
        super().__post_init__()
        _store(self, "aleatoric", self.aleatoric)
        _require_shape("aleatoric", self.aleatoric, self.means.shape)
        if self.epistemic is not None:
            _store(self, "epistemic", self.epistemic)
            _require_shape("epistemic", self.epistemic, self.means.shape)
        for name in ("aleatoric", "epistemic"):
            values = getattr(self, name)
            if values is not None:
                require_finite(name, values, "check for diverged weights")
                if bool((values < 0).any()):
                    raise EnfoldError(
                        f"{name} must not be negative, got {float(values.min()):.4g}: pass variances, not their logs"
                    )
        if bool((self.variances <= 0).any()):
            raise EnfoldError("the variance of each Gaussian must be positive, got 0: add a smallest variance")

    @property
    def aleatoric_variances(self) -> Tensor:
        """The aleatoric variance of each member, (M, N)."""
        return self.aleatoric

    @property
    def epistemic_variances(self) -> Tensor:
        """The epistemic variance that each member predicts itself, (M, N)."""
        return torch.zeros_like(self.means) if self.epistemic is None else self.epistemic

    @property
    def variances(self) -> Tensor:
        """The variance of each member's Gaussian, (M, N)."""
        return self.aleatoric if self.epistemic is None else self.aleatoric + self.epistemic

    def mean(self) -> GaussianPredictions:
        """Return the Gaussian with the ensemble's mean and variance as one predictor (M = 1)."""
        mean, aleatoric, epistemic = self.moments()
        return GaussianPredictions(mean[None], self.targets, aleatoric[None], epistemic[None])

    def subset(self, members: Sequence[int]) -> Self:
        """Return the predictions of these members."""
        index = list(members)
        epistemic = None if self.epistemic is None else self.epistemic[index]
        return replace(
            self,
            means=self.means[index],
            aleatoric=self.aleatoric[index],
            epistemic=epistemic,
            weights=select_weights(self.weights, index),
        )

    def select(self, index: Tensor) -> GaussianPredictions:
        """Return the predictions for the targets at these indices (n,)."""
        epistemic = None if self.epistemic is None else self.epistemic[:, index]
        return replace(
            self,
            means=self.means[:, index],
            targets=self.targets[index],
            aleatoric=self.aleatoric[:, index],
            epistemic=epistemic,
        )


@dataclass(frozen=True, init=False)
class QuantilePredictions(RegressionPredictions):
    """Quantiles per member and target, equation (3).

    Args:
        quantiles: The quantiles of each member, (M, N, Q).
        targets: Targets (N,).
        levels: The levels τ of the quantiles.
        weights: Weights of the members in the ensemble's prediction; None for equal weights.

    Raises:
        EnfoldError: If the shapes do not fit or values are not finite.
    """

    quantiles: Tensor
    levels: tuple[float, ...]

    headline: ClassVar[tuple[str, ...]] = ("rmse", "pinball", "quantile_error", "mae")
    criterion: ClassVar[str] = "pinball"

    def __init__(self, quantiles: Tensor, targets: Tensor, levels: Sequence[float], *, weights: Weights = None) -> None:
        _store(self, "quantiles", quantiles)
        if quantiles.ndim != 3 or quantiles.shape[-1] != len(levels):
            raise EnfoldError(
                f"quantiles must have shape (M, N, {len(levels)}) for {len(levels)} levels, got "
                f"{tuple(quantiles.shape)}: add the member axis with quantiles[None] for one network"
            )
        require_finite("quantiles", self.quantiles, "check for diverged weights or NaN in the inputs")
        object.__setattr__(self, "levels", tuple(levels))
        mean, std = normal_of_quantiles(self.quantiles, self.levels)
        object.__setattr__(self, "_aleatoric", std.square())
        super().__init__(mean, targets, weights=weights)

    @property
    def aleatoric_variances(self) -> Tensor:
        """The variance σ² of each member by equation (6), (M, N)."""
        found: Tensor = vars(self)["_aleatoric"]
        return found

    def mean(self) -> QuantilePredictions:
        """Return the mean quantiles as one predictor (M = 1)."""
        return QuantilePredictions(weighted_mean(self.quantiles, self.weights)[None], self.targets, self.levels)

    def subset(self, members: Sequence[int]) -> QuantilePredictions:
        """Return the predictions of these members."""
        chosen, weights = list(members), select_weights(self.weights, members)
        return QuantilePredictions(self.quantiles[chosen], self.targets, self.levels, weights=weights)

    def select(self, index: Tensor) -> QuantilePredictions:
        """Return the predictions for the targets at these indices (n,)."""
        return QuantilePredictions(self.quantiles[:, index], self.targets[index], self.levels, weights=self.weights)

    def with_weights(self, weights: Sequence[float] | Tensor | None) -> QuantilePredictions:
        """Return the predictions with other weights of the members; None for equal weights."""
        known = as_weights(weights, self.num_members)
        return QuantilePredictions(self.quantiles, self.targets, self.levels, weights=known)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _normal_levels(levels: tuple[float, ...]) -> list[float]:
    """Return the quantiles of N(0, 1) as numbers, so that an exported graph has no operation for them."""
    return [NormalDist().inv_cdf(level) for level in levels]


def normal_of_quantiles(quantiles: Tensor, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the normal distribution closest to quantiles (..., Q), equation (6)."""
    z = torch.tensor(_normal_levels(tuple(levels)), dtype=torch.float64).to(quantiles)
    centred = z - z.mean()
    total = centred.square().sum()
    if len(levels) == 1:
        return quantiles.mean(-1), torch.zeros_like(quantiles[..., 0])
    std = ((quantiles * centred).sum(-1) / total).clamp(min=0.0)  # (6)
    return quantiles.mean(-1) - std * z.mean(), std


def require_finite(name: str, values: Tensor, remedy: str) -> None:
    """Refuse NaN and infinite values.

    Args:
        name: Their name in the error message.
        values: The values.
        remedy: What the user can do.

    Raises:
        EnfoldError: If a value is not finite; the message has its position.
    """
    wrong = ~torch.isfinite(values)
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        where = str(index[0]) if len(index) == 1 else str(index)
        raise EnfoldError(f"{name} must be finite, got {values[index].item()} at index {where}: {remedy}")


def _require_shape(name: str, values: Tensor, shape: torch.Size) -> None:
    if values.shape != shape:
        raise EnfoldError(
            f"{name} must have the shape of the means {tuple(shape)}, got {tuple(values.shape)}: pass one variance "
            "for each mean"
        )


def _store(predictions: RegressionPredictions, name: str, values: Tensor) -> None:
    object.__setattr__(predictions, name, values.detach().to("cpu", torch.float64))
