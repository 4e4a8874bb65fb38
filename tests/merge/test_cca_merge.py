"""CCA-Merge: maps and their inverses, planted permutations and mixtures, and the closed form."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import cca_merge
from enfold.merge.cca_merge import canonical_map
from enfold.merge.common.split import match_by_activations_and_weights
from enfold.symmetry import permute, symmetries
from planted import NETWORKS, assert_back, drawn, pixels, planted


def covariances(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of samples in rows."""
    both = torch.cov(torch.cat([x, y], 1).T)
    size = x.shape[1]
    return both[:size, :size], both[:size, size:], both[size:, size:]


@pytest.mark.parametrize("name", ["shallow", "deep", "convolutional", "residual"])
def test_permuted_copies_average_to_the_original(name):
    members, network, data = planted(name, 3)
    assert_back(cca_merge(members, data, repair="none"), network, data)


def test_the_inverse_is_the_inverse():
    x, y = torch.randn(2, 50, 5, generator=torch.Generator().manual_seed(0)).double()
    forth, back = canonical_map(*covariances(x, y), 0.1)
    torch.testing.assert_close(forth @ back, torch.eye(5).double())


def test_a_permutation_is_found_for_any_gamma():
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).double()
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    for gamma in (1e-6, 0.1, 10.0):
        forth, _ = canonical_map(*covariances(x, x[:, order]), gamma)
        torch.testing.assert_close(x[:, order] @ forth.T, x)


def test_any_linear_map_is_undone_without_gamma():
    """T is then the least-squares map: canonical correlations are all 1."""
    source = torch.Generator().manual_seed(0)
    x, mix = torch.randn(50, 4, generator=source).double(), torch.randn(4, 4, generator=source).double()
    forth, back = canonical_map(*covariances(x, x @ mix), 1e-12)
    torch.testing.assert_close(x @ mix @ forth.T, x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(back, mix.T, rtol=1e-4, atol=1e-4)


def test_gamma_is_relative_to_the_mean_variance():
    """Variances of 4 and 1 have a mean of 2.5, so that 0.4 adds 1 to each; of units a thousand times as large, too."""
    one = torch.eye(3).double()
    for scale in (1.0, 1e6):
        forth, _ = canonical_map(4 * scale * one, scale * one, scale * one, 0.4)
        torch.testing.assert_close(forth, (5 / 2) ** 0.5 * one)


def test_linear_networks_in_other_coordinates_average_to_the_original(data):
    """Hidden units mixed by any matrix: no order of them would do."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    mix = torch.randn(4, 4).double()
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    with torch.no_grad():
        other[0].weight.copy_(mix @ network[0].weight)
        other[0].bias.copy_(mix @ network[0].bias)
        other[1].weight.copy_(network[1].weight @ mix.inverse())
        other[1].bias.copy_(network[1].bias)
    train = type(data.train)(data.train.inputs.double(), data.train.labels)
    folded = cca_merge(DeepEnsemble([network, other]), data.replace(train=train), gamma=1e-10)
    torch.testing.assert_close(folded[0].weight, network[0].weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folded[1].weight, network[1].weight, rtol=1e-4, atol=1e-5)


def root(matrix: np.ndarray, power: float) -> np.ndarray:
    values, axes = np.linalg.eigh(matrix)
    return (axes * values**power) @ axes.T


def test_units_are_mapped_by_centred_canonical_correlations():
    """Equations (1) to (4) by numpy; units behind a ReLU have means that are as large as their spreads."""
    make, shape = NETWORKS["shallow"]
    networks, data = [drawn(make, seed) for seed in range(2)], pixels(shape)
    (w, b, v, c), (other_w, other_b, other_v, other_c) = (
        [parameter.detach().double().numpy() for parameter in network.parameters()] for network in networks
    )
    inputs = data.train.inputs.double().numpy()
    x, y = np.maximum(inputs @ w.T + b, 0), np.maximum(inputs @ other_w.T + other_b, 0)
    assert (x.mean(0) ** 2).sum() > 0.5 * x.var(0).sum()
    covariance = np.cov(x.T, y.T, bias=True)
    xx, xy, yy = covariance[:12, :12], covariance[:12, 12:], covariance[12:, 12:]
    ridge = 0.1 * (np.trace(xx) + np.trace(yy)) / 24 * np.eye(12)
    u, _, vt = np.linalg.svd(root(xx + ridge, -0.5) @ xy @ root(yy + ridge, -0.5))
    there = root(xx + ridge, 0.5) @ u @ vt @ root(yy + ridge, -0.5)
    expected = w + there @ other_w, b + there @ other_b, v + other_v @ np.linalg.inv(there), c + other_c
    folded = cca_merge(DeepEnsemble(networks), data, gamma=0.1, repair="none")
    for parameter, double in zip(folded.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), double / 2, rtol=1e-3, atol=1e-4)


def test_inactive_units_are_supported(data):
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        network[0].bias.fill_(-100.0)
    folded = cca_merge(DeepEnsemble([network, network]), data)
    assert all(torch.isfinite(tensor).all() for tensor in folded.state_dict().values())


class Dying(nn.Module):
    """ReLUs of which some never fire, each for its own reason."""

    def __init__(self, dead: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        )  # fmt: skip
        with torch.no_grad():
            for layer in (self.layers[0], self.layers[2]):
                layer.bias[torch.randperm(16)[:dead]] -= 20.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class Normalising(nn.Module):
    """Norms give units with a constant sum, and another norm follows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(inputs)).mean(1))


