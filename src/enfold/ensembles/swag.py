"""SWAG: members sampled from a Gaussian that is fitted to the weights at the ends of the last epochs.

    θ̄_n  = θ̄_{n-1} + (θ_n - θ̄_{n-1}) / n                                                                     (1)
    σ²_n = (n - 1)/n σ²_{n-1} + (n - 1)/n² (θ_n - θ̄_{n-1})²      which is the mean of θ² minus θ̄²               (2)
    d_n  = θ_n - θ̄_n;      D has the last K of them as columns                                                (3)
    θ    = θ̄ + √scale ( √max(σ², floor) z₁ + D z₂ / √(K - 1) ),      z₁ ~ N(0, I), z₂ ~ N(0, I_K)               (4)

W. J. Maddox, T. Garipov, P. Izmailov, D. Vetrov, A. G. Wilson: A Simple Baseline for Bayesian Uncertainty in Deep
Learning, NeurIPS 2019, arXiv:1902.02476.

`scale`: the paper writes 1/√2 before the diagonal term and 1/√(2(K - 1)) before the other, its code (wjmaddox/
swa_gaussian) √scale before both; scale = 0.5 makes them the same. The code draws SWAG-Diagonal (`diagonal=True`, no D)
with scale = 1, the full variance. 0 gives the mean.

Training is that of SWA (see `start` and `rate` there). Every member has batch-norm statistics of its own, estimated on
the training data when training ends. A member depends on the seed and its index only.

Memory: besides the network 2 + K copies of its weights (2 with `diagonal`), also in checkpoints, and the weights of the
members after their first use.

Differs from the paper: K is the number of columns where fewer than `rank` epochs were collected (the code divides by
rank - 1); the variance is updated by (2), as the difference of two large means may be negative in single precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.engines.parameters import Tree
from enfold.engines.skeleton import State
from enfold.ensembles.common.options import NonNegative, Positive
from enfold.ensembles.swa import START, AveragedEnsemble, Start
from enfold.errors import EnfoldError
from enfold.seeds import generator


@checked
class SWAG(AveragedEnsemble):
    """Members sampled from a Gaussian around the mean of the weights of the last epochs.

    Args:
        network: The network to train. It is not modified.
        num_members: The number of members; 30 is published.
        rank: K: the number of epochs whose deviations from the mean are stored, at least 2.
        diagonal: SWAG-Diagonal: variances only.
        scale: The factor on the covariance that members are sampled with; None: 0.5, or 1 with `diagonal`.
        variance_floor: The smallest variance of a weight.
        start: The fraction of the epochs after which weights are collected.
        rate: The learning rate from `start` on, as a fraction of that of the training.
        seed: The seed of the members.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    least_epochs = 2  # one epoch has no variance

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 30,
        *,
        rank: PositiveInt = 20,
        diagonal: bool = False,
        scale: NonNegative | None = None,
        variance_floor: NonNegative = 1e-30,
        start: Start = START,
        rate: Positive = 0.5,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if not diagonal and rank < 2:
            raise EnfoldError(f"rank must be at least 2, got {rank}: 20 is published, or set diagonal=True")
        super().__init__(network, num_members, start, rate, engine)
        self.rank, self.diagonal, self.scale = rank, diagonal, scale
        self.variance_floor, self.seed = variance_floor, seed
        self.variance = Tree(self._like_weights())
        self.deviations = Tree({} if diagonal else self._like_weights(rank))
        self._drawn: tuple[object, State] | None = None

    @property
    def spread(self) -> float:
        """√scale."""
        return math.sqrt((1.0 if self.diagonal else 0.5) if self.scale is None else self.scale)

    @torch.no_grad()
    def collect(self) -> None:
        """Update the moments by the weights of the centre, (1) to (3)."""
        number, centre, means = int(self.count) + 1, self.centre.state(), self.mean.state()
        for name, variance in self.variance.state().items():
            step = centre[name].to(variance.dtype) - means[name]
            variance.mul_((number - 1) / number).addcmul_(step, step.conj(), value=(number - 1) / number**2)  # (2)
        super().collect()  # (1)
        for name, columns in self.deviations.state().items():
            columns[(number - 1) % self.rank] = centre[name].to(columns.dtype) - means[name]  # (3)

    def sample(self) -> State:
        """Return the members, drawn at the first call and again when a moment has changed."""
        stamp = tuple(
            _stamp(tensor) for tree in (self.mean, self.variance, self.deviations) for tensor in tree.buffers()
        )
        drawn = self._drawn  # another thread may change it
        if drawn is None or drawn[0] != stamp:
            # Drawn under inference_mode, they could not be used outside it.
            with torch.inference_mode(False), torch.no_grad():
                members = [self.draw(index) for index in range(self.num_members)]
                drawn = self._drawn = (
                    stamp,
                    {name: torch.stack([state[name] for state in members]) for name in members[0]},
                )
        return dict(drawn[1])

    def draw(self, index: int) -> State:
        """Return the weights of member `index`, (4)."""
        source = generator(self.seed, "swag", index)
        columns = min(int(self.count), self.rank)  # K
        among = torch.randn(self.rank, generator=source)[:columns] / math.sqrt(max(columns - 1, 1))
        centre, variances, deviations = self.centre.state(), self.variance.state(), self.deviations.state()
        drawn: State = {}
        for name, mean in self.mean.state().items():
            noise = torch.randn(mean.shape, generator=source).to(mean)
            variance = variances[name].abs() if mean.is_complex() else variances[name]
            move = variance.clamp_min(self.variance_floor).sqrt() * noise
            if not self.diagonal:
                move += torch.tensordot(among.to(mean), deviations[name][:columns], 1)
            drawn[name] = (mean + self.spread * move).to(centre[name].dtype)  # (4)
        return drawn

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_drawn": None}  # a copy draws the same again


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Return a value that changes with the tensor: its address and its version."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
