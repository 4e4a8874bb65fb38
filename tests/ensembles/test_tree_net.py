"""TreeNet: its equations against members run one by one, multiple choice, and training."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import enfold
from clouds import three_clouds
from enfold.cost import flops, parameters
from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.ensembles.common.branching import split_names
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.tree_net import BestBranch, TreeNet
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.networks import MLP, ResNet
from enfold.train import TrainConfig, cross_entropy, fit
from fitting import any_network, fitted
from specimens import Residual


def test_a_split_at_the_first_module_is_a_deep_ensemble():
    network = ResNet(width=4, depth=8, num_classes=4)
    members, stacked = TreeNet(network, 3, split="conv", seed=5), DeepEnsemble(network, 3, seed=5)
    assert not members.shared.state()
    assert parameters(members) == 3 * parameters(network)
    ours, theirs = members.expand(), stacked.expand()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("split", ["hidden.0", "hidden.1", "hidden.2", "head"])
def test_the_count_is_trunk_and_branches(split):
    network = MLP(6, [5, 4, 3], 2)
    members = TreeNet(network, 4, split=split)
    behind = split_names(network, split)
    branch = sum(parameter.numel() for name, parameter in network.named_parameters() if name in behind)
    assert parameters(members) == parameters(network) - branch + 4 * branch
    inputs = torch.randn(8, 6)
    of_branch = sum(
        2 * tensor.numel() for name, tensor in network.named_parameters() if name in behind and tensor.ndim > 1
    )
    assert flops(members, inputs) == flops(network, inputs) + 3 * of_branch


@pytest.mark.parametrize(
    "network", [MLP(12, [8, 8], 4), ResNet(1, 4, 8, 4), Residual()], ids=["mlp", "resnet", "loose"]
)
@pytest.mark.parametrize("training", [False, True])
def test_the_trunks_gradient_is_the_sum_of_the_branches(network, training):
    torch.manual_seed(0)
    shape = {"MLP": (12,), "ResNet": (1, 8, 8), "Residual": (2, 8, 8)}[type(network).__name__]
    inputs, target = torch.randn(6, *shape), torch.randn(3, 6, 4 if shape != (2, 8, 8) else 3)
    members = TreeNet(network, 3).train(training)
    assert members.shared.state()
    networks = members.networks()
    ((members(inputs) - target) ** 2).sum().backward()
    for network, wanted in zip(networks, target, strict=True):
        ((network(inputs) - wanted) ** 2).sum().backward()
    for name, parameter in members.shared.named_parameters():
        expected = sum(network.get_parameter(name).grad for network in networks)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4)
    for name, parameter in members.own.named_parameters():
        expected = torch.stack([network.get_parameter(name).grad for network in networks])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4)


def test_the_optimizer_gets_the_trunk_with_one_networks_gradient():
    members = TreeNet(MLP(6, [5, 5], 3), 4)
    trunk, branches = members.param_groups(0.1)
    assert trunk["grad_scale"] == 0.25
    assert {id(parameter) for parameter in trunk["params"]} == {
        id(parameter) for parameter in members.shared.parameters()
    }
    assert branches["member_axis"]
    assert "grad_scale" not in branches


def test_fresh_branches_differ_and_copies_keep_trained_weights():
    network = MLP(6, [5, 5], 3)
    fresh = TreeNet(network, 3, split="head").own.state()["head.weight"]
    assert not any(torch.equal(fresh[k], network.head.weight) for k in range(3))
    assert not torch.equal(fresh[0], fresh[1])
    equal = TreeNet(network, 3, split="head", branches="copies", noise=0.0)
    torch.testing.assert_close(equal.own.state()["head.weight"], network.head.weight.expand(3, 3, 5), rtol=0, atol=0)
    inputs = torch.randn(4, 6)
    torch.testing.assert_close(equal(inputs), network(inputs).expand(3, 4, 3))
    wide = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5000))
    noisy = TreeNet(wide, 3, split="1", branches="copies", noise=0.2).own.state()["1.weight"] - wide[1].weight
    size = wide[1].weight.square().mean().sqrt()
    torch.testing.assert_close(noisy.std(dim=(1, 2)), (0.2 * size).expand(3), rtol=0.05, atol=0)


def example_batch():
    generator = torch.Generator().manual_seed(0)
    return Batch(torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator))


def test_only_the_winner_is_trained_on_an_example():
    members, batch = TreeNet(MLP(4, [8, 8], 3), 3, choice="best", warmup_epochs=0), example_batch()
    losses = torch.stack(
        [
            F.cross_entropy(logits, batch.targets, reduction="none", label_smoothing=0.1)
            for logits in members(batch.inputs)
        ]
    )
    winner = losses.argmin(0)
    assert len(winner.unique()) > 1
    objective = members.objective(TrainConfig(label_smoothing=0.1))
    found = objective(members, batch)
    expected = torch.stack([3 * torch.where(winner == k, losses[k], 0.0).mean() for k in range(3)])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum() / 3, losses.amin(0).mean())  # the loss of the oracle
    found.sum().backward()
    for name, parameter in members.own.named_parameters():
        loser = torch.autograd.grad(objective(members, batch)[0], parameter)[0][1:]
        assert not loser.any(), name


def test_a_minimum_weight_of_one_m_th_trains_all_branches_equally():
    members, batch = TreeNet(MLP(4, [8, 8], 3), 4), example_batch()
    smoothing = (0.0, 0.1, 0.2, 0.3)
    everyone = cross_entropy(smoothing)(members, batch)
    torch.testing.assert_close(BestBranch(0.25, 0, smoothing)(members, batch), everyone)
    mixed = BestBranch(0.05, 0, smoothing)(members, batch)
    winner_alone = BestBranch(0.0, 0, smoothing)(members, batch)
    torch.testing.assert_close(mixed, 0.2 * everyone + 0.8 * winner_alone)


def test_all_branches_are_trained_during_warm_up():
    members, batch = TreeNet(MLP(4, [8, 8], 3), 3, choice="best", warmup_epochs=2), example_batch()
    objective = members.objective(TrainConfig())
    everyone = cross_entropy()(members, batch)
    for epoch in (1, 2):
        torch.testing.assert_close(objective(members, batch), everyone)
        members.on_epoch_end(epoch, TrainConfig())
    assert not torch.allclose(objective(members, batch), everyone)
    members.on_fit_end(three_clouds(4, 4, 4))
    torch.testing.assert_close(objective(members, batch), everyone)


def ambiguous(count: int) -> Data:
    """Four inputs, each with two labels that are equally right: no network can know, but two can divide the work."""
    generator = torch.Generator().manual_seed(0)
    kind, coin = torch.randint(4, (count,), generator=generator), torch.randint(2, (count,), generator=generator)
    split = Split(torch.eye(4)[kind] + 0.05 * torch.randn(count, 4, generator=generator), (kind + coin) % 4)
    return Data(split, split, split, 4, (4,))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")  # of those trained on all
def test_multiple_choice_raises_the_oracles_accuracy():
    data, plan = ambiguous(128), TrainConfig(epochs=20, batch_size=32, lr=0.03, weight_decay=0.0, select="last")
    oracle = {}
    for choice in ("all", "best"):
        torch.manual_seed(0)
        build = partial(TreeNet, num_members=2, choice=choice, minimum_weight=0.05 if choice == "best" else 0.0)
        right = predict(fitted(build(MLP(4, [16, 16], 4)), data, plan), data.test)
        hits = right.log_probs.argmax(-1) == right.labels
        oracle[choice] = hits.any(0).float().mean()
    assert oracle["best"] > 0.95
    assert oracle["best"] > oracle["all"] + 0.1


def test_multiple_choice_training_uses_one_order_and_the_last_epoch():
    build = partial(TreeNet, num_members=2, choice="best")
    plan = build(any_network()).configure(TrainConfig(patience=3))
    assert (plan.order, plan.select, plan.patience) == ("shared", "last", None)
    assert TreeNet(any_network(), 2).configure(TrainConfig(patience=3)) == TrainConfig(patience=3, order="shared")
    assert TreeNet(any_network(), 2).configure(TrainConfig(bootstrap=True)) == TrainConfig(bootstrap=True)
    assert TreeNet(any_network(), 2).objective(TrainConfig()) is None
    inputs = torch.randn(2, 5, 4)
    with pytest.raises(EnfoldError, match=r"order .*got a batch"):
        BestBranch()(build(MLP(4, [4], 3)), Batch(inputs, torch.zeros(2, 5, dtype=torch.long), own=True))


@pytest.mark.parametrize("choice", ["all", "best"])
def test_trained_saved_and_loaded(choice, tmp_path):
    torch.manual_seed(0)
    data, network = (
        three_clouds(96, 48, 48),
        nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), MLP(16, [8], 3)),
    )
    build = partial(TreeNet, num_members=3, choice=choice, minimum_weight=0.1)
    members = fitted(build(network), data, TrainConfig(epochs=6, batch_size=16, lr=0.01))
    assert members.epochs == 0
    assert (predict(members, data.test).mean().log_probs[0].argmax(-1) == data.test.labels).float().mean() > 0.5
    enfold.save(members, tmp_path / "tree.safetensors")
    loaded = enfold.load(tmp_path / "tree.safetensors", network)
    assert loaded.options() == members.options()
    assert build.keywords.items() <= loaded.options().items()
    torch.testing.assert_close(loaded(data.test.inputs), members(data.test.inputs), rtol=0, atol=0)


def test_training_resumes_to_the_same_bits(tmp_path):
    torch.manual_seed(0)
    data, network = (
        three_clouds(64, 32, 32),
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), MLP(8, [8], 3)),
    )
    build = partial(TreeNet, num_members=2, split="3.hidden.0", choice="best", warmup_epochs=2, minimum_weight=0.1)
    plan = build(network).configure(TrainConfig(epochs=4, batch_size=16))
    complete = fitted(build(network), data, plan)

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.epoch == 2:
            raise Stop

    with pytest.raises(Stop):
        fit(
            build(network),
            data,
            config=plan,
            objective=build(network).objective(plan),
            checkpoint=tmp_path / "fit",
            on_epoch=stop,
            quiet=True,
        )
    again = fitted(build(network), data, plan, checkpoint=tmp_path / "fit")
    for name, tensor in complete.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_members": 0}, r"num_members .*got 0"),
        ({"split": "hidden_1"}, "got 'hidden_1', did you mean 'hidden.1'"),
        ({"split": "nowhere at all"}, "got 'nowhere at all': choose one of hidden, hidden.0"),
        ({"branch": ("nothing",)}, "'nothing' matches none of hidden.0.weight"),
        ({"split": "head", "branch": ("head",)}, "leave one out"),
        ({"branches": "twins"}, r"branches .*got 'twins'"),
        ({"noise": -1.0}, r"noise .*got -1\.0"),
        ({"choice": "worst"}, "got 'worst'"),
        ({"minimum_weight": 0.3}, r"minimum_weight .*got 0\.3"),
        ({"warmup_epochs": -1}, r"warmup_epochs .*got -1"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=message):
        TreeNet(MLP(6, [5, 5], 3), **settings)


def test_a_branch_used_outside_its_module_belongs_to_the_member():
    """One pass over the trunk would give the first member's values to all."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.branch, self.act = nn.Linear(6, 6), nn.Linear(6, 3), nn.Tanh()

        def forward(self, x):
            return self.act(self.trunk(x) @ self.branch._parameters.get("weight").t())

    members = TreeNet(Network(), 3, split="branch").eval()
    x = torch.randn(5, 6)
    torch.testing.assert_close(members(x), torch.stack([member.eval()(x) for member in members]))