def as_made(make, seed: int) -> nn.Module:
    """With the scales of norms at 1, at which they leave a direction without variance."""
    torch.manual_seed(seed)
    return make().eval()


SINGULAR = {f"{dead} dead": (partial(Dying, dead), (6,)) for dead in (1, 2, 4, 8)} | {"norms": (Normalising, (4, 5))}


@pytest.mark.combinations
@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_permuted_copies_average_to_the_original_with_singular_covariances(monkeypatch, name, count, seed):
    monkeypatch.setattr("planted.drawn", as_made)
    monkeypatch.setitem(NETWORKS, name, SINGULAR[name])
    members, network, data = planted(name, count, seed)
    with torch.no_grad():
        expected, found = network(data.test.inputs), cca_merge(members, data, repair="none")(data.test.inputs)
    assert (found - expected).norm() < 1e-4 * expected.norm()


def test_directions_without_a_correlation_are_mapped_by_the_order():
    """Units 0 to 2 are the other's 4, 2 and 0; the others never move."""
    x = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)).double()
    x[:, 3:] = 0.5
    order = torch.tensor([4, 2, 0, 3, 1])
    forth, back = canonical_map(*covariances(x, x[:, order.argsort()]), 0.1, lambda: order)
    torch.testing.assert_close(forth, torch.eye(5).double()[order])
    torch.testing.assert_close(back, forth.T)


def test_orders_are_by_activations_and_then_by_weights():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    symmetry = symmetries(network, torch.randn(2, 3))
    group, order = symmetry.groups[0], torch.tensor([2, 0, 3, 1])
    moved = permute(state, symmetry, {group.name: order})
    alike = torch.zeros(4, 4)
    found = match_by_activations_and_weights(state, moved, symmetry, {group.name: alike}, set(state), 0)
    assert torch.equal(found[group.name], order.argsort())
    alike[0, 0] = 1.0  # what weights say of it is another one
    found = match_by_activations_and_weights(state, moved, symmetry, {group.name: alike}, set(state), 0)
    assert found[group.name][0] == 0


def test_gamma_must_be_above_zero():
    with pytest.raises(EnfoldError, match="gamma"):
        cca_merge(None, None, gamma=0)


def test_batch_norm_variances_remain_positive(networks, data):
    members = DeepEnsemble(networks["normed"], 3)
    with torch.no_grad():
        for name, held in members.named_buffers():
            if name.endswith("running_var"):
                held.uniform_(0.1, 4.0, generator=torch.Generator().manual_seed(0))
    folded = cca_merge(members, data, gamma=1e-3, repair="none")
    torch.testing.assert_close(folded.norm.running_var, members.member(0).norm.running_var)
