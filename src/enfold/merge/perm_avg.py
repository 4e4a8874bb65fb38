"""permAVG: soft permutations that align members' hidden units are learned, and the aligned weights are averaged.

    P_ln = S(C_ln / τ),   S: Sinkhorn's iterations, C_ln = I at the start                     (1)
    a_l = (1/M) Σ_n P_ln (W_ln P_(l-1)n^-1 h_(l-1) + b_ln),   h_l = ReLU(a_l)                 (2)
    W̄_l = (1/M) Σ_n P_ln W_ln P_(l-1)n^-1,   b̄_l = (1/M) Σ_n P_ln b_ln                        (3)
    min over C   CE(y, softmax(a_L))                                                          (4)

permAVG is from a thesis of 2021. A close relative, for two networks, with Pᵀ and permutations at the end, is published:
F. A. Guerrero Peña et al.: Re-basin via implicit Sinkhorn differentiation, CVPR 2023, arXiv:2212.12042.

Algorithm 1 of the thesis runs (2): layer by layer, one member after the other, all fed with the mean of the layer
before, each P made anew wherever it occurs, and inverted. Inputs and outputs have P = I, as has the first member, the
reference; the other C are learned by Adam, rate 0.1, cosine, 20 epochs, τ = 1. As all members of a layer see one h, (2)
is the network with the weights (3): these are computed once a step, and that network is run once.

With order="joint", as in Algorithm 1, all C are learned at once; the published tables, in which accuracy falls with M,
are of this form. With order="sequential", also in the thesis, members 1 and 2 are aligned first; then P_2 is settled,
member 3 is added at weights of 1/3, only its C are learned, and so on. Two members are the same in both.

S(I/τ) is no identity: for τ = 1 and wide layers it is almost uniform, and the start is not the plain average. Only P of
positive determinant can be reached from there: between them and others P is singular, and P^-1 without bound. `matched`
starts at c times the permutations of weight matching, odd ones too; 10 to 14 is near to them. Tied weights that make
and take the same units need P^-1 = Pᵀ, which is true of permutations alone: `matched` puts these units in order once.

Differs from the thesis: any network whose symmetries are found, not MLPs alone, and what is proved to be no symmetry
stays as it is; systems are solved instead of inverses formed; iterations end when rows sum to 1 within `tolerance`;
members equal to the last bit have one P, and those equal to the first none; the epoch that is best on validation data
is kept, as in all of enfold's trainings (`select`). Its batch size is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from enfold.data import Data
from enfold.engines.modes import evaluating
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.io.files import digest, part_file
from enfold.merge.common.aligning import Mixing, Steps, all_equal, distinct, identities, matchings, mixable, watch
from enfold.merge.common.folding import Composable, mean_state, require_data, require_members
from enfold.merge.common.sinkhorn import Gradient
from enfold.merge.common.soft import Balance, SoftAverage
from enfold.progress import part
from enfold.symmetry import Symmetry
from enfold.train import CrossEntropy, Objective, TrainConfig, fit
from enfold.train.batch_norm import reestimate

LearningOrder = Literal["sequential", "joint"]


def published() -> TrainConfig:
    """Adam, rate 0.1, cosine, 20 epochs."""
    return TrainConfig(epochs=20, optimizer="adam", lr=0.1, schedule="cosine", weight_decay=0.0)


@dataclass(frozen=True)
class PermAVG(Composable):
    """The average of members whose units are aligned by learned soft permutations."""

    temperature: float = 1.0  # τ of equation (1)
    final_temperature: float | None = None  # τ goes to it, by one factor a step; None: it stays
    iterations: int = 100  # of Sinkhorn, at most
    tolerance: float = 1e-8  # iterations end when all rows sum to 1 so nearly, or to rounding
    gradient: Gradient = "unrolled"  # of the iterations that were run, or implicit: of their limit
    warm: bool = False  # iterations start where those of the last step ended: fewer are run, and unrolled
    ridge: float = 0.0  # ε of (P + ε Π) / (1 + ε) in the place of P, Π the permutation at the start: better conditioned
    matched: float | None = None  # start at so many times the permutations of weight matching; None: at C = I
    order: LearningOrder = "sequential"  # members are added one after the other, or joint: all at once
    universe: bool = False  # the first member is aligned too, to what all have in common
    alpha: float = 0.0  # the ensemble's part of the loss; the labels' is 1 - alpha
    mixing: Mixing = "equal"  # weights in training: 1/M, or dirichlet: drawn anew in each step
    gain: bool = False  # a factor for each hidden unit of the average is learned too
    project: bool = False  # the nearest permutations take the place of all P at the end
    reestimate_batch_norm: bool = True  # measure statistics on the training part after averaging
    plan: TrainConfig = field(default_factory=published)  # how C is learned, for each member that is added

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = (self.temperature, self.temperature if self.final_temperature is None else self.final_temperature)
        if not all(0 < temperature < math.inf for temperature in ends):
            raise EnfoldError(f"temperatures must be above 0, got {min(ends)}: 1 is the published one")
        if self.matched is not None and not 0 < self.matched < math.inf:
            raise EnfoldError(f"matched must be above 0, got {self.matched}: 10 to 14 starts near the permutations")
        if self.iterations < 1 or not self.tolerance >= 0:
            raise EnfoldError(
                f"iterations must be 1 or more and the tolerance 0 or more, got {self.iterations} and "
                f"{self.tolerance}: 100 and 1e-8 are usual"
            )
        if not 0 <= self.ridge < math.inf:
            raise EnfoldError(f"the ridge must be 0 or more, got {self.ridge}: 0.1 keeps matrices well conditioned")
        if not 0 <= self.alpha <= 1:
            raise EnfoldError(f"alpha must be in [0, 1], got {self.alpha}: 1 is the ensemble alone, 0 the labels alone")

    def __call__(
        self, members: Ensemble, data: Data, *, checkpoint: Path | None = None, answers: Path | None = None
    ) -> nn.Module:
        """One network; a single member is returned as it is."""
        members = require_members(members, "permAVG", averaged=True, data=data)
        require_data(data, "permAVG")
        if all_equal(members):
            return members.member(0).eval()
        members, symmetry = self.ready(members, data)
        model = self.learned(members, data, symmetry, checkpoint=checkpoint, answers=answers)
        with torch.no_grad():
            if model is None:
                network = members.network(mean_state(members))
            else:
                state = model.projected() if self.project else model.average(model.matrices())  # (3)
                network = members.network({**{name: t[0] for name, t in model.held.state().items()}, **state}).cpu()
            if self.reestimate_batch_norm:
                reestimate(network, data)
        return network.eval()

    @classmethod
    def trainings(cls, members: int, order: LearningOrder = "sequential", **_: object) -> int:
        """How often so many members are trained by the plan."""
        return 1 if order == "joint" else max(members - 1, 1)

    def ready(self, members: Ensemble, data: Data) -> tuple[Ensemble, Symmetry]:
        """What is learned from: the members, units that only permutations may move in order, and what may be mixed."""
        return mixable(members, data, self.plan.seed, matched=self.matched is not None)

    def learned(
        self,
        members: Ensemble,
        data: Data,
        symmetry: Symmetry,
        *,
        checkpoint: Path | None = None,
        answers: Path | None = None,
    ) -> SoftAverage | None:
        """The members of `ready` in their soft permutations (`all_matrices`); None where nothing is to be permuted."""
        states, counts = distinct(members)
        checkpoint = checkpoint and Path(checkpoint)
        if not symmetry.groups or len(states) == 1:  # of members that differ in statistics alone
            return None
        stages = self._stages(len(states))
        files = [checkpoint and part_file(checkpoint, last) if last < len(states) else checkpoint for _, last in stages]
        begin = max((k for k, file in enumerate(files) if file is not None and file.exists()), default=0)
        model: SoftAverage | None = None
        with evaluating(members):
            inner = self._loss(members, data, answers)
            ends = self.temperature, self.final_temperature or self.temperature
            for (first, last), file in list(zip(stages, files, strict=True))[begin:]:
                model = self._stage(members, states[:last], counts[:last], symmetry, first, model)
                if self.reestimate_batch_norm:
                    model.measure_statistics(data)
                model.made_from = digest(tensor for state in states[:last] for tensor in state.values())
                objective = Steps(inner, repr(self), last, ends, self.mixing)
                with part(f"members 1 to {last}" if first < 2 else f"member {last} is added"):
                    fit(model, data, config=self.plan, objective=objective, checkpoint=file, title="perm_avg")
                watch(model)
        for file in filter(None, files[:-1]):
            file.unlink(missing_ok=True)
        return model

    def _stages(self, count: int) -> list[tuple[int, int]]:
        """The first of the members that are learned in each training, and one after the last."""
        first = 0 if self.universe else 1
        if self.order == "joint":
            return [(first, count)]
        return [(first, 2), *((k, k + 1) for k in range(2, count))]

    def _stage(
        self,
        members: Ensemble,
        states: Sequence[State],
        counts: Sequence[int],
        symmetry: Symmetry,
        first: int,
        before: SoftAverage | None,
    ) -> SoftAverage:
        """The model of one training; where it goes on from a checkpoint, what was settled before is read there."""
        own, known = states[first:], set(members.skeleton.parameters)
        like = states[0][symmetry.groups[0].axes[0].name]
        scores = identities(symmetry, len(own), like)  # (1)
        if self.matched is not None:
            scores = [self.matched * each for each in matchings(states[0], own, symmetry, known, self.plan.seed, like)]
        settled = identities(symmetry, first if self.universe else first - 1, like)
        gains = [torch.ones(group.size).to(like) for group in symmetry.groups] if self.gain else []
        if before is not None:
            settled, gains = before.all_matrices(), [gain.detach() for gain in before.gains]
        return SoftAverage(
            members,
            states,
            [count / sum(counts) for count in counts],
            symmetry.groups,
            scores,
            settled,
            gains,
            temperature=self.temperature,
            balance=Balance(self.iterations, self.tolerance, self.gradient, self.warm, self.ridge),
        )

    def _loss(self, members: Ensemble, data: Data, answers: Path | None) -> Objective:
        if not self.alpha:
            return CrossEntropy(self.plan.per_member("label_smoothing", 1)[0])  # (4)
        from enfold.distill.losses.kd import KD  # it starts from merged networks, so it imports this package

        distill = KD(alpha=self.alpha, plan=self.plan)
        return distill.lessons(distill.teacher(members, data, answers))
