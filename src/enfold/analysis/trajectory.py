"""Similarity of networks along and between trainings, in weights and in predictions.

    cos(θ_i, θ_j) = <θ_i, θ_j> / (‖θ_i‖ ‖θ_j‖),                 θ: all weights and biases                          (1)
    d(i, j) = (1/N) Σ_n 1[argmax p_i(x_n) ≠ argmax p_j(x_n)],   a metric on predictions                            (2)

Late networks of one training are nearly equal in both; independently trained networks are nearly orthogonal in (1) and
differ in (2) although they are equally accurate. A map of predictions (t-SNE or principal components) shows each
training as a separate path.

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019, arXiv:1912.02757.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from enfold.analysis.states import States, mix_states, predict_states, select_parameters, to_states, unstack_states
from enfold.data import Data
from enfold.data.convert import Examples
from enfold.data.dataset import PartName
from enfold.engines.skeleton import State
from enfold.ensembles.subspace_sampling import Kind, SubspaceSampling
from enfold.errors import EnfoldError, MissingExtra
from enfold.metrics import accuracy, disagreement_matrix, per_member
from enfold.metrics.predictions import Predictions
from enfold.train import TrainConfig, Trajectory

MapKind = Literal["tsne", "pca"]


@dataclass(frozen=True)
class TrajectoryStates:
    """K networks of several trainings, ordered by training and epoch."""

    states: list[State]
    member: Tensor  # (K,) index of the training
    epoch: Tensor  # (K,) number of epochs


@dataclass(frozen=True)
class Similarity:
    """Equations (1) and (2) of all pairs, and the accuracy of each network."""

    cosine: Tensor  # (K, K)
    disagreement: Tensor  # (K, K)
    accuracy: Tensor  # (K,)
    member: Tensor  # (K,)
    epoch: Tensor  # (K,)

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries i < j of a matrix within trainings, and those between trainings."""
        i, j = torch.triu_indices(len(matrix), len(matrix), offset=1)
        same = self.member[i] == self.member[j]
        return matrix[i, j][same], matrix[i, j][~same]


def load_trajectory(
    trajectory: Trajectory, members: Sequence[int] | None = None, *, start: bool = True
) -> TrajectoryStates:
    """Return the stored networks of trainings; without `start`, without the untrained networks.

    Args:
        trajectory: A stored trajectory.
        members: Indices of members; None for all.
        start: Include the untrained networks.
    """
    epochs = [epoch for epoch in trajectory.epochs if epoch or start]
    if not epochs:
        raise EnfoldError(
            f"trajectory must contain epochs, but '{trajectory.folder}' has none: train with  trajectory: true  in the "
            "recipe, or with fit(..., trajectory=folder)"
        )
    by_epoch = [unstack_states(trajectory.state(epoch)) for epoch in epochs]
    chosen = range(len(by_epoch[0])) if members is None else members
    states = [states[member] for member in chosen for states in by_epoch]
    member = torch.tensor(list(chosen)).repeat_interleave(len(epochs))
    return TrajectoryStates(states, member, torch.tensor(epochs).repeat(len(chosen)))


@torch.no_grad()
def compute_cosines(states: Sequence[State]) -> Tensor:
    """Return equation (1) of all pairs, (K, K); a zero vector is orthogonal to all others.

    Args:
        states: State dicts of networks of one architecture.
    """
    if not states:
        raise EnfoldError("states must contain at least 1 network, got none: pass its parameters")
    products = torch.zeros(len(states), len(states), dtype=torch.float64)
    for name in states[0]:
        if states[0][name].is_floating_point():
            rows = torch.stack([state[name].detach().cpu().double().flatten() for state in states])
            products += rows @ rows.T
    norms = products.diagonal().sqrt()
    cosine = (products / torch.outer(norms, norms).clamp_min(torch.finfo(torch.float64).tiny)).clamp(-1, 1)  # (1)
    cosine = (cosine + cosine.T) / 2
    return cosine.fill_diagonal_(1.0)


