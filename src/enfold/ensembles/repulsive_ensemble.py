"""RepulsiveEnsemble: members are trained together and repel each other, in the space of functions or of weights.

    θ_i <- θ_i + η (∇ log p(θ_i | D) - Σ_j ∇_θi k(u_i, u_j) / Σ_j k(u_i, u_j))                         (1)
    k(u, v) = exp(-||u - v||² ln(M + 1) / med),   med = median of ||u_i - u_j||² over all i, j         (2)

    space="function"   u_i = f(X; θ_i), the outputs for the batch X                                    (3)
    space="weights"    u_i = θ_i                                                                       (4)

F. D'Angelo, V. Fortuin: Repulsive Deep Ensembles are Bayesian, NeurIPS 2021, arXiv:2106.11642.

(1) is a Wasserstein gradient flow to the posterior with a kernel density estimate; the second term keeps the members
from collapsing to one mode, which nothing prevents without it. With the mean loss of N examples that `fit` minimises,
it is

    L_i = loss_i + (strength / N) ln Σ_j k(u_i, [u_j]),   [.] without gradient,                        (5)

as ∇ ln Σ_j k is the quotient in (1); strength = 1 is (1). Weight decay is the prior in p(θ | D). All members see the
same batch. Weights in (4) are those that are trained; statistics of batch norm are not compared. The kernel is (2) as
in the authors' code, which adds 1 to M and includes i = j in the median.

Differs from the paper: the function-space prior, which the authors' code estimates from networks drawn from the prior,
is that of the weights (weight decay), and its other estimators of the density (SSGE, spectral) are not offered. The
step is that of the training's optimizer on (5), as in the authors' code. u is the output of the network, such as
logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.data.dataset import length
from enfold.engines.base import EngineName
from enfold.ensemble import Ensemble
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.options import NonNegative
from enfold.ensembles.deep_ensemble import DeepEnsemble, Factory
from enfold.errors import EnfoldError
from enfold.train import TrainConfig
from enfold.train.objective import Objective, TaskLoss, batch_outputs, default_loss

Space = Literal["function", "weights"]


@checked
class RepulsiveEnsemble(DeepEnsemble):
    """Members that are trained together and repel each other.

    Args:
        network: The network, or a function that makes one.
        num_members: The number of members.
        space: What repels: outputs for a batch ("function"), or parameters ("weights").
        strength: The factor of the repulsion; 1 is published.
        seed: The seed of the members' initialisation.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module | Factory,
        num_members: PositiveInt = 4,
        *,
        space: Space = "function",
        strength: NonNegative = 1.0,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if isinstance(network, nn.Module):
            refuse_ties(network)
        super().__init__(network, num_members, seed=seed, engine=engine)
        self.space, self.strength = space, strength
        self.examples: list[int] = []  # N of the training, or its batches and 1

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Train all members on the same batches, to the last epoch, as members depend on each other."""
        if config.bootstrap or config.folds is not None or config.order == "split":
            raise EnfoldError(
                "RepulsiveEnsemble compares members on the same batch, got bootstrap, folds or order='split': leave "
                "them out"
            )
        if config.patience is not None:
            raise EnfoldError(
                f"patience must be None for members that depend on each other, got {config.patience}: leave it out"
            )
        return config.replace(order="shared", select="last")

    def objective(self, config: TrainConfig) -> Objective | None:
        """Return (5)."""
        return RepulsiveLoss(default_loss(config, self.num_members), self.space, self.strength, self.examples)

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Count the training examples, N."""
        count = length(data.train)
        if count is None:
            raise EnfoldError(
                "train must have a length for RepulsiveEnsemble, whose repulsion is divided by the number of examples, "
                "got a loader without one: pass tensors, a Dataset or a DataLoader"
            )
        self.examples[:] = [count, not isinstance(data.train, Split)]


@dataclass(frozen=True)
class RepulsiveLoss:
    """Equation (5).

    Args:
        loss: The loss of the task.
        space: What repels.
        strength: The factor of the repulsion.
        examples: N and 0, or the number of batches and 1, after the start of the training.
    """

    loss: TaskLoss
    space: Space
    strength: float
    examples: list[int] = field(default_factory=list, repr=False)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each member, (M,)."""
        outputs = batch_outputs(model, batch)
        losses = self.loss.of_outputs(outputs, batch)
        if not isinstance(model, Ensemble) or model.num_members < 2 or not self.strength:
            return losses
        points = outputs.flatten(1) if self.space == "function" else trained_weights(model)
        count, in_batches = self.examples or (1, 1)
        size = count * len(batch) if in_batches else count
        return losses + self.strength / size * log_density(points).to(losses)  # (5)


def trained_weights(model: Ensemble) -> Tensor:
    """Return the trained parameters of all members, (M, P)."""
    state, names = model.expand(), model.skeleton.trainable
    return torch.cat([state[name].flatten(1).float() for name in model.skeleton.parameters if name in names], dim=1)


def log_density(points: Tensor) -> Tensor:
    """Return ln Σ_j k(u_i, [u_j]) with the kernel (2) and no gradient through u_j: (M, D) -> (M,)."""
    is_small = len(points) * points.numel() <= SMALL
    squared = (points[:, None] - points.detach()).square().sum(-1) if is_small else _squared_distances(points)
    scale = squared.detach().quantile(0.5)
    if not float(scale) > 0:  # members are equal, or all but one: none repels another
        return squared.new_zeros(len(points))
    return torch.logsumexp(-squared * math.log(len(points) + 1) / scale, dim=1)


SMALL = 1 << 24  # numbers up to which differences are computed, which is exact, instead of products


def _squared_distances(points: Tensor) -> Tensor:
    """Return ||u_i - [u_j]||² from products, without M² D numbers in memory."""
    fixed = points.detach()
    found = points.square().sum(1)[:, None] - 2 * points @ fixed.T + fixed.square().sum(1)
    return found.clamp(min=0.0)
