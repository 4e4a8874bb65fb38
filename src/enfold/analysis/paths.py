"""Paths between two networks: straight lines, Bézier curves and tunnels, and the scores along them.

    straight   φ(t) = (1 - t) θ_1 + t θ_2                                                                          (1)
    bezier     φ(t) = (1 - t)² θ_1 + 2 t (1 - t) θ_c + t² θ_2,   θ_c minimises E over t ~ U(0, 1) of L(φ(t))       (2)
    tunnel     points of (1), trained with the component of every step along θ_2 - θ_1 removed                     (3)

The straight line between independently trained networks crosses a barrier; on (2) and (3) the loss stays low while the
predictions change from those of one end to those of the other: equal loss does not imply equal function.

T. Garipov et al.: Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs, NeurIPS 2018, arXiv:1802.10026 (2);
S. Fort, S. Jastrzębski: Large Scale Structure of Neural Network Loss Landscapes, NeurIPS 2019, arXiv:1906.04724 (3).

Differs from the papers: in (3) positions are projected after each step, which equals projected gradients for SGD, works
with any optimizer, and accumulates no rounding errors. Batch-norm statistics are estimated again for every point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enfold.analysis.diversity_plane import compute_disagreement
from enfold.analysis.interpolation import Barrier, compute_barrier
from enfold.analysis.states import BatchNorm, mix_states, predict_states, select_parameters, to_state, unstack_states
from enfold.analysis.trajectory import compute_cosines
from enfold.data import Data
from enfold.data.convert import Examples
from enfold.data.dataset import PartName
from enfold.engines.call import pack_inputs
from enfold.engines.parameters import Tree
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.verify import find_recomputation
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
class PathScores:
    """Scores of networks along a path and their similarity to its two ends."""

    t: Tensor  # (T,), from 0, the first network, to 1, the second
    loss: Tensor  # (T,), mean cross-entropy in nats
    accuracy: Tensor  # (T,)
    disagreement: Tensor  # (2, T), with the first and the second end
    cosine: Tensor  # (2, T), of the weights

    @property
    def barrier(self) -> dict[str, Barrier]:
        """Return the barriers of loss and error."""
        return {"loss": compute_barrier(self.t, self.loss), "error": compute_barrier(self.t, 1 - self.accuracy)}


def make_line(first: State | nn.Module, second: State | nn.Module, points: int = 21) -> list[State]:
    """Return the states (1) at evenly spaced t; the ends are the networks themselves.

    Args:
        first: The network at t = 0, or its state dict.
        second: The network at the other end, or its state dict.
        points: Number of values of t from 0 to 1.
    """
    if points < 2:
        raise EnfoldError(f"points must be at least 2, got {points}: the default is 21")
    ends = [to_state(first), to_state(second)]
    t = torch.linspace(0, 1, points, dtype=torch.float64)
    return [mix_states(ends, torch.stack([1 - at, at])) for at in t]  # (1)


def match_to(network: nn.Module, first: State, second: State, data: Data, *, seed: int = 0) -> State:
    """Return the second network with its hidden units permuted to match the first; it computes the same function.

    Args:
        network: The network.
        first: The first network.
        second: The second network.
        data: The data.
        seed: The seed.
    """
    return match_state(
        first,
        second,
        find_units(network, first_inputs(data), seed),
        seed=seed,
        learned={name for name, _ in network.named_parameters()},
    )


def score_path(
    network: nn.Module,
    path: Sequence[State],
    data: Data | Examples,
    *,
    part: PartName = "test",
    examples: int | None = None,
    batch_norm: BatchNorm = "reset",
) -> PathScores:
    """Return scores and similarity of the networks on a path with evenly spaced points.

    Args:
        network: The architecture; it is not modified.
        path: The states of the networks.
        data: `Data`, or test examples as `enfold.evaluate` takes them ("reset" needs training data too).
        part: The split that is evaluated.
        examples: The number of examples; None for all.
        batch_norm: "stored", "train" or "reset", as in `answers`.

    Returns:
        Loss, accuracy, disagreement and cosine along the path.
    """
    predictions = predict_states(network, path, data, part=part, examples=examples, batch_norm=batch_norm)
    own = [select_parameters(network, state) for state in path]
    ends = (0, len(path) - 1)
    return PathScores(
        torch.linspace(0, 1, len(path), dtype=torch.float64),
        per_member(nll, predictions),
        per_member(accuracy, predictions),
        torch.stack([compute_disagreement(predictions.member(end), predictions) for end in ends]),
        compute_cosines(own)[list(ends)],
    )


class Bezier(nn.Module):
    """Equation (2) as a trainable module: in train mode every batch uses a random t, in eval mode t = 0.5."""

    def __init__(self, network: nn.Module, first: State, second: State) -> None:
        super().__init__()
        self.skeleton = Skeleton(network)
        middle = mix_states([first, second], torch.tensor([0.5, 0.5]))
        learned = self.skeleton.trainable
        self.control = Tree(
            {name: nn.Parameter(t.clone()) if name in learned else t.clone() for name, t in middle.items()}
        )
        self.ends = nn.ModuleList(
            Tree({name: t.detach().clone() for name, t in end.items()}) for end in (first, second)
        )

    def train(self, mode: bool = True) -> Bezier:
        """Set the mode of this module and of the network."""
        super().train(mode)
        self.skeleton.network.train(mode)
        return self

    def at(self, t: float) -> State:
        """Return φ(t), differentiable with respect to the control point; buffers are those of the control point."""
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

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of the network at t: (B, ...) -> (B, C)."""
        inputs = pack_inputs(args, kwargs)
        t = float(torch.rand(())) if self.training else 0.5
        if torch.is_grad_enabled():
            find_recomputation(self.skeleton, self.control.state(), inputs)
        with self.skeleton.use_values(self.at(t)) as network:
            return member_logits(network, inputs)[0]

    @torch.no_grad()
    def path(self, points: int = 21) -> list[State]:
        """Return the states at evenly spaced t."""
        spaced = torch.linspace(0, 1, points, dtype=torch.float64).tolist()
        return [{name: tensor.detach() for name, tensor in self.at(t).items()} for t in spaced]


