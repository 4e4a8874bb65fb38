"""The contract of ensembles, over the registry and a zoo of networks: a new method is tested without a change here."""

import ast
import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import rtdl_revisiting_models
import torch
from torch import Tensor, nn

import enfold
from enfold.cost import parameters
from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.ensembles.common.sampled import SampledEnsemble
from enfold.errors import EnfoldError, UnsuitableNetwork
from enfold.evaluate import predict
from enfold.io.files import digest
from enfold.metrics import accuracy, nll
from enfold.networks import MLP, MediumCNN, ResNet, ViT
from enfold.registry import methods
from enfold.train import TrainConfig
from enfold.train.optimize import param_groups, trained_members
from fitting import fitted


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


def foreign() -> nn.Module:
    """A third-party network: residual, with batch norm and dropout."""
    return rtdl_revisiting_models.ResNet(
        d_in=12, d_out=4, n_blocks=2, d_block=8, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.1
    )


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
    "rtdl": (foreign, lambda: torch.randn(6, 12)),
}
SLOW = ("mlp", "bare", "cnn", "vit")  # their kinds of layers are in others; goldens have every method on mlp, cnn, vit
KINDS = ("batch norm", "convolutions", "words")  # one of each kind of layer, for what the architecture hardly touches
METHODS = sorted(methods("ensemble"))
M = 3
TRAINED: dict[tuple[object, ...], nn.Module] = {}  # by all that `case` and the number of members determine
TRAINING = TrainConfig(epochs=6, batch_size=4, lr=0.01, select="last")

pytestmark = [
    pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning"),
    pytest.mark.filterwarnings("ignore::enfold.ensembles.common.search.FewerCandidatesWarning"),
]


