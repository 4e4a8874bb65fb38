"""Subspace samples: M members drawn around one training's end, in one of the five ways of Fort et al.

    random      θ = θ_0 + t v/‖v‖,             v ~ N(0, I), t = 10 U, drawn anew while validation accuracy < 0.7  (1)
    dropout     θ = θ_0 ∘ mask / (1 - p),      mask ~ Bernoulli(1 - p) on every weight and bias, p = 0.1 U        (2)
    gaussian    θ = μ + c σ ∘ z,               μ, σ: mean and deviation over checkpoints, z ~ N(0, I), c = 1      (3)
    pca         θ = μ + c Σ_{i<=5} z_i u_i,    u_i: unit principal axes of the checkpoints, z ~ N(0, I), c = 1    (4)
    pca_random  (4) with 30 samples of (1) in the checkpoints' place                                              (5)

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757, and its code.
U is uniform on (0, 1); checkpoints are epochs 30 to 39 of 40. `SubspaceSampling.for_plot` has the plot's settings.

Stored: one network for random, dropout and pca_random, whose members are drawn from the seed whenever they are run, and
1 + `checkpoints` networks for gaussian and pca. While they run, M more are in memory (and `fitted` for pca_random).

Differs from the paper: where no try of (1) is accurate enough the best is taken, and the first without validation data.
Axes that few checkpoints lack are left out, batch-norm statistics re-estimated, frozen parameters not moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.dataset import has_examples
from enfold.engines.base import EngineName
from enfold.engines.skeleton import State
from enfold.engines.tree import Tree
from enfold.ensembles.common.pca import combined, principal_axes, stacked
from enfold.ensembles.common.sampling import Sampled
from enfold.ensembles.common.sharing import Share, refuse_ties, require_size
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import accuracy
from enfold.seeds import generator
from enfold.train import TrainConfig
from enfold.train.batch_norm import reestimate

Kind = Literal["random", "dropout", "gaussian", "pca", "pca_random"]
SCALES = {"random": 10.0, "dropout": 0.1, "gaussian": 1.0, "pca": 1.0, "pca_random": 1.0}  # t, p or c
PLOT = {"random": 70.0, "dropout": 0.1, "gaussian": 10.0, "pca": 6.0}


@dataclass(frozen=True)
class SubspaceSampling(Share):
    """Members drawn around one training's end."""

    num_members: int = 30
    kind: Kind = "random"  # where members are drawn, equations (1) to (5)
    scale: float | None = None  # t, p or c; None: what is published for the kind
    random_scale: bool | None = None  # whether each member has its own, scale · U; None: what is published
    checkpoints: int = 10  # gaussian, pca: how many last epochs are kept
    rank: int = 5  # pca, pca_random: how many axes
    scaled: bool = False  # pca, pca_random: axes as long as the deviation along them, which the paper's are not
    threshold: float | None = 0.7  # random, pca_random: the least validation accuracy of a sample; None: any
    tries: int = 5  # random, pca_random: draws for a sample that reaches the threshold
    fitted: int = 30  # pca_random: the random samples, at 10 U
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if self.kind not in get_args(Kind):
            raise EnfoldError(f"the kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}: choose one")
        if not 0 <= self.amount[0] < (1 if self.kind == "dropout" else float("inf")):
            raise EnfoldError(f"the scale must be 0 or more, below 1 for dropout, got {self.scale}: change scale")
        for name, least in {"checkpoints": 2, "fitted": 2, "rank": 1, "tries": 1}.items():
            if getattr(self, name) < least:
                raise EnfoldError(f"{name} must be at least {least}, got {getattr(self, name)}: raise {name}")

    @classmethod
    def for_plot(cls, kind: Kind, **settings: Any) -> Self:
        """50 members as far out as published for the plot of diversity against accuracy."""
        if kind not in PLOT:
            raise EnfoldError(f"settings for the plot are published for {', '.join(PLOT)}, got {kind!r}: choose one")
        plot = {"num_members": 50, "scale": PLOT[kind], "random_scale": kind != "pca", "threshold": None}
        return cls(kind=kind, **{**plot, **settings})

    @property
    def amount(self) -> tuple[float, bool]:
        """The scale, and whether it is multiplied by U."""
        scale = SCALES[self.kind] if self.scale is None else self.scale
        return scale, self.kind in ("random", "dropout") if self.random_scale is None else self.random_scale

    @property
    def draws(self) -> int:
        """How many random samples (1) there are."""
        return {"random": self.num_members, "pca_random": self.fitted}.get(self.kind, 0)

    def __call__(self, network: nn.Module) -> SubspaceMembers:
        """The network, around which members will be drawn when it is trained."""
        refuse_ties(network)
        return SubspaceMembers(network, self)

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """The last checkpoints are wanted, not the best."""
        if self.kind not in ("gaussian", "pca"):
            return plan
        if plan.epochs < 2:
            raise EnfoldError(f"a spread needs 2 or more checkpoints, got {plan.epochs} epochs: train for more")
        return plan.replace(select="last", patience=None)


