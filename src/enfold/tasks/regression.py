"""Regression: numbers for each example or each position, with or without a predictive distribution.

A row is one number y with the parameters that a head predicts for it:

    point         μ                        loss (y - μ)²                                               (1)
    gaussian      μ, log v                 loss ½ [log v + (y - μ)²/v + log 2π] ⌊v⌋^β                  (2)
    uncertainty   μ, log a, log e          loss (2) with v = a + e                                     (3)
    quantiles     q_1 ... q_Q              loss mean_k max(τ_k (y - q_k), (τ_k - 1) (y - q_k))         (4)

where ⌊v⌋ has no gradient. For D targets per example, the axis of the outputs has D means, then D variances, then D
epistemic variances. Together, T members predict a mixture with

    m = (1/T) Σ μ_t,   a = (1/T) Σ a_t,   e = (1/T) Σ (μ_t - m)² + (1/T) Σ e_t                         (5)

with a_t = v_t and e_t = 0 for a Gaussian, and a_t = e_t = 0 for a point. A student learns it by the divergences

    point         (m - μ)²                                                                             (6)
    gaussian      KL(N(m, a + e) ‖ N(μ, v))                                                            (7)
    uncertainty   KL(N(m, a) ‖ N(μ, a_s)) + ½ [e/e_s - 1 - log(e/e_s)]                                 (8)
    quantiles     mean_k (q̄_k - q_k)²                                                                  (9)

The second term of (8) is the divergence of two Gaussians of the mean μ with equal centres. Labels determine only
a + e, not its parts: a network with the head "uncertainty" learns them from an ensemble.

(2) with β = 0: Nix, Weigend, ICNN 1994, and for ensembles with (5): Lakshminarayanan, Pritzel, Blundell, NeurIPS 2017,
arXiv:1612.01474. β: Seitzer, Tavakoli, Antic, Martius, "On the pitfalls of heteroscedastic uncertainty estimation with
probabilistic neural networks", ICLR 2022, arXiv:2203.09168. (4): Koenker, Bassett, Econometrica 1978.

Differs from the papers: variances are at least `min_variance`, with the gradient of the variance without that bound, as
in torch.nn.GaussianNLLLoss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from enfold.arguments import checked
from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics.regression_predictions import (
    GaussianPredictions,
    PointPredictions,
    QuantilePredictions,
    RegressionPredictions,
    normal_of_quantiles,
    require_finite,
)
from enfold.metrics.weights import Weights, weighted_mean
from enfold.tasks.base import Prediction, Rows, Task
from enfold.tasks.binary import is_same

Head = Literal["point", "gaussian", "quantiles", "uncertainty"]
WIDTHS: dict[str, int] = {"point": 1, "gaussian": 2, "uncertainty": 3}
"""The number of outputs per target of each head."""
CHOICES = 'task=Regression(head="gaussian"), Regression(head="uncertainty") or Regression(quantiles=(...))'


@checked
@dataclass(frozen=True)
class Regression(Task):
    """Numbers for each example, or for each position of dense outputs and sequences.

    Targets are (B,) or (B, D), or for positions (B, H, W) or (B, D, H, W). Outputs have the same shape with D times as
    many values as the head has parameters at one axis; quantiles are (B, Q) or (B, D, Q).

    Args:
        head: What the outputs of a network are: "point" (numbers), "gaussian" (means, then variances), "uncertainty"
            (means, then aleatoric, then epistemic variances) or "quantiles"; None for "quantiles" if levels are given,
            and for "point" otherwise.
        variance: What the outputs for variances are: the "variance", its "log", or the value of which the "softplus" is
            the variance.
        beta: The exponent β of equation (2); 0 is the likelihood, and 0.5 learns the mean better where the variance is
            large.
        quantiles: The levels of the quantiles, increasing and between 0 and 1.
        axis: Axis of the parameters in the outputs (B, ...) of a network: 1 for (B, 2, H, W), -1 for sequences
            (B, T, 2); None to infer it from the shape of the targets.
        ignore_nan: Whether targets that are NaN are neither trained nor scored; otherwise they are an error.
        min_variance: The smallest variance, in the squared unit of the targets; targets should have about unit
            variance.
    """

    head: Head | None = None
    variance: Literal["variance", "log", "softplus"] = "variance"
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    quantiles: tuple[float, ...] | None = None
    axis: int | None = None
    ignore_nan: bool = False
    min_variance: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6

    name: ClassVar[str] = "regression"
    is_categorical: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.quantiles is not None and self.head is None:
            object.__setattr__(self, "head", "quantiles")
        if (self.quantiles is not None) != (self.head == "quantiles"):
            raise EnfoldError(
                f'quantiles must be given for head="quantiles" and for no other, got quantiles={self.quantiles} and '
                f'head="{self.head}": pass for example Regression(quantiles=(0.05, 0.5, 0.95))'
            )
        levels = (0.5,) if self.quantiles is None else self.quantiles
        if not levels or list(levels) != sorted(set(levels)) or not 0 < levels[0] <= levels[-1] < 1:
            raise EnfoldError(
                f"quantiles must be increasing levels between 0 and 1, got {levels}: pass for example (0.05, 0.5, 0.95)"
            )
        if self.beta and self.head in ("point", "quantiles"):
            raise EnfoldError(
                f'beta must be 0 for head="{self.head}", which has no variance, got {self.beta}: use head="gaussian"'
            )

    @property
    def criterion(self) -> str:
        """The metric by which models are compared: "mse", "nll" or "pinball"; a point has no likelihood."""
        return {"gaussian": "nll", "uncertainty": "nll", "quantiles": "pinball"}.get(self.head or "point", "mse")

    @property
    def width(self) -> int:
        """The number of parameters of a row, K."""
        return len(self.quantiles) if self.quantiles is not None else WIDTHS[self.head or "point"]

    # Shapes

    def resolve(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Regression:
        """Return the task with its head and the axis of the parameters.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
        """
        if not isinstance(targets, Tensor):
            return self
        out, wanted = tuple(outputs.shape[1:]), tuple(targets.shape[1:] if own else targets.shape)
        head = self.head or "point"
        if head == "point":
            if not is_same(out, wanted):
                raise self._unfit(out, wanted)
            return replace(self, head=head)
        axes = [axis for axis in self._axes(out) if self._fits(out, wanted, axis)]
        if not axes:
            raise self._unfit(out, wanted)
        if len(axes) > 1 and self.quantiles is None:
            raise EnfoldError(
                f"axis must be given where the shapes leave it open, got outputs of shape {out} and targets of shape "
                f"{wanted}: pass task=Regression(axis=1) or task=Regression(axis=-1) with your options"
            )
        return replace(self, axis=axes[-1])

    def for_outputs(self, outputs: Tensor, targets: Any, *, own: bool = False) -> Regression:
        """Return the task of a student of a teacher with this task, from the shapes of a first batch.

        As many outputs as the teacher has per target are the same head. Otherwise 1, 2 and 3 outputs per target are
        the heads "point", "gaussian" and "uncertainty".

        Args:
            outputs: Outputs of the student, (S, B, ...).
            targets: Targets (B, ...), or (S, B, ...) if `own`.
            own: Whether students have batches of their own.

        Raises:
            EnfoldError: If no head has outputs of this shape.
        """
        heads: list[Head] = ["point", "gaussian", "uncertainty"]
        tasks = [self, *(replace(self, head=head, quantiles=None, beta=0.0) for head in heads if head != self.head)]
        for task in tasks:
            for each in (task, replace(task, axis=None)):
                try:
                    return each.resolve(outputs, targets, own=own)
                except UnsupportedOutput:
                    continue
        raise self._unfit(tuple(outputs.shape[1:]), tuple(targets.shape[1:] if own else targets.shape))

    def stand_in_targets(self, outputs: Tensor) -> Tensor:
        """Return a tensor without storage in the shape of the mean prediction."""
        return self.predict(outputs).mean.to("meta")

    def _axes(self, shape: tuple[int, ...]) -> list[int]:
        """Return the axes of (B, ...) at which the parameters may be."""
        if self.axis is not None:
            return [self.axis]
        return [-1] if len(shape) <= 2 else [1, -1]

    def _fits(self, out: tuple[int, ...], targets: tuple[int, ...], axis: int) -> bool:
        """Return whether outputs with the parameters at an axis belong to these targets."""
        return self._has_width(out, axis) and is_same(self._without_parameters(out, axis), targets)

    def _has_width(self, shape: tuple[int, ...], axis: int) -> bool:
        """Return whether this axis of (B, ...) can have the parameters."""
        if not -len(shape) < axis < len(shape) or axis == 0:
            return False
        return shape[axis] == self.width if self.quantiles is not None else shape[axis] % self.width == 0

    def _without_parameters(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """Return the shape of the targets of outputs with the parameters at an axis."""
        place = axis % len(shape)
        return (*shape[:place], shape[place] // self.width, *shape[place + 1 :])

    def _unfit(self, out: tuple[int, ...], targets: tuple[int, ...]) -> UnsupportedOutput:
        head = self.head or "point"
        needs = {
            "point": "one output per target",
            "gaussian": "two outputs per target, means and then variances",
            "uncertainty": "three outputs per target, means, aleatoric and epistemic variances",
            "quantiles": f"{self.width} outputs per target, its quantiles, at the last axis",
        }[head]
        axis = "" if self.axis is None else f" at axis {self.axis}"
        return UnsupportedOutput(
            f'task="regression" with head="{head}" needs {needs}{axis}, got outputs of shape {out} and targets of '
            f"shape {targets}: change the shapes, or pass {CHOICES}"
        )

    def _parameters(self, outputs: Tensor) -> Tensor:
        """Return outputs (M, B, ...) in the shape of the targets, with the K parameters of each number last."""
        values = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
        if self.head in ("point", None):
            return values[..., None]
        shape = tuple(values.shape[1:])
        axis = self._axis(shape)
        if axis is None or not self._has_width(shape, axis):
            raise UnsupportedOutput(
                f'axis must be the axis of the parameters for head="{self.head}", got axis={self.axis} and outputs of '
                f"shape {shape}: pass it as an option, such as task=Regression(axis=1), or use another head"
            )
        place = 1 + axis % len(shape)
        if self.quantiles is None:
            values = values.unflatten(place, (self.width, -1))
        return values.movedim(place, -1)

    def _axis(self, shape: tuple[int, ...]) -> int | None:
        """Return the axis of the parameters in outputs (B, ...); None if it is unknown."""
        return -1 if self.axis is None and (len(shape) == 2 or self.quantiles is not None) else self.axis

    def rows(self, outputs: Tensor) -> Tensor:
        """Return the parameters of all numbers, (M, N, K), with the logarithms of variances."""
        return self._canonical(self._parameters(outputs)).flatten(1, -2)

    def _canonical(self, parameters: Tensor) -> Tensor:
        """Return parameters (..., K) with the logarithms of variances."""
        if self.head not in ("gaussian", "uncertainty"):
            return parameters
        return torch.cat([parameters[..., :1], self._log_variance(parameters[..., 1:])], dim=-1)

    def _log_variance(self, raw: Tensor) -> Tensor:
        """Return the logarithm of the variances, at least `min_variance`."""
        smallest = self.min_variance
        if self.variance == "variance":
            if not torch.compiler.is_compiling() and bool((raw < 0).any()):
                raise EnfoldError(
                    f'outputs for variances must not be negative with variance="variance", got {float(raw.min()):.4g}: '
                    'pass task=Regression(variance="softplus") with your options, or end the network with a softplus'
                )
            return (raw + (smallest - raw).clamp(min=0).detach()).log()
        # log softplus(x) is x where softplus(x) = exp(x) in float32
        log = raw if self.variance == "log" else torch.where(raw < -15, raw, F.softplus(raw.clamp(min=-15)).log())
        return log + (math.log(smallest) - log).clamp(min=0).detach()

    def row_targets(self, outputs: Tensor, targets: Tensor, *, own: bool = False, check: bool = True) -> Tensor:
        """Return the numbers, (N,) or (M, N), in the type of the rows.

        Args:
            outputs: Outputs of all members, (M, B, ...).
            targets: Targets (B, ...), or (M, B, ...) if `own`.
            own: Whether members have batches of their own.
            check: Whether values are checked, too.

        Raises:
            EnfoldError: If the shapes do not fit, or targets are infinite, or NaN without `ignore_nan`.
        """
        out, wanted = tuple(outputs.shape[1:]), tuple(targets.shape[1:] if own else targets.shape)
        axis = self._axis(out)
        is_point = self.head in ("point", None)
        if not (is_same(out, wanted) if is_point or axis is None else self._fits(out, wanted, axis)):
            raise self._unfit(out, wanted)
        if check:
            self._check_targets(targets)
        flat = targets.flatten(1) if own else targets.flatten()
        is_half = outputs.dtype in (torch.float16, torch.bfloat16)
        return flat.to(torch.float32 if is_half else outputs.dtype)

    def _check_targets(self, targets: Tensor) -> None:
        if not targets.is_floating_point():
            return
        if self.ignore_nan:
            require_finite("targets", targets.masked_fill(targets.isnan(), 0.0), "remove or replace them")
        else:
            require_finite("targets", targets, "remove them, or pass task=Regression(ignore_nan=True) to leave out NaN")

    def ignore_mask(self, targets: Tensor) -> Tensor | None:
        """Return the targets that are NaN, with `ignore_nan`."""
        return targets.isnan() if self.ignore_nan else None

    # Formulas

    def row_losses(self, rows: Rows, smoothing: float | Sequence[float] = 0.0) -> Tensor:
        """Return the loss of each row, equation (1) to (4): (M, N)."""
        if bool(torch.as_tensor(smoothing).any()):
            raise EnfoldError(
                f'label_smoothing must be 0 for task="regression", got {smoothing}: leave it out, or pass '
                'task="regression" to a method that sets it'
            )
        values, error = rows.values, rows.targets - rows.values[..., 0]
        if self.quantiles is not None:
            levels = values.new_tensor(self.quantiles)
            error = rows.targets[..., None] - values
            return torch.maximum(levels * error, (levels - 1) * error).mean(-1)  # (4)
        if self.head in ("point", None):
            return error.square()  # (1)
        log_variance = torch.logsumexp(values[..., 1:], dim=-1)  # (3)
        losses = (log_variance + error.square() * (-log_variance).exp() + math.log(2 * math.pi)) / 2
        if self.beta:
            losses = losses * (self.beta * log_variance).exp().detach()
        return losses  # (2)

    def _moments(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, aleatoric and epistemic variance of every member: (..., K) -> three (...)."""
        if self.quantiles is not None:
            mean, std = normal_of_quantiles(values, self.quantiles)
            return mean, std.square(), torch.zeros_like(mean)
        mean = values[..., 0]
        zero = torch.zeros_like(mean)
        aleatoric = values[..., 1].exp() if values.shape[-1] > 1 else zero
        return mean, aleatoric, values[..., 2].exp() if values.shape[-1] > 2 else zero

    def _mixture(self, values: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, aleatoric and epistemic variance of the ensemble, equation (5): (T, ..., K) -> three (...)."""
        mean, aleatoric, epistemic = self._moments(values)
        if weights is None:
            return mean.mean(0), aleatoric.mean(0), mean.var(0, correction=0) + epistemic.mean(0)  # (5)
        centre = weighted_mean(mean, weights)
        spread = weighted_mean((mean - centre).square() + epistemic, weights)
        return centre, weighted_mean(aleatoric, weights), spread

    def predict(self, outputs: Tensor, weights: Weights = None) -> Prediction:
        """Return the mean and the variances of the ensemble, equation (5).

        They have the shape of the outputs with D in place of the parameters of D targets; without the axis of the
        quantiles. The mean and the variance of quantiles are those of the closest normal distribution.
        """
        values = self._canonical(self._parameters(outputs))
        members, _, _ = self._moments(values)
        mean, aleatoric, epistemic = self._mixture(values, weights)
        return Prediction(mean, members, aleatoric + epistemic, aleatoric, epistemic, class_axis=None)

    def predictions(self, rows: Rows) -> RegressionPredictions:
        """Return numbers, Gaussians or quantiles with their targets."""
        values = rows.values.detach().double()
        if self.quantiles is not None:
            return QuantilePredictions(values, rows.targets, self.quantiles)
        if self.head in ("point", None):
            return PointPredictions(values[..., 0], rows.targets)
        require_finite("outputs", values, "check for diverged weights or NaN in the inputs")
        epistemic = values[..., 2].exp() if self.head == "uncertainty" else None
        return GaussianPredictions(values[..., 0], rows.targets, values[..., 1].exp(), epistemic)

    # Distillation

    def mixture(self, values: Tensor, weights: Weights = None) -> Tensor:
        """Return mean, aleatoric and epistemic variance of the teachers (5), then their mean quantiles if any.

        Args:
            values: Rows of the teachers, (T, N, K).
            weights: Normalized weights of the teachers; None for equal weights.

        Returns:
            (N, 3), or (N, 3 + Q) for teachers with quantiles.
        """
        moments = torch.stack(self._mixture(values, weights), dim=-1)
        return moments if self.quantiles is None else torch.cat([moments, weighted_mean(values, weights)], dim=-1)

    def divergence(self, values: Tensor, target: Tensor) -> Tensor:
        """Return the divergence of each student, of which this is the task, equation (6) to (9).

        Args:
            values: Rows of the students, (S, N, K).
            target: The mixture of the teachers, (N, 3) or (N, 3 + Q), or one for each student, (S, N, ...).

        Returns:
            (S,).
        """
        mean, aleatoric, epistemic = target[..., :3].unbind(-1)
        if self.quantiles is not None:
            wanted = target[..., 3:] if target.shape[-1] > 3 else self._normal_quantiles(mean, aleatoric + epistemic)
            return (values - wanted).square().mean((1, 2))  # (9)
        error = (values[..., 0] - mean).square()
        if self.head in ("point", None):
            return error.mean(1)  # (6)
        if self.head == "gaussian":
            return self._kl(error, aleatoric + epistemic, values[..., 1]).mean(1)  # (7)
        zero = torch.zeros_like(error)
        parts = self._kl(error, aleatoric, values[..., 1]) + self._kl(zero, epistemic, values[..., 2])
        return parts.mean(1)  # (8)

    def _kl(self, squared: Tensor, variance: Tensor, log_variance: Tensor) -> Tensor:
        """Return KL(N(m, v) ‖ N(μ, v_s)) from (m - μ)², v and log v_s."""
        variance = variance.clamp(min=self.min_variance)
        log_ratio = variance.log() - log_variance
        return (log_ratio.expm1() - log_ratio + squared * (-log_variance).exp()) / 2

    def _normal_quantiles(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the quantiles of N(m, v) at the levels of this task, (..., Q)."""
        levels: Tensor = torch.special.ndtri(torch.tensor(self.quantiles, dtype=torch.float64)).to(mean)
        return mean[..., None] + variance.sqrt()[..., None] * levels
