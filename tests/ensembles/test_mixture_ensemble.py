"""MixtureEnsemble: an ordinary network as the limit, exact budgets, and what members have in common."""

from functools import partial

import pytest
import torch
from torch import nn

import enfold
from enfold.cost import parameters
from enfold.data import Data, Split
from enfold.ensembles.mixture_ensemble import MixtureEnsemble, template_layout
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import disagreement
from enfold.networks import MLP, ResNet, ViT, WideResNet
from enfold.train import TrainConfig, cross_entropy, fit
from fitting import any_network

CONTRACT = {"members_together": True}

PLAIN = {"max_templates": 1, "counts": "templates", "init": "network", "spread": 0.0}


def resnet(depth: int = 14, width: int = 4) -> ResNet:
    torch.manual_seed(0)
    return ResNet(depth=depth, width=width, num_classes=4)


def towers(layers: int = 3, size: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [part for _ in range(layers) for part in (nn.Linear(size, size), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(size, 3))


def used_of(members, number: int = 0) -> torch.Tensor:
    return members.mixture.get_buffer(f"index{number}")  # (M, L, k)


# The ordinary network


def test_one_template_per_layer_with_coefficient_one_is_the_network():
    network, inputs = resnet().eval(), torch.randn(5, 3, 8, 8)
    members = MixtureEnsemble(network, 1, **PLAIN).eval()
    assert all((alpha == 1).all() for alpha in members.mixture.coefficients)
    assert [mix.templates for mix in members.layout.mixes] == [len(mix.group.names) for mix in members.layout.mixes]
    torch.testing.assert_close(members(inputs)[0], network(inputs), rtol=1e-4, atol=1e-5)
    state = members.member(0).state_dict()
    torch.testing.assert_close(dict(state), dict(network.state_dict()), rtol=0, atol=0)


def test_all_shapes_in_banks_of_one_are_the_network_too():
    network = MLP(6, [5, 4], 3)
    members = MixtureEnsemble(network, 1, thin=True, single_blob=False, **PLAIN)
    assert sum(len(mix.group.names) for mix in members.layout.mixes) == 3
    torch.testing.assert_close(dict(members.member(0).state_dict()), dict(network.state_dict()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_fixed_coefficients_train_like_the_network():
    torch.manual_seed(0)
    inputs, labels = torch.randn(16, 6), torch.randint(3, (16,))
    data = Data(Split(inputs, labels), [], Split(inputs, labels), 3, (6,))
    plan = TrainConfig(epochs=2, batch_size=16, optimizer="sgd", lr=0.1, weight_decay=0.1, order="shared")
    network = towers()
    members = MixtureEnsemble(network, 3, **PLAIN)
    for alpha in members.mixture.coefficients:
        alpha.requires_grad_(False)
    fit(members, data, config=plan, quiet=True)
    fit(network, data, config=plan, quiet=True)
    for member in members:
        torch.testing.assert_close(dict(member.state_dict()), dict(network.state_dict()), rtol=1e-4, atol=1e-5)


def test_weights_of_the_network_are_preserved_and_spread_makes_members_differ():
    network = resnet()
    near = MixtureEnsemble(network, 3, budget=1.5, init="network", spread=0.01).expand()
    name = "groups.1.0.conv2.weight"
    own = network.state_dict()[name]
    assert 0 < (near[name] - own).norm() < 0.1 * own.norm() * 3**0.5
    assert not torch.equal(near[name][0], near[name][1])
    with pytest.raises(EnfoldError, match=r"for 3 templates of the 4 layers like 'groups.0.0.conv1.weight'"):
        MixtureEnsemble(network, 3, budget=1.0, init="network")


# The budget


@pytest.mark.parametrize("budget", [0.2, 0.4, 1.0, 3.3])
@pytest.mark.parametrize("assignment", ["shared", "disjoint_greedy"])
@pytest.mark.parametrize("depth", [14, 20])
def test_stored_parameters_are_within_the_budget(budget, assignment, depth):
    network = resnet(depth, width=16)
    members = MixtureEnsemble(network, 4, budget=budget, assignment=assignment)
    assert parameters(members) == members.actual == members.counted <= members.requested
    assert members.requested == int(budget * parameters(network))
    assert members.actual > 0.9 * members.requested
    assert f"budget {members.requested:,} of which {members.counted:,} are used" in repr(members)
    assert bool(members.layout.blob) == (budget < 0.5)


@pytest.mark.parametrize("budget", [0.2, 1.0, 3.3])
def test_the_published_count_excludes_parameters_of_members(budget):
    network = resnet(20, width=16)
    members = MixtureEnsemble(network, 4, budget=budget, counts="templates")
    own = members.own.parameters()
    on_top = sum(tensor.numel() for tensor in (*own, *members.mixture.coefficients))
    assert members.counted == members.actual - on_top <= members.requested
    assert sum(tensor.numel() for tensor in members.own.parameters()) == 4 * 2 * sum(
        module.num_features for module in network.modules() if isinstance(module, nn.BatchNorm2d)
    )


def test_an_absolute_budget_is_an_integer():
    network = resnet(20, width=16)
    members = MixtureEnsemble(network, 2, budget=100_000)
    assert members.requested == 100_000 >= members.actual
    build = partial(MixtureEnsemble, num_members=2, budget=1)
    with pytest.raises(EnfoldError, match=r"smallest possible budget .* is \d+ parameters, got 1: pass at least"):
        build(network)


@pytest.mark.parametrize(
    ("budget", "templates"),
    [
        (1.0, [7, 7, 7]),
        (15_000_000, [3, 3, 2]),  # 2.5 templates of each: a third fits into the two smaller banks
        (120_000_000, [25, 25, 24]),  # 24.3
    ],
)
def test_the_published_counts_of_wrn_28_10(budget, templates):
    with torch.device("meta"):
        network = WideResNet(28, 10, 100)
    layout = template_layout(network, 4, budget=budget, counts="templates")
    assert [mix.templates for mix in layout.mixes] == templates
    assert [len(mix.group.names) for mix in layout.mixes] == [7, 7, 7]
    if budget == 1.0:
        assert layout.coefficients == 4 * 105
        assert layout.counted == 36_536_884 - 2 * 8_976  # all but the batch norms
    honest = template_layout(network, 4, budget=budget)
    sizes = sum(mix.templates * mix.group.size for mix in honest.mixes)
    others = 36_536_884 - 33_868_800 - 17_952
    assert honest.counted == others + sizes + honest.coefficients + 4 * 17_952


def test_wrn_28_10_in_seven_million_is_one_blob_and_thin_wrn_28_5_has_28_templates():
    with torch.device("meta"):
        wide, thin = WideResNet(28, 10, 100), WideResNet(28, 5, 100)
    layout = template_layout(wide, 4, budget=7_000_000)
    assert layout.counted == 7_000_000 == layout.blob + layout.coefficients + 4 * 17_952 + 100
    assert sum(len(mix.group.names) for mix in layout.mixes) == 29  # 28 convolutions and the head
    banks = template_layout(thin, 4, budget=36_500_000, counts="templates", thin=True)
    assert max(mix.templates for mix in banks.mixes if len(mix.group.names) == 7) == 28


def test_a_small_budget_interpolates_or_gives_the_minimum():
    network = resnet(14, width=16)
    members = MixtureEnsemble(network, 2, budget=0.1)
    assert "layers larger than it" in repr(members)
    assert members(torch.randn(2, 3, 8, 8)).isfinite().all()
    with pytest.raises(EnfoldError, match="smallest possible budget for 2 members"):
        MixtureEnsemble(network, 2, budget=0.1, upsample=False)


# Templates and members


def test_layers_of_one_type_and_shape_are_a_group_and_templates_are_stored_once():
    members = MixtureEnsemble(resnet(), 3, budget=1.5)
    found = {len(mix.group.names): mix for mix in members.layout.mixes}
    assert [len(mix.group.names) for mix in members.layout.mixes] == [4, 3, 3]
    assert "groups.0.0.conv1.weight" in found[4].group.names
    keys = [key for key in members.state_dict() if "conv" in key or "mixture" in key]
    assert [key for key in keys if key.startswith("mixture.templates")] == [f"mixture.templates.{k}" for k in range(3)]
    assert not set(keys) & {f"shared.{name}" for mix in members.layout.mixes for name in mix.group.names}


def test_a_shape_that_occurs_once_is_one_tensor_for_all_members():
    network = resnet()
    members = MixtureEnsemble(network, 3)
    state, stored = members.expand(), members.shared.state()
    for name in ("conv.weight", "groups.1.0.conv1.weight", "head.weight", "head.bias"):
        assert {state[name][k].data_ptr() for k in range(3)} == {stored[name].data_ptr()}
        torch.testing.assert_close(stored[name].detach(), network.state_dict()[name], rtol=0, atol=0)
    thin = MixtureEnsemble(network, 3, budget=2.0, thin=True)
    assert not any(name.endswith("weight") for name in thin.shared.state())


def test_disjoint_members_have_separate_templates_if_possible():
    network = towers()
    members = MixtureEnsemble(network, 2, budget=5.0, max_templates=2, assignment="disjoint_greedy")
    used = [set(used_of(members)[k].flatten().tolist()) for k in range(2)]
    assert used[0] & used[1] == set()
    assert used[0] | used[1] == set(range(2 * 3 * 2))
    members(torch.randn(4, 6))[0].sum().backward()
    touched = {t for t, grad in enumerate(members.mixture.templates[0].grad) if grad.any()}
    assert touched <= used[0]
    scales = [group["grad_scale"] for group in members.param_groups(0.1) if "grad_scale" in group]
    assert scales == [1 / 2, 1.0]  # what is shared, and a bank in which each template belongs to one member


def test_shared_templates_are_the_same_for_all_members():
    members = MixtureEnsemble(resnet(), 3, budget=1.5)
    for number in range(len(members.layout.mixes)):
        assert (used_of(members, number) == used_of(members, number)[:1]).all()


@pytest.mark.parametrize("budget", [0.4, 1.5])
def test_members_with_equal_coefficients_and_norms_are_equal(budget):
    members = MixtureEnsemble(resnet(width=8), 3, budget=budget).train()
    inputs = torch.randn(4, 3, 8, 8)
    separate = members(inputs)
    assert (separate[0] - separate[1]).abs().max() > 1e-3
    with torch.no_grad():
        for alpha in members.mixture.coefficients:
            alpha.copy_(alpha[:1].expand_as(alpha).clone())
    equal = members(inputs)
    torch.testing.assert_close(equal, equal[:1].expand_as(equal))


def test_with_one_template_members_differ_by_a_factor_that_batch_norm_cancels():
    network = nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4),
    )  # fmt: skip
    members = MixtureEnsemble(network, 3, budget=2.0, max_templates=1, single_blob=False).train()
    with torch.no_grad():
        factors = torch.tensor([1.0, 2.5, -1.0])
        members.mixture.coefficients[0].copy_(factors.view(3, 1, 1).expand(3, 2, 1))
    weights = members.expand()["0.weight"]
    torch.testing.assert_close(weights, factors.view(3, 1, 1, 1, 1) * weights[0])
    same, scaled, negated = members(torch.randn(8, 3, 4, 4))
    torch.testing.assert_close(same, scaled, rtol=1e-3, atol=1e-3)
    assert (same - negated).abs().max() > 0.1


def test_mixtures_have_the_standard_deviation_of_their_templates():
    for budget in (0.4, 1.5):
        state = MixtureEnsemble(resnet(20, width=16), 4, budget=budget).expand()
        for name, fan_in in (("groups.0.1.conv1.weight", 144), ("groups.2.1.conv2.weight", 576)):
            assert state[name].std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)


@pytest.mark.parametrize("network", [MLP(12, [8, 8], 4), ViT((3, 8, 8), 4, width=8, depth=2, heads=2), resnet()])
@pytest.mark.parametrize("assignment", ["shared", "disjoint_greedy"])
def test_members_are_the_first_of_more_with_a_budget_of_templates(network, assignment):
    settings = {"budget": 0.8, "counts": "templates", "assignment": assignment}
    few, more = (MixtureEnsemble(network, size, **settings).expand() for size in (3, 4))
    for name, tensor in few.items():
        torch.testing.assert_close(more[name][:3], tensor)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv1d(4, 4, 3, padding=1), (4, 9)),
        (lambda: nn.Conv2d(4, 4, 3, groups=2, padding=1), (4, 5, 5)),
        (lambda: nn.Conv3d(4, 4, 1), (4, 3, 3, 3)),
        (lambda: nn.ConvTranspose2d(4, 4, 3, padding=1), (4, 5, 5)),
        (lambda: nn.Linear(4, 4), (4,)),
    ],
)
@pytest.mark.parametrize("single_blob", [False, True])
def test_every_kind_of_layer_is_mixed(layer, shape, single_blob):
    network = nn.Sequential(layer(), nn.ReLU(), layer())
    members = MixtureEnsemble(network, 2, budget=2.0, single_blob=single_blob)
    assert members.layout.mixes[0].group.names == ("0.weight", "2.weight")
    inputs = torch.randn(3, *shape)
    torch.testing.assert_close(members(inputs)[1], members.member(1)(inputs), rtol=1e-4, atol=1e-5)


