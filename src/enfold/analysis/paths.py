"""Paths between two networks: straight, bent or relaxed; what is on them scores and says.

    straight   φ(t) = (1 - t) θ_1 + t θ_2                                                                          (1)
    bezier     φ(t) = (1 - t)² θ_1 + 2 t (1 - t) θ_c + t² θ_2,   θ_c minimises E over t ~ U(0, 1) of L(φ(t))       (2)
    tunnel     points of (1), trained with the part of every step along θ_2 - θ_1 removed                          (3)

The straight line between independent trainings climbs a ridge; (2) and (3) go around it: loss stays low all the way
while the answers change from those of one end to those of the other, so equal loss does not mean equal function.

T. Garipov et al.: Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs, NeurIPS 2018, arXiv:1802.10026 (2);
S. Fort, S. Jastrzębski: Large Scale Structure of Neural Network Loss Landscapes, NeurIPS 2019, arXiv:1906.04724 (3).

Differs from the papers: in (3) positions are projected after each step, which for SGD is to project gradients, holds
for any optimizer, and lets no rounding add up. Batch-norm statistics are measured anew for every point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enfold.analysis.line import Barrier, excess
from enfold.analysis.many import BatchNorm, each, mixture, parameters_of, predictions
from enfold.analysis.plane import disagreement_with
from enfold.analysis.trajectory import cosine_matrix
from enfold.data import Data
from enfold.data.dataset import PartName
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.tree import Tree
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.merge.common.inputs import first_inputs
from enfold.merge.common.states import find_units
from enfold.metrics import accuracy, nll, per_member
from enfold.symmetry import match_state
from enfold.train import TrainConfig, fit
from enfold.train.optimize import Optimizer

BEZIER = TrainConfig(epochs=5, lr=1e-3, weight_decay=0.0, select="last")
TUNNEL = TrainConfig(
    epochs=2, optimizer="sgd", lr=0.02, weight_decay=0.0, order="shared", select="last", schedule="cosine"
)


@dataclass(frozen=True)
class Along:
    """What networks along a path score, and how alike they are to its two ends."""

    t: Tensor  # (T,), from 0, the first network, to 1, the second
    loss: Tensor  # (T,), mean cross-entropy in nats
    accuracy: Tensor  # (T,)
    disagreement: Tensor  # (2, T), with the first and the second end
    cosine: Tensor  # (2, T), of the weights

    @property
    def barrier(self) -> dict[str, Barrier]:
        """How far loss and error rise above the chord of the ends."""
        return {"loss": excess(self.t, self.loss), "error": excess(self.t, 1 - self.accuracy)}


def straight(first: State, second: State, points: int = 21) -> list[State]:
    """Equation (1) at evenly spaced t; the ends are the networks themselves."""
    if points < 2:
        raise EnfoldError(f"a path needs its two ends, got {points} points: use 2 or more, 21 are usual")
    t = torch.linspace(0, 1, points, dtype=torch.float64)
    return [mixture([first, second], torch.stack([1 - at, at])) for at in t]  # (1)


def matched(network: nn.Module, first: State, second: State, data: Data, *, seed: int = 0) -> State:
    """The second network with its hidden units in the order that is nearest to the first's; the same function."""
    return match_state(
        first,
        second,
        find_units(network, first_inputs(data), seed),
        seed=seed,
        learned={name for name, _ in network.named_parameters()},
    )


def along(
    network: nn.Module,
    path: Sequence[State],
    data: Data,
    *,
    part: PartName = "test",
    examples: int | None = None,
    batch_norm: BatchNorm = "reset",
) -> Along:
    """Scores and similarity of the networks on a path whose points are evenly spaced from end to end.

    `batch_norm="train"` takes the statistics of each batch, as is usual between members of a share.
    """
    said = predictions(network, path, data, part=part, examples=examples, batch_norm=batch_norm)
    own = [parameters_of(network, state) for state in path]
    ends = (0, len(path) - 1)
    return Along(
        torch.linspace(0, 1, len(path), dtype=torch.float64),
        per_member(nll, said),
        per_member(accuracy, said),
        torch.stack([disagreement_with(said.member(end), said) for end in ends]),
        cosine_matrix(own)[list(ends)],
    )


