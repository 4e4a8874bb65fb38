"""SWAG: members drawn from a Gaussian around the SWA mean, fitted to the weights that training passes through.

    θ̄_n  = θ̄_{n-1} + (θ_n - θ̄_{n-1}) / n                                                                     (1)
    σ²_n = (n - 1)/n σ²_{n-1} + (n - 1)/n² (θ_n - θ̄_{n-1})²      which is the mean of θ² minus θ̄²               (2)
    d_n  = θ_n - θ̄_n;      D holds the last K of them as columns                                              (3)
    θ    = θ̄ + √scale ( √max(σ², floor) z₁ + D z₂ / √(K - 1) ),      z₁ ~ N(0, I), z₂ ~ N(0, I_K)               (4)

W. J. Maddox, T. Garipov, P. Izmailov, D. Vetrov, A. G. Wilson: A Simple Baseline for Bayesian Uncertainty in Deep
Learning, NeurIPS 2019, arXiv:1902.02476.

`scale`: the paper writes 1/√2 before the diagonal term and 1/√(2(K - 1)) before the other, its code (wjmaddox/
swa_gaussian) √scale before both; scale = 0.5 makes them the same. The code draws SWAG-Diagonal (`diagonal=True`, no D)
with scale = 1, the whole variance. None takes 0.5, or 1 with `diagonal`. 0 gives the mean.

Training is that of SWA (see `start` and `rate` there). Every member has batch-norm statistics of its own, measured on
the training part when training ends. A member is determined by the seed and its number.

Memory: beside the network 2 + K copies of its weights (2 with `diagonal`), in checkpoints too, and the members' weights
once they were drawn, which is when they are first used.

Differs from the paper: K is the number of columns there are where fewer than `rank` epochs were seen (the code divides
by rank - 1); the variance is updated by (2), as the difference of two large means may be negative in single precision;
nothing else known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enfold.engines.base import EngineName
from enfold.engines.skeleton import State
from enfold.engines.tree import Tree
from enfold.ensembles.common.sharing import Share, require_size
from enfold.ensembles.swa import START, Averaged, require_tail, with_tail
from enfold.errors import EnfoldError
from enfold.seeds import generator
from enfold.train import TrainConfig


@dataclass(frozen=True)
class SWAG(Share):
    """Members drawn from a Gaussian around the mean of the last epochs' weights."""

    num_members: int = 30
    rank: int = 20  # K: how many epochs' deviations are kept
    diagonal: bool = False  # SWAG-Diagonal: variances alone
    scale: float | None = None  # of the covariance members are drawn with; None: 0.5, with `diagonal` 1
    variance_floor: float = 1e-30  # the least variance of a weight
    start: float = START  # fraction of the epochs after which weights are gathered
    rate: float = 0.5  # fraction of the plan's learning rate that is kept from `start` on
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        require_tail(self.start, self.rate)
        if not self.diagonal and self.rank < 2:
            raise EnfoldError(f"the rank must be at least 2, got {self.rank}: 20 is the paper's, or set diagonal: true")
        if self.scale is not None and self.scale < 0:
            raise EnfoldError(f"the scale of a covariance must be 0 or more, got {self.scale}: 0.5 is the paper's")
        if self.variance_floor < 0:
            raise EnfoldError(f"the variance's floor must be 0 or more, got {self.variance_floor}: 1e-30 is usual")

    def __call__(self, network: nn.Module) -> SWAGMembers:
        """M members to be drawn around the network once it is trained."""
        return SWAGMembers(network, self)

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """The plan with a constant rate from `start` on, and no choice among epochs."""
        return with_tail(plan, self, self.start, self.rate, SWAGMembers.least)

    @property
    def spread(self) -> float:
        """√scale."""
        return math.sqrt((1.0 if self.diagonal else 0.5) if self.scale is None else self.scale)


class SWAGMembers(Averaged):
    """The moments of the weights that were passed through, and the members drawn from them."""

    share: SWAG
    least = 2  # one epoch has no variance

    def __init__(self, network: nn.Module, share: SWAG) -> None:
        super().__init__(network, share, share.start, share.engine)
        self.variance = Tree(self._like_weights())
        self.deviations = Tree({} if share.diagonal else self._like_weights(share.rank))
        self._drawn: tuple[object, State] | None = None

    @torch.no_grad()
    def collect(self) -> None:
        """Equations (1) to (3) with the centre's weights."""
        number, centre, means = int(self.count) + 1, self.centre.state(), self.mean.state()
        for name, variance in self.variance.state().items():
            step = centre[name].to(variance.dtype) - means[name]
            variance.mul_((number - 1) / number).addcmul_(step, step.conj(), value=(number - 1) / number**2)  # (2)
        super().collect()  # (1)
        for name, columns in self.deviations.state().items():
            columns[(number - 1) % self.share.rank] = centre[name].to(columns.dtype) - means[name]  # (3)

    def sample(self) -> State:
        """The members, drawn when they are first asked for and again when a moment has changed."""
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
        """Equation (4): the weights of member `index`."""
        source = generator(self.share.seed, "swag", index)
        columns = min(int(self.count), self.share.rank)  # K
        among = torch.randn(self.share.rank, generator=source)[:columns] / math.sqrt(max(columns - 1, 1))
        centre, variances, deviations = self.centre.state(), self.variance.state(), self.deviations.state()
        drawn: State = {}
        for name, mean in self.mean.state().items():
            noise = torch.randn(mean.shape, generator=source).to(mean)
            variance = variances[name].abs() if mean.is_complex() else variances[name]
            move = variance.clamp_min(self.share.variance_floor).sqrt() * noise
            if not self.share.diagonal:
                move += torch.tensordot(among.to(mean), deviations[name][:columns], 1)
            drawn[name] = (mean + self.share.spread * move).to(centre[name].dtype)  # (4)
        return drawn

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_drawn": None}  # a copy draws the same again


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Changes with the values: where the tensor lies, and how often it was written to."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