def compute_similarity(
    network: nn.Module,
    found: TrajectoryStates | States,
    data: Data | Examples,
    *,
    part: PartName = "test",
    examples: int | None = 2000,
) -> Similarity:
    """Return equations (1) and (2) of all pairs of networks.

    Args:
        network: The architecture; it is not modified.
        found: The networks of trainings from `load_trajectory`, an ensemble, networks, or states.
        data: `Data`, or test examples as `enfold.evaluate` takes them.
        part: The split that is predicted.
        examples: The number of examples; None for all.

    Returns:
        Both matrices and the accuracy of each network.
    """
    if not isinstance(found, TrajectoryStates):
        states = list(to_states(found))
        found = TrajectoryStates(states, torch.arange(len(states)), torch.zeros(len(states), dtype=torch.long))
    predictions = predict_states(network, found.states, data, part=part, examples=examples)
    cosine = compute_cosines([select_parameters(network, state) for state in found.states])
    disagreement = (
        disagreement_matrix(predictions) if len(found.states) > 1 else torch.zeros(1, 1, dtype=torch.float64)
    )  # (2)
    return Similarity(cosine, disagreement, per_member(accuracy, predictions), found.member, found.epoch)


def map_predictions(
    predictions: Predictions, kind: MapKind = "tsne", *, perplexity: float = 30.0, seed: int = 0
) -> Tensor:
    """Return a map of networks by their predictions, (K, 2).

    Args:
        predictions: Predictions of at least 3 networks; each is one point of N·C probabilities.
        kind: "tsne" (needs scikit-learn) or "pca".
        perplexity: Of t-SNE; at most a third of the number of networks is used.
        seed: The seed of t-SNE.
    """
    if kind not in get_args(MapKind):
        raise EnfoldError(f"kind must be one of {', '.join(get_args(MapKind))}, got {kind!r}: pass one of them")
    if predictions.num_members < 3:
        raise EnfoldError(f"a map needs at least 3 networks, got {predictions.num_members}: store more epochs")
    points = predictions.log_probs.exp().flatten(1).double()  # (K, N·C)
    centred = points - points.mean(0)
    if kind == "pca":
        return _principal(centred, 2)
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise MissingExtra("scikit-learn", "report", "a t-SNE map") from error
    # t-SNE needs distances only, which the principal components of K points preserve.
    reduced = _principal(centred, len(points)).numpy()
    tsne = TSNE(2, perplexity=min(perplexity, (len(points) - 1) / 3), init="pca", random_state=seed, n_jobs=1)
    return torch.from_numpy(tsne.fit_transform(reduced)).double()


def _principal(centred: Tensor, rank: int) -> Tensor:
    """Return the first principal components, (K, rank), from the Gram matrix; the largest entry is positive."""
    values, vectors = torch.linalg.eigh(centred @ centred.T)  # ascending
    values, vectors = values.flip(0)[:rank].clamp_min(0), vectors.flip(1)[:, :rank]
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    coordinates: Tensor = vectors * signs * values.sqrt()
    return coordinates


def average_last(path: Sequence[State], last: int) -> State:
    """Return the mean of the last networks of a training; its batch-norm statistics must be estimated again."""
    if not 1 <= last <= len(path):
        raise EnfoldError(f"last must be between 1 and {len(path)}, got {last}: choose a number in this range")
    return mix_states(path[-last:], torch.full((last,), 1 / last, dtype=torch.float64))


@torch.no_grad()
def sample_around(
    network: nn.Module, path: Sequence[State], kind: Kind, num_members: int, data: Data, **settings: Any
) -> SubspaceSampling:
    """Return members sampled around the result of a training, as `SubspaceSampling` samples them.

    Args:
        network: The architecture.
        path: The last networks of the training; "gaussian" and "pca" need at least two.
        kind: How members are sampled.
        num_members: The number of members.
        data: The training data, for batch-norm statistics.
        **settings: Options of `SubspaceSampling`.
    """
    if kind in ("gaussian", "pca") and len(path) < 2:
        raise EnfoldError(f"path must contain at least 2 networks for {kind!r}, got {len(path)}: store more epochs")
    options = {"checkpoints": max(len(path), 2), **settings}
    members = SubspaceSampling(network, num_members, kind=kind, **options)
    config = TrainConfig()
    members.on_fit_start(data, config)
    centre = members.centre.state()
    for state in path:
        for name, tensor in centre.items():
            tensor.copy_(state[name])
        if kind in ("gaussian", "pca"):
            members.on_epoch_end(0, config)
    members.on_fit_end(data)
    return members.eval()
