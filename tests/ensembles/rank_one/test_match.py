"""Matching hidden units: planted orders are found and functions stay, in any network; what cannot be run is refused."""

import pytest
import torch
from torch import Tensor, nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.rank_one import match_units
from enfold.errors import EnfoldError
from enfold.networks import MLP, MediumCNN, ResNet
from enfold.symmetry import permute, symmetries


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(6, 5, 2), nn.GELU(),
        nn.Conv2d(5, 4, 3), nn.PReLU(4), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 8), nn.LayerNorm(8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip


NETWORKS = {
    "mlp": (lambda: MLP(12, [9, 8], 4), (12,)),
    "cnn": (cnn, (3, 8, 8)),
    "medium cnn": (lambda: MediumCNN((3, 16, 16), 4, channels=(4, 8)), (3, 16, 16)),
    "resnet": (lambda: ResNet(width=4, depth=8, num_classes=4), (3, 8, 8)),
    "no hidden layer": (lambda: nn.Linear(4, 3), (4,)),
    "one unit": (lambda: nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3)), (4,)),
}


def shuffled(network: nn.Module, example: Tensor, noise: float = 0.0) -> nn.Module:
    """The same function with its hidden units in a random order."""
    members = DeepEnsemble([network])
    state = {name: tensor[0].detach() for name, tensor in members.expand().items()}
    symmetry = symmetries(network, example)
    state = permute(state, symmetry, {group.name: torch.randperm(group.size) for group in symmetry.groups})
    return members.network({name: _noisy(tensor, noise) for name, tensor in state.items()})


def _noisy(tensor: Tensor, noise: float) -> Tensor:
    return tensor + noise * torch.rand_like(tensor) if tensor.is_floating_point() else tensor


def trained_statistics(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network.eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_planted_order_is_found_and_functions_are_unchanged(name):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network, inputs = trained_statistics(make()), torch.randn(5, *shape)
    example = None if len(shape) == 1 else inputs
    other = shuffled(network, inputs)
    torch.testing.assert_close(other(inputs), network(inputs))
    matched = match_units(DeepEnsemble([network, other]), example=example)
    for tensor in matched.expand().values():
        torch.testing.assert_close(tensor[1], tensor[0], rtol=0, atol=0)
    torch.testing.assert_close(matched(inputs)[0], network(inputs))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_matching_reduces_the_distance_and_preserves_functions(name):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    inputs = torch.randn(5, *shape)
    members = DeepEnsemble([trained_statistics(make()) for _ in range(3)])
    before = {key: tensor.clone() for key, tensor in members.state_dict().items()}
    matched = match_units(members, example=inputs)
    torch.testing.assert_close(matched(inputs), members(inputs))
    torch.testing.assert_close(dict(members.state_dict()), before, rtol=0, atol=0)
    for index in (1, 2):
        assert distance(matched, index) < distance(members, index)


def distance(members: DeepEnsemble, index: int) -> float:
    return sum(float((p[index] - p[0]).detach().square().sum()) for p in members.parameters())


def test_one_hidden_layer_is_matched_optimally():
    torch.manual_seed(0)
    members = DeepEnsemble([MLP(3, [4], 2) for _ in range(2)])
    found = distance(match_units(members), 1)
    every = [reorder_one(members, list(order)) for order in torch.cartesian_prod(*[torch.arange(4)] * 4)]
    assert found == pytest.approx(min(value for value in every if value is not None), rel=1e-5)


def reorder_one(members: DeepEnsemble, order: list[Tensor]) -> float | None:
    if len({int(place) for place in order}) < 4:
        return None
    networks, places = members.networks(), torch.stack(order)
    with torch.no_grad():
        networks[1].hidden[0].weight.copy_(networks[1].hidden[0].weight[places])
        networks[1].hidden[0].bias.copy_(networks[1].hidden[0].bias[places])
        networks[1].head.weight.copy_(networks[1].head.weight[:, places])
    return distance(DeepEnsemble(networks), 1)


def test_a_noisy_copy_is_matched():
    torch.manual_seed(0)
    network = MLP(20, [30, 30], 4)
    matched = match_units(DeepEnsemble([network, shuffled(network, torch.randn(2, 20), noise=0.01)]))
    for tensor in matched.parameters():
        torch.testing.assert_close(tensor[1], tensor[0], rtol=0, atol=0.02)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(torch.relu(x) if x.sum() > 0 else x)


@pytest.mark.parametrize(
    ("network", "example", "message"),
    [
        (Deciding(), None, "in this Deciding the graph depends on values"),
        (nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)), None, r"example .*got None"),
        (nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(4, 2)), None, r"example .*got None"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.zeros(3, 5), r"shape \(3, 5\) .* failed"),
    ],
)
def test_untraceable_networks_are_refused(network, example, message):
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(EnfoldError, match=message):
        match_units(DeepEnsemble([network, network]), example=example)
    torch.testing.assert_close(dict(network.state_dict()), before, rtol=0, atol=0)
