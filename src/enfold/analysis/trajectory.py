"""Trajectories: how alike the networks are that trainings pass through, in their weights and in what they say.

    cos(θ_i, θ_j) = <θ_i, θ_j> / (‖θ_i‖ ‖θ_j‖),                 θ: all weights and biases                          (1)
    d(i, j) = (1/N) Σ_n 1[argmax p_i(x_n) ≠ argmax p_j(x_n)],   a metric on the answers                            (2)

Within one training late networks are nearly equal in both; independent trainings are nearly orthogonal in (1) and stay
apart in (2) though they are equally accurate. A map of predictions, by t-SNE or principal components, shows each
training as a path of its own, with what is sampled around its end beside it.

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from enfold.analysis.states import each, mixture, parameters_of, predictions
from enfold.data import Data
from enfold.data.dataset import PartName
from enfold.engines.skeleton import State
from enfold.ensembles.subspace_sampling import Kind, SubspaceMembers, SubspaceSampling
from enfold.errors import EnfoldError, MissingExtra
from enfold.metrics import accuracy, disagreement_matrix, per_member
from enfold.metrics.predictions import Predictions
from enfold.train import TrainConfig, Trajectory

MapKind = Literal["tsne", "pca"]


@dataclass(frozen=True)
class Visited:
    """K networks of several trainings, the first training's epochs first."""

    states: list[State]
    member: Tensor  # (K,) which training
    epoch: Tensor  # (K,) after how many epochs


@dataclass(frozen=True)
class Similarity:
    """Equations (1) and (2) of all pairs, and what each network scores."""

    cosine: Tensor  # (K, K)
    disagreement: Tensor  # (K, K)
    accuracy: Tensor  # (K,)
    member: Tensor  # (K,)
    epoch: Tensor  # (K,)

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The entries i < j of a matrix within trainings, and those between two."""
        i, j = torch.triu_indices(len(matrix), len(matrix), offset=1)
        same = self.member[i] == self.member[j]
        return matrix[i, j][same], matrix[i, j][~same]


def visited(trajectory: Trajectory, members: Sequence[int] | None = None, *, start: bool = True) -> Visited:
    """What was kept of these trainings; without `start`, not the untrained networks."""
    epochs = [epoch for epoch in trajectory.epochs if epoch or start]
    if not epochs:
        raise EnfoldError(
            f"a trajectory must hold epochs, but '{trajectory.folder}' has none: train with  trajectory: true  in the "
            "recipe, or with fit(..., keep=folder)"
        )
    by_epoch = [each(trajectory.state(epoch)) for epoch in epochs]
    chosen = range(len(by_epoch[0])) if members is None else members
    states = [states[member] for member in chosen for states in by_epoch]
    member = torch.tensor(list(chosen)).repeat_interleave(len(epochs))
    return Visited(states, member, torch.tensor(epochs).repeat(len(chosen)))


@torch.no_grad()
def cosine_matrix(states: Sequence[State]) -> Tensor:
    """Equation (1) of all pairs, (K, K); zeros are orthogonal to everything but themselves."""
    if not states:
        raise EnfoldError("there must be at least 1 network to compare, got none: pass its parameters")
    products = torch.zeros(len(states), len(states), dtype=torch.float64)
    for name in states[0]:
        if states[0][name].is_floating_point():
            rows = torch.stack([state[name].detach().cpu().double().flatten() for state in states])
            products += rows @ rows.T
    norms = products.diagonal().sqrt()
    cosine = (products / torch.outer(norms, norms).clamp_min(torch.finfo(torch.float64).tiny)).clamp(-1, 1)  # (1)
    cosine = (cosine + cosine.T) / 2
    return cosine.fill_diagonal_(1.0)


def similarity(
    network: nn.Module, found: Visited, data: Data, *, part: PartName = "test", examples: int | None = 2000
) -> Similarity:
    """Both matrices of everything that was visited."""
    said = predictions(network, found.states, data, part=part, examples=examples)
    cosine = cosine_matrix([parameters_of(network, state) for state in found.states])
    apart = disagreement_matrix(said) if len(found.states) > 1 else torch.zeros(1, 1, dtype=torch.float64)  # (2)
    return Similarity(cosine, apart, per_member(accuracy, said), found.member, found.epoch)


def function_map(said: Predictions, kind: MapKind = "tsne", *, perplexity: float = 30.0, seed: int = 0) -> Tensor:
    """Networks on a plane, (K, 2), near where they say alike: each is one point, its N·C probabilities.

    t-SNE needs scikit-learn; where there are few points the perplexity is lowered to a third of them.
    """
    if kind not in get_args(MapKind):
        raise EnfoldError(f"a map must be one of {', '.join(get_args(MapKind))}, got {kind!r}: choose one")
    if said.num_members < 3:
        raise EnfoldError(f"a map needs at least 3 networks, got {said.num_members}: keep more epochs")
    points = said.log_probs.exp().flatten(1).double()  # (K, N·C)
    centred = points - points.mean(0)
    if kind == "pca":
        return _principal(centred, 2)
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise MissingExtra("scikit-learn", "report", "a t-SNE map") from error
    # Distances, which are all that t-SNE asks for, are kept by the principal components of K points.
    reduced = _principal(centred, len(points)).numpy()
    tsne = TSNE(2, perplexity=min(perplexity, (len(points) - 1) / 3), init="pca", random_state=seed, n_jobs=1)
    return torch.from_numpy(tsne.fit_transform(reduced)).double()


def _principal(centred: Tensor, rank: int) -> Tensor:
    """Coordinates on the first principal axes, (K, rank), from the K x K Gram matrix; the largest is positive."""
    values, vectors = torch.linalg.eigh(centred @ centred.T)  # ascending
    values, vectors = values.flip(0)[:rank].clamp_min(0), vectors.flip(1)[:, :rank]
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    coordinates: Tensor = vectors * signs * values.sqrt()
    return coordinates


def averaged(path: Sequence[State], last: int) -> State:
    """The mean of a training's last networks: weight averaging inside a mode; batch-norm statistics are to be reset."""
    if not 1 <= last <= len(path):
        raise EnfoldError(f"the last 1 to {len(path)} networks are averaged, got {last}: choose a number between")
    return mixture(path[-last:], torch.full((last,), 1 / last, dtype=torch.float64))


@torch.no_grad()
def sampled(
    network: nn.Module, path: Sequence[State], kind: Kind, num_members: int, data: Data, **settings: Any
) -> SubspaceMembers:
    """Members drawn around the end of a training that was kept, as `SubspaceSampling` draws them.

    `path` is its last networks; `gaussian` and `pca` need at least two; `settings` are the share's.
    """
    if kind in ("gaussian", "pca") and len(path) < 2:
        raise EnfoldError(f"a spread needs 2 or more networks of a training, got {len(path)}: keep more epochs")
    share = SubspaceSampling(num_members, kind, **{"checkpoints": max(len(path), 2), **settings})
    members = share(network)
    members.begin()
    centre = members.centre.state()
    for state in path:
        for name, tensor in centre.items():
            tensor.copy_(state[name])
        if kind in ("gaussian", "pca"):
            members.after_epoch(0, TrainConfig())
    members.finish(data)
    return members.eval()