class SubspaceMembers(Sampled):
    """The members, computed from the centre, the checkpoints in `path` and the seed."""

    count: Tensor  # epochs seen; `path` is a ring of the last ones
    distance: Tensor  # t of each random sample
    attempt: Tensor  # the try that gave it
    weights: Tensor  # of each member on the centred checkpoints, or random samples: c Σ_i z_i u_i

    def __init__(self, network: nn.Module, share: SubspaceSampling) -> None:
        super().__init__(network, share.num_members, share.engine)
        self.share, K = share, share.checkpoints if share.kind in ("gaussian", "pca") else 0
        self.path = Tree({n: t.detach().expand(K, *t.shape).clone() for n, t in self.moved.items()} if K else {})
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("distance", torch.zeros(share.draws))
        self.register_buffer("attempt", torch.zeros(share.draws, dtype=torch.long))
        self.register_buffer("weights", torch.zeros(share.num_members, share.draws or K))

    @property
    def moved(self) -> State:
        """The centre's trainable parameters."""
        return {name: tensor for name, tensor in self.centre.state().items() if name in self.skeleton.trainable}

    def sample(self) -> State:
        """All members' parameters by the kind's equation; what is frozen is the centre's."""
        M, points = self.num_members, self._points()
        centre = {name: t.expand(M, *t.shape) for name, t in self.centre.named_parameters()}
        c = [self._scale(self.share.amount, m) for m in range(M)]
        if self.share.kind == "dropout":
            points = stacked([self._masked(m, c[m]) for m in range(M)])
        elif self.share.kind == "gaussian":
            z = stacked([{name: c[m] * v for name, v in self._normals(m).items()} for m in range(M)])
            points = {name: t.mean(0) + t.std(0, correction=0) * z[name] for name, t in points.items()}  # (3)
        elif self.share.kind != "random":
            points = combined(points, self.weights[:, : len(next(iter(points.values())))])  # (4)
        return {**centre, **points}

    def _points(self) -> State:
        """The checkpoints seen so far, at least the start, or all random samples: (K, ...)."""
        if self.share.draws:
            return stacked([self._moved_by(sample) for sample in range(self.share.draws)])
        seen = min(max(int(self.count), 1), self.share.checkpoints)
        return {name: tensor[:seen] for name, tensor in self.path.state().items()}

    def _source(self, *purpose: str | int) -> torch.Generator:
        return generator(self.share.seed, "subspace", self.share.kind, *purpose)

    def _scale(self, amount: tuple[float, bool], *purpose: int) -> float:
        return amount[0] * (float(torch.rand((), generator=self._source("scale", *purpose))) if amount[1] else 1.0)

    def _normals(self, *purpose: int) -> State:
        source = self._source("normals", *purpose)
        return {n: torch.randn(t.shape, generator=source).to(t.device, t.dtype) for n, t in self.moved.items()}

    def _moved_by(self, sample: int) -> State:
        v, t = self._normals(sample, int(self.attempt[sample])), self.distance[sample]
        norm = torch.stack([tensor.norm() for tensor in v.values()]).norm()
        return {name: tensor + (t / norm).to(tensor) * v[name] for name, tensor in self.moved.items()}  # (1)

    def _masked(self, member: int, p: float) -> State:
        draw = self._source("mask", member)
        return {n: t * (torch.rand(t.shape, generator=draw).to(t) >= p) / (1 - p) for n, t in self.moved.items()}  # (2)

    def begin(self) -> None:
        """Checkpoints of this training alone."""
        super().begin()
        self.count.zero_()

    @torch.no_grad()
    def after_epoch(self, epoch: int, plan: TrainConfig) -> None:
        """Gather a checkpoint in the place of the oldest."""
        current, slot = self.moved, int(self.count) % self.share.checkpoints
        for name, tensor in self.path.state().items():
            tensor[slot].copy_(current[name])
        self.count += 1

    @torch.no_grad()
    def finish(self, data: Data) -> None:
        """Draw the random samples, fit the axes and give each member its batch-norm statistics."""
        for sample in range(self.share.draws):
            self._search(sample, data)
        if self.share.kind in ("pca", "pca_random"):
            axes = principal_axes(self._points(), self.share.rank, scaled=self.share.scaled)  # (K, rank)
            for member in range(self.num_members):
                z = torch.randn(self.share.rank, generator=self._source("axes", member))[: axes.shape[1]].to(axes)
                self.weights[member, : len(axes)] = (self._scale(self.share.amount, member) * axes @ z).to(self.weights)
        super().finish(data)

    def _search(self, sample: int, data: Data) -> None:
        """The first try that is accurate enough, else the best."""
        threshold = self.share.threshold if has_examples(data.val) else None
        amount = self.share.amount if self.share.kind == "random" else (SCALES["random"], True)
        found = list[float]()
        for attempt in range(self.share.tries):
            self.attempt[sample], self.distance[sample] = attempt, self._scale(amount, sample, attempt)
            if threshold is None:
                return
            network = self.network({**self.centre.state(), **self._moved_by(sample)})
            reestimate(network, data)
            found.append(accuracy(predict(network, data.val)))
            if found[-1] >= threshold:
                return
        best = found.index(max(found))
        self.attempt[sample], self.distance[sample] = best, self._scale(amount, sample, best)