# What is left alone, and what is refused


def test_frozen_layers_and_padded_embeddings_are_not_mixed():
    network = nn.Sequential(nn.Embedding(6, 6, padding_idx=0), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    network[1].weight.requires_grad_(False)
    members = MixtureEnsemble(network, 2, budget=2.0)
    assert members.layout.mixes[0].group.names == ("2.weight", "3.weight")
    for name in ("0.weight", "1.weight"):
        torch.testing.assert_close(members.expand()[name][1], network.state_dict()[name], rtol=0, atol=0)
    assert not members.shared.state()["1.weight"].requires_grad
    double = MixtureEnsemble(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), 2, budget=2.0)
    assert double(torch.randn(3, 4, dtype=torch.float64)).dtype == torch.float64


def test_patterns_select_the_mixed_layers():
    members = MixtureEnsemble(towers(), 2, budget=2.0, exclude=("^0$",))
    assert members.layout.mixes[0].group.names == ("2.weight", "4.weight")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0.0}, r"budget .*got 0\.0"),
        ({"budget": True}, r"budget .*got True"),
        ({"budget": float("nan")}, r"budget .*got nan"),
        ({"max_templates": 0}, r"max_templates .*got 0"),
        ({"counts": "all"}, r"counts .*got 'all'"),
        ({"init": "network", "single_blob": True}, "init .*single_blob=True"),
        ({"single_blob": False}, "each of the 3 shapes occurs once: set thin=True or single_blob=True"),
    ],
)
def test_invalid_options_are_refused(settings, message):
    with pytest.raises(EnfoldError, match=message):
        MixtureEnsemble(MLP(6, [5, 4], 3), 2, **settings)


