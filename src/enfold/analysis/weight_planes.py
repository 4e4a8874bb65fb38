"""Loss, accuracy and disagreement on a plane of weights through the origin, or through three networks.

    radial:   θ(u, v) = u e_1 + v e_2,                 e_1, e_2 an orthonormal basis of span{θ_1, θ_2}             (1)
    through:  θ(u, v) = θ_1 + u e_1 + v e_2,           of span{θ_2 - θ_1, θ_3 - θ_1}                               (2)

Every point is a mixture Σ_k w_k θ_k of the networks that span the plane, with weights computed from inner products; at
the position of a network they are exactly 1 and 0. In a radial plane a ray from the origin is one network at all
scales: two trainings give two wedges of low loss, with one function along each.

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757 (1);
T. Garipov et al.: Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs, NeurIPS 2018, arXiv:1802.10026 (2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from enfold.analysis.diversity_plane import compute_disagreement
from enfold.analysis.states import (
    BatchNorm,
    mix_states,
    predict_in_batches,
    predict_states,
    select_parameters,
    to_state,
)
from enfold.data import Data
from enfold.data.convert import Examples
from enfold.data.dataset import PartName
from enfold.engines.skeleton import State
from enfold.errors import EnfoldError
from enfold.metrics import accuracy, nll, per_member
from enfold.progress import progress

PlaneKind = Literal["radial", "through"]
DEGENERATE = 1e-9  # smallest relative squared length orthogonal to the first direction


@dataclass(frozen=True)
class WeightPlane:
    """A plane, the networks that span it and their coordinates."""

    kind: PlaneKind
    networks: list[State]
    places: Tensor  # (A, 2), coordinates of the networks

    def weights(self, points: Tensor) -> Tensor:
        """Return the mixture weights at points: (P, 2) -> (P, A)."""
        if self.kind == "radial":
            coordinates: Tensor = torch.linalg.solve(self.places.T, points.T).T
            return coordinates
        sides = self.places[1:] - self.places[0]
        weights = torch.linalg.solve(sides.T, (points - self.places[0]).T).T
        return torch.cat([1 - weights.sum(1, keepdim=True), weights], dim=1)

    def state(self, u: float, v: float) -> State:
        """Return the network at one point."""
        return mix_states(self.networks, _exact(self.weights(torch.tensor([[u, v]], dtype=torch.float64))[0]))


@dataclass(frozen=True)
class PlaneMap:
    """Scores of networks on a grid over a plane; maps are (V, U), with v ascending."""

    u: Tensor  # (U,)
    v: Tensor  # (V,)
    loss: Tensor
    accuracy: Tensor
    disagreement: Tensor  # (A, V, U), with each network that spans the plane
    places: Tensor  # (A, 2)


def make_radial_plane(network: nn.Module, first: State | nn.Module, second: State | nn.Module) -> WeightPlane:
    """Return the plane (1) through the origin and two networks, given as networks or states.

    Args:
        network: A network of the architecture.
        first: A network or its state dict.
        second: Another one.
    """
    first, second = to_state(first), to_state(second)
    inner = _products([select_parameters(network, first), select_parameters(network, second)])
    return WeightPlane("radial", [first, second], _corner(inner))


def make_plane(
    network: nn.Module, first: State | nn.Module, second: State | nn.Module, third: State | nn.Module
) -> WeightPlane:
    """Return the plane (2) through three networks; the first is at (0, 0), the second at (length, 0).

    Args:
        network: The network.
        first: The first network.
        second: The second network.
        third: The third network.
    """
    first, second, third = to_state(first), to_state(second), to_state(third)
    own = [select_parameters(network, state) for state in (first, second, third)]
    sides = [{name: state[name].double() - own[0][name].double() for name in state} for state in own[1:]]
    places = torch.cat([torch.zeros(1, 2, dtype=torch.float64), _corner(_products(sides))])
    return WeightPlane("through", [first, second, third], places)


def map_plane(
    network: nn.Module,
    plane: WeightPlane,
    data: Data | Examples,
    *,
    size: int = 41,
    margin: float = 0.25,
    part: PartName = "test",
    examples: int | None = 500,
    batch_norm: BatchNorm = "train",
    quiet: bool = False,
) -> PlaneMap:
    """Return loss, accuracy and disagreement on a grid that contains all networks.

    Args:
        network: The architecture; it is not modified.
        plane: From `make_radial_plane` or `make_plane`.
        data: `Data`, or test examples as `enfold.evaluate` takes them.
        size: Points per side.
        margin: Margin around the networks (and the origin of a radial plane), as a fraction of the larger extent.
        part: The split that is evaluated.
        examples: The number of examples; None for all.
        batch_norm: "stored", "train" or "reset", as in `answers`.
        quiet: Whether progress is hidden.

    Returns:
        The maps and the coordinates of the networks.
    """
    if size < 2:
        raise EnfoldError(f"size must be at least 2, got {size}: the default is 41")
    u, v = _grid(plane, size, margin)
    points = torch.cartesian_prod(v, u).flip(1)  # (V·U, 2), u runs fastest
    weights = _exact(plane.weights(points))
    options: dict[str, Any] = {"part": part, "examples": examples, "batch_norm": batch_norm}
    base = predict_states(network, plane.networks, data, **options)
    batches = predict_in_batches(network, (mix_states(plane.networks, weight) for weight in weights), data, **options)
    rows: list[list[Tensor]] = [[], [], []]
    with progress(f"{plane.kind} plane", len(points), quiet=quiet) as bar:
        for predictions in batches:
            differs = torch.stack(
                [compute_disagreement(base.member(k), predictions) for k in range(base.num_members)], 1
            )
            for row, values in zip(
                rows, (per_member(nll, predictions), per_member(accuracy, predictions), differs), strict=True
            ):
                row.append(values)
            bar.advance(predictions.num_members)
            bar.say("")
    loss, correct, disagreement = (torch.cat(row) for row in rows)
    return PlaneMap(
        u, v, loss.view(size, size), correct.view(size, size), disagreement.T.reshape(-1, size, size), plane.places
    )


def _grid(plane: WeightPlane, size: int, margin: float) -> tuple[Tensor, Tensor]:
    points = plane.places
    if plane.kind == "radial":
        points = torch.cat([points, torch.zeros(1, 2, dtype=torch.float64)])
    low, high = points.min(0).values, points.max(0).values
    border = margin * float((high - low).max())
    u, v = (
        torch.linspace(float(low[k]) - border, float(high[k]) + border, size, dtype=torch.float64) for k in range(2)
    )
    return u, v


def _products(states: Sequence[State]) -> Tensor:
    """Return the inner products of all pairs."""
    found = torch.zeros(len(states), len(states), dtype=torch.float64)
    for name in states[0]:
        rows = torch.stack([state[name].detach().cpu().double().flatten() for state in states])
        found += rows @ rows.T
    return found


def _corner(inner: Tensor) -> Tensor:
    """Return coordinates of two vectors with these inner products, the first along the first axis."""
    length = inner[0, 0].sqrt()
    along = inner[0, 1] / length.clamp_min(torch.finfo(torch.float64).tiny)
    aside = inner[1, 1] - along**2
    if float(aside) <= DEGENERATE * float(inner[1, 1]):
        raise EnfoldError("networks that span a plane must not lie on one line, but these do: choose other networks")
    return torch.stack([torch.stack([length, torch.zeros_like(length)]), torch.stack([along, aside.sqrt()])])


def _exact(weights: Tensor) -> Tensor:
    """Round weights that are 0 or 1 up to rounding errors."""
    rounded = weights.round()
    return torch.where((weights - rounded).abs() < 1e-12, rounded, weights)
