"""Planes of weights: loss, accuracy and disagreement over a plane through the origin, or through three networks.

    radial:   θ(u, v) = u e_1 + v e_2,                 e_1, e_2 an orthonormal basis of span{θ_1, θ_2}             (1)
    through:  θ(u, v) = θ_1 + u e_1 + v e_2,           of span{θ_2 - θ_1, θ_3 - θ_1}                               (2)

Every point is a mixture Σ_k w_k θ_k of the networks that span the plane, whose weights follow from inner products
alone; at a network's own place they are 1 and 0, so that the plane holds it to the bit. In a radial plane a ray from
the origin is one network at all scales: two trainings give two wedges of low loss, with one function along each.

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757 (1);
T. Garipov et al.: Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs, NeurIPS 2018, arXiv:1802.10026 (2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from enfold.analysis.diversity_plane import disagreement_with
from enfold.analysis.states import BatchNorm, answers, mixture, parameters_of, predictions
from enfold.data import Data
from enfold.data.dataset import PartName
from enfold.engines.skeleton import State
from enfold.errors import EnfoldError
from enfold.metrics import accuracy, nll, per_member
from enfold.progress import progress

PlaneKind = Literal["radial", "through"]
DEGENERATE = 1e-9  # of the squared length that must stick out of the first direction


@dataclass(frozen=True)
class WeightPlane:
    """A plane, the networks that span it and their places on it."""

    kind: PlaneKind
    networks: list[State]
    places: Tensor  # (A, 2), coordinates of the networks

    def weights(self, points: Tensor) -> Tensor:
        """The mixture of the networks at these points: (P, 2) -> (P, A)."""
        if self.kind == "radial":
            radial: Tensor = torch.linalg.solve(self.places.T, points.T).T
            return radial
        sides = self.places[1:] - self.places[0]
        weights = torch.linalg.solve(sides.T, (points - self.places[0]).T).T
        return torch.cat([1 - weights.sum(1, keepdim=True), weights], dim=1)

    def state(self, u: float, v: float) -> State:
        """The network at one point."""
        return mixture(self.networks, _exact(self.weights(torch.tensor([[u, v]], dtype=torch.float64))[0]))


@dataclass(frozen=True)
class PlaneMap:
    """What networks on a grid over a plane score; maps are (V, U), rows from the lowest v up."""

    u: Tensor  # (U,)
    v: Tensor  # (V,)
    loss: Tensor
    accuracy: Tensor
    disagreement: Tensor  # (A, V, U), with each network that spans the plane
    places: Tensor  # (A, 2)


def radial(network: nn.Module, first: State, second: State) -> WeightPlane:
    """Equation (1)."""
    inner = _products([parameters_of(network, first), parameters_of(network, second)])
    return WeightPlane("radial", [first, second], _corner(inner))


def through(network: nn.Module, first: State, second: State, third: State) -> WeightPlane:
    """Equation (2); the first network is at (0, 0), the second at (length, 0)."""
    own = [parameters_of(network, state) for state in (first, second, third)]
    sides = [{name: state[name].double() - own[0][name].double() for name in state} for state in own[1:]]
    places = torch.cat([torch.zeros(1, 2, dtype=torch.float64), _corner(_products(sides))])
    return WeightPlane("through", [first, second, third], places)


def plane_map(
    network: nn.Module,
    plane: WeightPlane,
    data: Data,
    *,
    size: int = 41,
    margin: float = 0.25,
    part: PartName = "test",
    examples: int | None = 500,
    batch_norm: BatchNorm = "train",
    quiet: bool = False,
) -> PlaneMap:
    """Loss, accuracy and disagreement on a grid of `size` x `size` points that holds all networks with a margin.

    The margin is a fraction of the larger extent; a radial plane also holds the origin.
    """
    if size < 2:
        raise EnfoldError(f"a map needs at least 2 points a side, got {size}: 41 is usual")
    u, v = _grid(plane, size, margin)
    points = torch.cartesian_prod(v, u).flip(1)  # (V·U, 2), u runs fastest
    weights = _exact(plane.weights(points))
    asking: dict[str, Any] = {"part": part, "examples": examples, "batch_norm": batch_norm}
    base = predictions(network, plane.networks, data, **asking)
    asked = answers(network, (mixture(plane.networks, weight) for weight in weights), data, **asking)
    rows: list[list[Tensor]] = [[], [], []]
    with progress(f"{plane.kind} plane", len(points), quiet=quiet) as bar:
        for said in asked:
            differs = torch.stack([disagreement_with(base.member(k), said) for k in range(base.num_members)], 1)
            for row, values in zip(rows, (per_member(nll, said), per_member(accuracy, said), differs), strict=True):
                row.append(values)
            bar.advance(said.num_members)
            bar.say("")
    loss, right, apart = (torch.cat(row) for row in rows)
    return PlaneMap(u, v, loss.view(size, size), right.view(size, size), apart.T.reshape(-1, size, size), plane.places)


def _grid(plane: WeightPlane, size: int, margin: float) -> tuple[Tensor, Tensor]:
    held = plane.places
    if plane.kind == "radial":
        held = torch.cat([held, torch.zeros(1, 2, dtype=torch.float64)])
    low, high = held.min(0).values, held.max(0).values
    room = margin * float((high - low).max())
    u, v = (torch.linspace(float(low[k]) - room, float(high[k]) + room, size, dtype=torch.float64) for k in range(2))
    return u, v


def _products(states: Sequence[State]) -> Tensor:
    """Inner products of all pairs."""
    found = torch.zeros(len(states), len(states), dtype=torch.float64)
    for name in states[0]:
        rows = torch.stack([state[name].detach().cpu().double().flatten() for state in states])
        found += rows @ rows.T
    return found


def _corner(inner: Tensor) -> Tensor:
    """Coordinates of two vectors with these inner products, the first along the first axis."""
    length = inner[0, 0].sqrt()
    along = inner[0, 1] / length.clamp_min(torch.finfo(torch.float64).tiny)
    aside = inner[1, 1] - along**2
    if float(aside) <= DEGENERATE * float(inner[1, 1]):
        raise EnfoldError(
            "a plane is spanned by networks that do not lie on one line, but these do: choose other networks"
        )
    return torch.stack([torch.stack([length, torch.zeros_like(length)]), torch.stack([along, aside.sqrt()])])


def _exact(weights: Tensor) -> Tensor:
    """Weights that are 0 or 1 but for rounding are that."""
    rounded = weights.round()
    return torch.where((weights - rounded).abs() < 1e-12, rounded, weights)