def test_weights_of_two_dtypes_and_none_are_refused():
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    with pytest.raises(EnfoldError, match=r"of one dtype, got torch.float32 and torch.float64"):
        MixtureEnsemble(mixed, 2)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(EnfoldError, match="of one dtype, got none"):
        MixtureEnsemble(frozen, 2)


# Training


def test_coefficients_are_not_decayed_and_gradients_have_one_networks_size():
    members = MixtureEnsemble(resnet(), 4, budget=1.5)
    coefficients = {id(alpha) for alpha in members.mixture.coefficients}
    templates = {id(bank) for bank in members.mixture.templates}
    for decay in ("all", "weights"):
        for group in members.param_groups(0.1, decay):
            ids = {id(parameter) for parameter in group["params"]}
            if ids & coefficients:
                assert ids == coefficients
                assert group["weight_decay"] == 0
                assert group["member_axis"]
            if ids & templates:
                assert group["weight_decay"] == 0.1
                assert group["grad_scale"] == 1 / 4
            if ids & {id(parameter) for parameter in members.own.parameters()}:
                assert group["member_axis"]


@pytest.mark.parametrize(("budget", "blob"), [(0.6, True), (2.0, False)])
def test_members_learn_and_differ(budget, blob, tmp_path):
    torch.manual_seed(0)
    centres = 0.5 * torch.randn(4, 12)  # near enough that members cannot all be right, so that they can disagree
    labels = torch.randint(4, (256,))
    inputs = centres[labels] + torch.randn(256, 12)
    data = Data(Split(inputs[:192], labels[:192]), Split(inputs[192:], labels[192:]), Split(inputs, labels), 4, (12,))
    network = MLP(12, [24, 24, 24], 4)
    plan = TrainConfig(epochs=6, batch_size=32, lr=0.01, select="last")
    members = MixtureEnsemble(network, 3, budget=budget)
    assert bool(members.layout.blob) == blob
    history = fit(members, data, config=plan, quiet=True)
    assert sum(history.epochs[-1].train_loss) < 0.75 * sum(history.epochs[0].train_loss)
    assert disagreement(predict(members, data.test)) > 0.05
    enfold.save(members, tmp_path / "members.safetensors")
    loaded = enfold.load(tmp_path / "members.safetensors", network)
    torch.testing.assert_close(loaded(inputs), members(inputs), rtol=0, atol=0)
    assert (loaded.requested, loaded.actual) == (members.requested, members.actual)


@pytest.mark.parametrize(
    ("batches", "settings", "order"),
    [
        ("shared", {}, "shared"),
        ("own", {}, "own"),
        ("shared", {"bootstrap": True}, "own"),
        ("shared", {"folds": 3}, "own"),
        ("shared", {"order": "split"}, "split"),
    ],
    ids=str,
)
def test_members_are_trained_on_the_same_batch_unless_each_is_to_have_its_own(batches, settings, order):
    members = MixtureEnsemble(any_network(), 3, batches=batches)
    config = members.configure(TrainConfig(**settings))
    assert config.order == order
    seen = []

    def objective(model, batch):
        seen.append(batch.inputs)
        return cross_entropy()(model, batch)

    inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    fit(
        members.set_engine("loop"),
        (inputs, torch.arange(30) % 3),
        config=TrainConfig(epochs=1, batch_size=10, select="last", **settings),
        objective=objective,
        quiet=True,
    )
    assert seen[0].shape == ((10, 4) if order == "shared" else (3, 10 if order == "own" else 3, 4))