class Bezier(nn.Module):
    """Equation (2) as a network to train: in training every batch is asked at a t of its own, else in the middle."""

    def __init__(self, network: nn.Module, first: State, second: State) -> None:
        super().__init__()
        self.skeleton = Skeleton(network)
        middle = mixture([first, second], torch.tensor([0.5, 0.5]))
        learned = self.skeleton.trainable
        self.control = Tree(
            {name: nn.Parameter(t.clone()) if name in learned else t.clone() for name, t in middle.items()}
        )
        self.ends = nn.ModuleList(
            Tree({name: t.detach().clone() for name, t in end.items()}) for end in (first, second)
        )

    def train(self, mode: bool = True) -> Bezier:
        """Train or eval mode, also of the network inside."""
        super().train(mode)
        self.skeleton.network.train(mode)
        return self

    def at(self, t: float) -> State:
        """φ(t), differentiable in the control point; buffers are the control's, but at the ends their own."""
        first, second = (end.state() for end in self.ends if isinstance(end, Tree))
        if t in (0.0, 1.0):
            return second if t else first
        control = self.control.state()
        weights = ((1 - t) ** 2, 2 * t * (1 - t), t**2)
        return {
            name: weights[0] * first[name] + weights[1] * c + weights[2] * second[name]  # (2)
            if name in self.skeleton.trainable
            else c
            for name, c in control.items()
        }

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, ...) -> (B, C)."""
        t = float(torch.rand(())) if self.training else 0.5
        with self.skeleton.holding(self.at(t)) as network:
            return member_logits(network, inputs)[0]

    @torch.no_grad()
    def path(self, points: int = 21) -> list[State]:
        """The curve at evenly spaced t."""
        spaced = torch.linspace(0, 1, points, dtype=torch.float64).tolist()
        return [{name: tensor.detach() for name, tensor in self.at(t).items()} for t in spaced]


def bezier(
    network: nn.Module, first: State, second: State, data: Data, plan: TrainConfig = BEZIER, *, quiet: bool = False
) -> Bezier:
    """The curve between two networks with a trained control point, which starts in their middle."""
    curve = Bezier(network, first, second)
    fit(curve, data, config=plan, title="curve", quiet=quiet)
    return curve


class Tunnel(DeepEnsemble):
    """Points between two networks, each trained across the line (3)."""

    def __init__(self, network: nn.Module, first: State, second: State, points: int) -> None:
        if points < 3:
            raise EnfoldError(f"a tunnel needs a point between its two ends, got {points} points: use 3 or more")
        inner = straight(first, second, points)[1:-1]
        skeleton = Skeleton(network)
        super().__init__([skeleton.materialise(state) for state in inner])
        learned = self.skeleton.trainable
        side = {name: (second[name] - first[name]).double() for name in learned}
        length = torch.stack([tensor.square().sum() for tensor in side.values()]).sum().sqrt()
        if not float(length):
            raise EnfoldError("a tunnel joins two networks, got the same one twice: choose two members")
        self.direction = {name: tensor / length for name, tensor in side.items()}
        self.start = self.coordinates()

    @torch.no_grad()
    def coordinates(self) -> Tensor:
        """Where the points lie along θ_2 - θ_1, (points - 2,), from the origin."""
        held = self.tree.state()
        products = [held[name].flatten(1).double() @ tensor.flatten() for name, tensor in self.direction.items()]
        return torch.stack(products).sum(0)

    def options(self) -> dict[str, Any]:
        """Return no options: a path is not saved."""
        return {}

    @torch.no_grad()
    def on_step_end(self, step: int, optimizer: Optimizer) -> None:
        """Move every point back to its position along the line."""
        moved, held = self.coordinates() - self.start, self.tree.state()
        for name, tensor in self.direction.items():
            held[name].sub_(moved.view(-1, *(1,) * tensor.ndim) * tensor)  # (3)


def tunnel(
    network: nn.Module,
    first: State,
    second: State,
    data: Data,
    plan: TrainConfig = TUNNEL,
    *,
    points: int = 11,
    quiet: bool = False,
) -> list[State]:
    """The relaxed path (3), all its points trained at once; its ends are the networks themselves."""
    between = Tunnel(network, first, second, points)
    fit(between, data, config=plan, title="tunnel", quiet=quiet)
    return [dict(first), *each(between), dict(second)]
