"""What every share keeps to, over the registry and a zoo of networks: a new file is tested with no edit here."""

import pytest
import torch
from torch import Tensor, nn

import enfold
from enfold.cost import parameters
from enfold.data import Data, Split
from enfold.errors import EnfoldError
from enfold.members import Members
from enfold.networks import MLP, MediumCNN, ResNet, ViT
from enfold.registry import methods
from enfold.train import Plan, fit


class Words(nn.Module):
    """Embedding, layer norm, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.attention(self.embedding(tokens)).mean(1))


def convolutions() -> nn.Module:
    """Grouped, transposed and one-dimensional convolutions in nested modules."""
    image = nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 8, 3, groups=2)
    )
    return nn.Sequential(image, nn.Flatten(2), nn.Conv1d(8, 4, 5), nn.AdaptiveAvgPool1d(1), nn.Flatten())


NETWORKS = {
    "mlp": (lambda: MLP(12, [8, 8], 4), lambda: torch.randn(6, 12)),
    "bare": (lambda: nn.Linear(12, 4), lambda: torch.randn(6, 12)),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
        lambda: torch.randn(6, 12),
    ),
    "convolutions": (convolutions, lambda: torch.randn(6, 3, 8, 8)),
    "cnn": (lambda: MediumCNN((3, 16, 16), 4, channels=(4, 8), dropout=0.0), lambda: torch.randn(6, 3, 16, 16)),
    "residual": (lambda: ResNet(width=4, depth=8, num_classes=4), lambda: torch.randn(6, 3, 8, 8)),
    "vit": (lambda: ViT((3, 8, 8), 4, width=8, depth=1, heads=2), lambda: torch.randn(6, 3, 8, 8)),
    "words": (Words, lambda: torch.randint(20, (6, 5))),
}
SHARES = sorted(methods("share"))
M = 3


@pytest.fixture(params=NETWORKS)
def case(request):
    torch.manual_seed(0)
    make, inputs = NETWORKS[request.param]
    return make(), inputs()


def shared(name: str, network: nn.Module, **settings) -> Members:
    return methods("share")[name].make(num_members=M, **settings)(network)


@pytest.mark.parametrize("name", SHARES)
def test_forward_is_the_loop_over_members(name, case):
    network, inputs = case
    members = shared(name, network).eval()
    alone = torch.stack([member.eval()(inputs) for member in members])
    torch.testing.assert_close(members(inputs), alone, rtol=1e-4, atol=1e-4)
    for engine in ("loop", "auto"):
        torch.testing.assert_close(members.set_engine(engine)(inputs), alone, rtol=1e-4, atol=1e-4)
    assert type(members.member(0)) is type(network)
    assert members.member(0).state_dict().keys() == network.state_dict().keys()


@pytest.mark.parametrize("name", SHARES)
def test_every_parameter_gets_a_gradient_and_the_source_is_untouched(name, case):
    network, inputs = case
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    members = shared(name, network).train()
    members(inputs).square().sum().backward()
    without = [key for key, parameter in members.named_parameters() if parameter.grad is None]
    assert not without
    torch.testing.assert_close(dict(network.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("name", SHARES)
def test_all_parameters_are_declared_to_the_optimizer_once(name, case):
    members = shared(name, case[0])
    declared = [id(parameter) for group in members.param_groups(0.1) for parameter in group["params"]]
    assert sorted(declared) == sorted(id(parameter) for parameter in members.parameters())


@pytest.mark.parametrize("name", SHARES)
def test_saved_and_loaded_is_equal(name, case, tmp_path):
    network, inputs = case
    members = shared(name, network).eval()
    enfold.save(members, tmp_path / "members.safetensors")
    loaded = enfold.load(tmp_path / "members.safetensors", network)
    torch.testing.assert_close(loaded(inputs), members(inputs), rtol=0, atol=0)
    assert loaded.share == members.share


@pytest.mark.parametrize("name", SHARES)
def test_members_are_the_first_of_more(name, case):
    network, inputs = case
    few = shared(name, network).eval()
    more = methods("share")[name].make(num_members=M + 1)(network).eval()
    torch.testing.assert_close(more(inputs)[:M], few(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHARES)
def test_it_is_smaller_than_as_many_networks_and_trains(name):
    torch.manual_seed(0)
    inputs, labels = torch.randn(64, 12), torch.randint(4, (64,))
    data = Data(Split(inputs, labels), Split(inputs[:16], labels[:16]), Split(inputs, labels), 4, (12,))
    network = MLP(12, [32, 32], 4)
    members = shared(name, network)
    assert parameters(members) < M * parameters(network)
    plan = Plan(epochs=4, batch_size=16, learning_rate=0.01, select="last")
    history = fit(members, data, plan, quiet=True)
    assert sum(history.epochs[-1].train_loss) < sum(history.epochs[0].train_loss)


@pytest.mark.parametrize("name", SHARES)
def test_no_members_and_tied_parameters_are_refused(name):
    with pytest.raises(EnfoldError, match="at least 1 member, got 0"):
        methods("share")[name].make(num_members=0)(MLP(4, [4], 2))
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(EnfoldError, match=r"'2\.weight' is tied to '0\.weight'"):
        shared(name, tied)