@cache
def contract(name: str) -> dict[str, Any]:
    """Return CONTRACT of the method's own test file, read without importing it; all entries are optional.

    options: what the method needs beside its defaults to be tried on networks as small as these.
    members_together: members are made together, so that M are not the first of M + 1.
    copies: of the network's parameters that it stores, if these are more than M.
    """
    for node in ast.parse(Path(__file__).with_name(f"test_{name}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["CONTRACT"]:
            return ast.literal_eval(node.value)
    return {}


def method_of(name: str, num_members: int = M):
    options = {"num_members": num_members, **contract(name).get("options", {})}
    return partial(methods("ensemble")[name].target, **options)


@cache
def refusal(name: str, network_name: str) -> str | None:
    """Return why a method does not suit a network; any other error than that fails the tests."""
    try:
        method_of(name)(NETWORKS[network_name][0]())
    except UnsuitableNetwork as reason:
        return str(reason)
    return None


def data_of(inputs: Tensor) -> Data:
    labels = torch.arange(len(inputs)) % 4
    part = Split(inputs, labels)
    return Data(part, part, part, 4, tuple(inputs.shape[1:]))


def ready(name: str, network: nn.Module, inputs: Tensor, num_members: int = M) -> nn.Module:
    """Members as they are after training where they only exist then, else as they start."""
    build = method_of(name, num_members)
    model = build(network)
    if isinstance(model, SampledEnsemble):
        values = digest([*network.state_dict().values(), inputs])
        case = (name, num_members, str(network), values)
        if case not in TRAINED:
            TRAINED[case] = fitted(model, data_of(inputs), TRAINING)
        model = copy.deepcopy(TRAINED[case])
    return model.eval()


def looped(model: nn.Module) -> nn.Module:
    """Members run one by one: to choose an engine takes longer than all else in these tests."""
    return model.set_engine("loop")


@pytest.fixture(params=[pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in NETWORKS])
def network_name(request):
    return request.param


@pytest.fixture(params=METHODS)
def name(request):
    return request.param


@pytest.fixture
def case(name, network_name):
    torch.manual_seed(0)
    if (reason := refusal(name, network_name)) is not None:
        pytest.skip(reason)
    make, inputs = NETWORKS[network_name]
    return make(), inputs()


def test_most_networks_suit_and_others_are_refused_with_a_remedy(name):
    refusals = [reason for each in NETWORKS if (reason := refusal(name, each)) is not None]
    assert all(": " in reason for reason in refusals), refusals
    assert len(refusals) <= len(NETWORKS) // 2, "the other tests of this file would hardly test it"


@pytest.mark.combinations
def test_forward_is_the_loop_over_members(name, case):
    network, inputs = case
    members = ready(name, network, inputs)
    outputs = members(inputs)
    assert outputs.shape == (members.num_members, 6, 4)
    torch.testing.assert_close(members(inputs), outputs, rtol=0, atol=0)
    if not members.is_expandable:
        return  # members do not exist as networks of their own
    networks = members.networks()
    alone = torch.stack([member.eval()(inputs) for member in networks])
    torch.testing.assert_close(outputs, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(looped(members)(inputs), alone, rtol=1e-4, atol=1e-4)
    assert type(networks[0]) is type(network)
    assert networks[0].state_dict().keys() == network.state_dict().keys()


@pytest.mark.combinations
@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap"])
@pytest.mark.parametrize("network_name", ["batch norm", pytest.param("cnn", marks=pytest.mark.slow)])
def test_every_engine_equals_the_members(name, case, engine):
    network, inputs = case
    members = ready(name, network, inputs)
    if not members.is_expandable:
        pytest.skip("members do not exist as networks of their own")
    try:
        outputs = members.set_engine(engine)(inputs)
    except EnfoldError as reason:
        if engine == "loop":
            raise
        pytest.skip(str(reason))
    alone = torch.stack([member.eval()(inputs) for member in members.networks()])
    torch.testing.assert_close(outputs, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in METHODS if "batch_norm" in methods("ensemble")[name].arguments])
def test_batch_norms_are_the_members_own_or_shared(name):
    torch.manual_seed(0)
    make, inputs = NETWORKS["batch norm"]
    for choice in ("own", "shared"):
        members = looped(methods("ensemble")[name].target(make(), num_members=M, batch_norm=choice)).train()
        optimizer = torch.optim.SGD(members.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            outputs = members(inputs())
            (outputs * torch.arange(1.0, M + 1)[:, None, None]).square().mean().backward()
            optimizer.step()
        scales = members.expand()["1.weight"]
        assert scales.shape[0] == M
        assert torch.equal(scales[0], scales[-1]) == (choice == "shared")


@pytest.mark.combinations
def test_a_step_gives_every_declared_parameter_a_gradient_and_leaves_the_source(name, case):
    network, inputs = case
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    build = method_of(name)
    members = looped(build(network)).train()
    groups = param_groups(members, TrainConfig(weight_decay=0.1))
    declared = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(declared) == sorted(id(parameter) for parameter in members.parameters() if parameter.requires_grad)
    if members.is_expandable or trained_members(members) == 1:
        assert members(inputs).shape == (trained_members(members), 6, 4)
    objective = members.objective(TRAINING) or (lambda model, batch: model(batch.inputs).square().sum())
    objective(members, Batch(inputs, torch.arange(6) % 4)).sum().backward()
    without = [
        key for key, parameter in members.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    assert not without
    torch.testing.assert_close(dict(network.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.combinations
@pytest.mark.parametrize("network_name", KINDS)
def test_saved_and_loaded_is_equal(name, case, tmp_path):
    network, inputs = case
    members = looped(ready(name, network, inputs))
    enfold.save(members, tmp_path / "members.safetensors")
    loaded = looped(enfold.load(tmp_path / "members.safetensors", network))
    torch.testing.assert_close(loaded(inputs), members(inputs), rtol=0, atol=0)
    assert type(loaded) is type(members)
    assert loaded.options() == members.options()


@pytest.mark.combinations
@pytest.mark.parametrize("name", [name for name in METHODS if not contract(name).get("members_together")])
@pytest.mark.parametrize("network_name", KINDS)
def test_members_are_the_first_of_more(name, case):
    network, inputs = case
    few, more = (looped(ready(name, network, inputs, count)) for count in (M, M + 1))
    first = few(inputs)
    assert len(first) >= M
    torch.testing.assert_close(more(inputs)[: len(first)], first, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_training_gives_finite_members(name):
    torch.manual_seed(0)
    inputs = torch.randn(64, 12)
    labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
    data = Data(Split(inputs, labels), Split(inputs[:32], labels[:32]), Split(inputs, labels), 4, (12,))
    network = nn.Sequential(
        nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    build = method_of(name)
    assert parameters(build(network)) <= max(M, contract(name).get("copies", 0)) * parameters(network)
    plan = TrainConfig(epochs=30, batch_size=32, lr=0.02, select="last")
    members = fitted(build(network), data, plan)
    found = predict(members, data.test)
    assert accuracy(found) > 0.6, "chance is 0.25"
    assert nll(found) < 1.2, "chance is 1.39"


def test_no_members_are_refused_and_tied_parameters_refused_or_left_tied(name):
    with pytest.raises(EnfoldError, match=r"num_members.*got 0"):
        methods("ensemble")[name].target(MLP(4, [4], 2), num_members=0)
    tied = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    try:
        members = ready(name, tied, torch.randn(6, 4))
    except EnfoldError as error:
        refused = str(error)
    else:
        refused = None
    if refused is not None:
        assert "'2.weight' is tied to '0.weight'" in refused
        return
    for network in members.networks() if members.is_expandable else [members.module]:
        assert torch.equal(network[2].weight, network[0].weight)
