"""SubspaceSampling: members sampled around the end of one training, in five ways of Fort et al.

    random      θ = θ_0 + t v/‖v‖,             v ~ N(0, I), t = 10 U, drawn again if validation accuracy < 0.7    (1)
    dropout     θ = θ_0 ∘ mask / (1 - p),      mask ~ Bernoulli(1 - p) on every weight and bias, p = 0.1 U        (2)
    gaussian    θ = μ + c σ ∘ z,               μ, σ: mean and deviation over checkpoints, z ~ N(0, I), c = 1      (3)
    pca         θ = μ + c Σ_{i<=5} z_i u_i,    u_i: unit principal axes of the checkpoints, z ~ N(0, I), c = 1    (4)
    pca_random  (4) with 30 samples of (1) in the checkpoints' place                                              (5)

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757, and its code.
U is uniform on (0, 1); checkpoints are epochs 30 to 39 of 40. `SubspaceSampling.for_plot` has the plot's settings.

Stored are one network for random, dropout and pca_random, whose members are computed from the seed whenever they run,
and 1 + `checkpoints` networks for gaussian and pca. While they run, M more are in memory (and `fitted` for pca_random).

Differs from the paper: if no draw of (1) is accurate enough the best is used, without validation data the first. Axes
that a small number of checkpoints does not have are omitted, batch-norm statistics are estimated again, and frozen
parameters do not move.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.dataset import has_examples
from enfold.engines.base import EngineName
from enfold.engines.parameters import Tree
from enfold.engines.skeleton import State
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.options import NonNegative
from enfold.ensembles.common.pca import combine_points, principal_axes, stack_states
from enfold.ensembles.common.sampled import SampledEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import metrics_for
from enfold.seeds import generator
from enfold.tasks import as_task
from enfold.train import TrainConfig
from enfold.train.batch_norm import reestimate

Kind = Literal["random", "dropout", "gaussian", "pca", "pca_random"]
SCALES = {"random": 10.0, "dropout": 0.1, "gaussian": 1.0, "pca": 1.0, "pca_random": 1.0}  # t, p or c
PLOT = {"random": 70.0, "dropout": 0.1, "gaussian": 10.0, "pca": 6.0}


@checked
class SubspaceSampling(SampledEnsemble):
    """Members sampled around the end of one training.

    Args:
        network: The network to train. It is not modified.
        num_members: The number of members.
        kind: The subspace, equations (1) to (5).
        scale: t, p (below 1) or c; None: the published value of the kind.
        random_scale: Whether the scale of every member is multiplied by its own U; None: as published for the kind.
        checkpoints: The number of last epochs that are stored, for gaussian and pca.
        rank: The number of principal axes, for pca and pca_random.
        scaled: Whether axes have the length of the standard deviation along them, for pca and pca_random; in the paper
            they have not.
        threshold: The smallest validation accuracy of a sample, for random and pca_random; None: any. Samples of tasks
            without an accuracy are not selected.
        tries: The number of draws for a sample that reaches the threshold, for random and pca_random.
        fitted: The number of random samples, at 10 U, for pca_random.
        seed: The seed of the samples.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    count: Tensor  # epochs so far; `path` is a ring buffer of the last ones
    distance: Tensor  # t of each random sample
    attempt: Tensor  # the draw that gave it
    weights: Tensor  # of each member on the centred checkpoints or random samples: c Σ_i z_i u_i

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 30,
        *,
        kind: Kind = "random",
        scale: NonNegative | None = None,
        random_scale: bool | None = None,
        checkpoints: Annotated[int, Field(ge=2)] = 10,
        rank: PositiveInt = 5,
        scaled: bool = False,
        threshold: float | None = 0.7,
        tries: PositiveInt = 5,
        fitted: Annotated[int, Field(ge=2)] = 30,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if kind == "dropout" and scale is not None and scale >= 1:
            raise EnfoldError(f"scale must be below 1 for kind='dropout', got {scale}: lower scale")
        refuse_ties(network)
        super().__init__(network, num_members, engine)
        self.kind, self.scale, self.random_scale, self.rank = kind, scale, random_scale, rank
        self.checkpoints, self.scaled, self.threshold, self.tries, self.fitted, self.seed = (
            checkpoints,
            scaled,
            threshold,
            tries,
            fitted,
            seed,
        )
        self.trained_task = as_task(None)
        K = checkpoints if kind in ("gaussian", "pca") else 0
        self.path = Tree({n: t.detach().expand(K, *t.shape).clone() for n, t in self.moved.items()} if K else {})
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("distance", torch.zeros(self.draws))
        self.register_buffer("attempt", torch.zeros(self.draws, dtype=torch.long))
        self.register_buffer("weights", torch.zeros(num_members, self.draws or K))

    @classmethod
    def for_plot(cls, network: nn.Module, kind: Kind, **options: Any) -> Self:
        """Make 50 members with the published scales of the plot of diversity against accuracy.

        Args:
            network: The network to train.
            kind: random, dropout, gaussian or pca.
            **options: Other options of the class.
        """
        if kind not in PLOT:
            raise EnfoldError(f"kind must be one of {', '.join(PLOT)} for the plot, got {kind!r}: choose one")
        plot = {"num_members": 50, "scale": PLOT[kind], "random_scale": kind != "pca", "threshold": None}
        return cls(network, kind=kind, **{**plot, **options})

    @property
    def amount(self) -> tuple[float, bool]:
        """The scale, and whether it is multiplied by U."""
        scale = SCALES[self.kind] if self.scale is None else self.scale
        return scale, self.kind in ("random", "dropout") if self.random_scale is None else self.random_scale

    @property
    def draws(self) -> int:
        """The number of random samples, (1)."""
        return {"random": self.num_members, "pca_random": self.fitted}.get(self.kind, 0)

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Train to the last epoch where checkpoints are collected."""
        if self.kind not in ("gaussian", "pca"):
            return config
        if config.epochs < 2:
            raise EnfoldError(f"epochs must be 2 or more for kind={self.kind!r}, got {config.epochs}: raise epochs")
        return config.replace(select="last", patience=None)

    @property
    def moved(self) -> State:
        """The trainable parameters of the centre."""
        return {name: tensor for name, tensor in self.centre.state().items() if name in self.skeleton.trainable}

    def sample(self) -> State:
        """Return the members' parameters by the equation of the kind; frozen ones are those of the centre."""
        M, points = self.num_members, self._points()
        centre = {name: t.expand(M, *t.shape) for name, t in self.centre.named_parameters()}
        c = [self._scale(self.amount, m) for m in range(M)]
        if self.kind == "dropout":
            points = stack_states([self._mask(m, c[m]) for m in range(M)])
        elif self.kind == "gaussian":
            z = stack_states([{name: c[m] * v for name, v in self._normals(m).items()} for m in range(M)])
            points = {name: t.mean(0) + t.std(0, correction=0) * z[name] for name, t in points.items()}  # (3)
        elif self.kind != "random":
            points = combine_points(points, self.weights[:, : len(next(iter(points.values())))])  # (4)
        return {**centre, **points}

    def _points(self) -> State:
        """Return the checkpoints so far, or all random samples: (K, ...)."""
        if self.draws:
            return stack_states([self._displace(sample) for sample in range(self.draws)])
        seen = min(max(int(self.count), 1), self.checkpoints)
        return {name: tensor[:seen] for name, tensor in self.path.state().items()}

    def _source(self, *purpose: str | int) -> torch.Generator:
        return generator(self.seed, "subspace", self.kind, *purpose)

    def _scale(self, amount: tuple[float, bool], *purpose: int) -> float:
        return amount[0] * (float(torch.rand((), generator=self._source("scale", *purpose))) if amount[1] else 1.0)

    def _normals(self, *purpose: int) -> State:
        source = self._source("normals", *purpose)
        return {n: torch.randn(t.shape, generator=source).to(t.device, t.dtype) for n, t in self.moved.items()}

    def _displace(self, sample: int) -> State:
        v, t = self._normals(sample, int(self.attempt[sample])), self.distance[sample]
        norm = torch.stack([tensor.norm() for tensor in v.values()]).norm()
        return {name: tensor + (t / norm).to(tensor) * v[name] for name, tensor in self.moved.items()}  # (1)

    def _mask(self, member: int, p: float) -> State:
        draw = self._source("mask", member)
        return {n: t * (torch.rand(t.shape, generator=draw).to(t) >= p) / (1 - p) for n, t in self.moved.items()}  # (2)

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Start a new collection of checkpoints."""
        super().on_fit_start(data, config)
        self.count.zero_()
        self.trained_task = as_task(config.task)

    @torch.no_grad()
    def on_epoch_end(self, epoch: int, config: TrainConfig) -> None:
        """Store a checkpoint in place of the oldest."""
        current, slot = self.moved, int(self.count) % self.checkpoints
        for name, tensor in self.path.state().items():
            tensor[slot].copy_(current[name])
        self.count += 1

    @torch.no_grad()
    def on_fit_end(self, data: Data) -> None:
        """Draw the random samples, fit the principal axes and estimate the batch-norm statistics of each member."""
        for sample in range(self.draws):
            self._search(sample, data)
        if self.kind in ("pca", "pca_random"):
            axes = principal_axes(self._points(), self.rank, scaled=self.scaled)  # (K, rank)
            for member in range(self.num_members):
                z = torch.randn(self.rank, generator=self._source("axes", member))[: axes.shape[1]].to(axes)
                self.weights[member, : len(axes)] = (self._scale(self.amount, member) * axes @ z).to(self.weights)
        super().on_fit_end(data)

    def _search(self, sample: int, data: Data) -> None:
        """Draw until a sample is accurate enough; else take the best one."""
        threshold = self.threshold if has_examples(data.val) else None
        amount = self.amount if self.kind == "random" else (SCALES["random"], True)
        scores = list[float]()
        for attempt in range(self.tries):
            self.attempt[sample], self.distance[sample] = attempt, self._scale(amount, sample, attempt)
            if threshold is None:
                return
            network = self.network({**self.centre.state(), **self._displace(sample)})
            reestimate(network, data)
            found = predict(network, data.val, task=self.trained_task)
            metric = metrics_for(found).get("accuracy")
            if metric is None:
                return
            scores.append(metric(found))
            if scores[-1] >= threshold:
                return
        best = scores.index(max(scores))
        self.attempt[sample], self.distance[sample] = best, self._scale(amount, sample, best)