def train_bezier(
    network: nn.Module, first: State, second: State, data: Data, plan: TrainConfig = BEZIER, *, quiet: bool = False
) -> Bezier:
    """Train and return a Bézier curve between two networks; the control point is initialized at their mean.

    Args:
        network: The network.
        first: The first network.
        second: The second network.
        data: The data.
        plan: The training settings.
        quiet: Show no progress bar.
    """
    curve = Bezier(network, first, second)
    fit(curve, data, config=plan, title="curve", quiet=quiet)
    return curve


class Tunnel(DeepEnsemble):
    """Points between two networks, trained orthogonally to the line (3)."""

    def __init__(self, network: nn.Module, first: State, second: State, points: int) -> None:
        if points < 3:
            raise EnfoldError(f"points must be at least 3, got {points}: the default is 11")
        inner = make_line(first, second, points)[1:-1]
        skeleton = Skeleton(network)
        super().__init__([skeleton.materialise(state) for state in inner])
        learned = self.skeleton.trainable
        side = {name: (second[name] - first[name]).double() for name in learned}
        length = torch.stack([tensor.square().sum() for tensor in side.values()]).sum().sqrt()
        if not float(length):
            raise EnfoldError("first and second must differ, got the same network twice: choose two members")
        self.direction = {name: tensor / length for name, tensor in side.items()}
        self.start = self.coordinates()

    @torch.no_grad()
    def coordinates(self) -> Tensor:
        """Return the coordinates of the points along θ_2 - θ_1, (points - 2,)."""
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


def train_tunnel(
    network: nn.Module,
    first: State,
    second: State,
    data: Data,
    plan: TrainConfig = TUNNEL,
    *,
    points: int = 11,
    quiet: bool = False,
) -> list[State]:
    """Train and return the path (3); its ends are the networks themselves.

    Args:
        network: The network.
        first: The first network.
        second: The second network.
        data: The data.
        plan: The training settings.
        points: The number of points on the path, including both ends.
        quiet: Show no progress bar.
    """
    between = Tunnel(network, first, second, points)
    fit(between, data, config=plan, title="tunnel", quiet=quiet)
    return [dict(first), *unstack_states(between), dict(second)]
