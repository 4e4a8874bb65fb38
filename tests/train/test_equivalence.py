"""Training M stacked members equals training each of them alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.data import Split
from enfold.data.batches import Batch, Order
from enfold.data.dataset import pixels
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.train import TrainConfig, cross_entropy, fit

PLAN = TrainConfig(epochs=2, batch_size=16, select="last", clip_norm=None, weight_decay=1e-3)
SGD = PLAN.replace(optimizer="sgd", lr=0.1, warmup_epochs=1.0)
PLANS = {
    "sgd": SGD,
    "sgd without Nesterov": SGD.replace(nesterov=False, schedule="step"),
    "sgd without momentum": SGD.replace(momentum=0.0, schedule="constant"),
    "adam": PLAN.replace(optimizer="adam", lr=0.01, decay="weights"),
    "adamw": PLAN.replace(optimizer="adamw", lr=0.01, label_smoothing=0.1),
}


def trained(members: DeepEnsemble, data, plan: TrainConfig) -> DeepEnsemble:
    fit(members, data, config=plan, quiet=True)
    return members


def laid_out_as_networks(members: DeepEnsemble) -> DeepEnsemble:
    """A copy whose slices lie in memory as a network's own weights do: on that the bits of a matrix product depend."""
    members = members[:]
    for parameter in members.parameters():
        parameter.data = parameter.data.contiguous()
    return members


def alone(members: DeepEnsemble, index: int, data, plan: TrainConfig) -> nn.Module:
    """Member `index` before training, trained by itself."""
    network = members.member(index)
    fit(network, data, config=plan.replace(first_member=index), quiet=True)
    return network


def assert_equal_states(first: nn.Module, second: nn.Module, tolerance: float = 0.0) -> None:
    expected = second.state_dict()
    assert first.state_dict().keys() == expected.keys()
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance)


def moved(members: DeepEnsemble, before: DeepEnsemble) -> bool:
    """Training must have changed every member, or a comparison says nothing."""
    pairs = zip(members.parameters(), before.parameters(), strict=True)
    return all(bool((new != old).flatten(1).any(1).all()) for new, old in pairs)


@pytest.mark.combinations
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("order", ["own", "shared"])
def test_the_loop_engine_gives_the_same_bits(data, make, plan, order):
    """Full batches only: a member's slice then starts at a multiple of 64 bytes, which affects bits."""
    data, plan = data.replace(train=data.train[:48]), plan.replace(order=order)
    before = DeepEnsemble(make["mlp"], 3, seed=1, engine="loop")
    members = trained(laid_out_as_networks(before), data, plan)
    assert moved(members, before)
    for index in range(3):
        assert_equal_states(members.member(index), alone(before, index, data, plan))


@pytest.mark.combinations
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("network", "engine"), [("mlp", "stacked"), ("normed", "stacked"), ("normed", "loop")])
def test_engines_agree_with_single_networks(double, make, plan, network, engine):
    before = DeepEnsemble(lambda: make[network]().double(), 3, seed=1, engine=engine)
    members = trained(before[:], double, plan)
    assert moved(members, before)
    for index in range(3):
        assert_equal_states(members.member(index), alone(before, index, double, plan), 1e-10)


@pytest.mark.parametrize("augment", [(), ("pad-crop", "flip")], ids=["plain", "augmented"])
@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_convolutions_with_batch_norm_agree(images, make, engine, augment):
    floats = images.replace(train=Split(pixels(images.train.inputs).double(), images.train.labels))
    floats = floats.replace(val=[], test=[])
    plan = SGD.replace(augment=augment)
    before = DeepEnsemble(lambda: make["convolutional"]().double(), 2, engine=engine)
    members = trained(before[:], floats, plan)
    assert moved(members, before)
    for index in range(2):
        assert_equal_states(members.member(index), alone(before, index, floats, plan), 1e-10)


@pytest.mark.parametrize("changes", [{"bootstrap": True}, {"clip_norm": 0.05}], ids=["bagging", "clipping"])
def test_bagging_and_clipping_are_per_member(double, make, changes):
    plan = SGD.replace(**changes)
    before = DeepEnsemble(lambda: make["mlp"]().double(), 3, engine="loop")
    members = trained(before[:], double, plan)
    without = trained(before[:], double, SGD)
    for index in range(3):
        assert_equal_states(members.member(index), alone(before, index, double, plan), 1e-10)
        assert not torch.allclose(members.expand()["0.weight"][index], without.expand()["0.weight"][index])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("decay", ["all", "weights"])
def test_settings_per_member(data, make, optimizer, decay):
    own = {"lr": (0.01, 0.03, 0.1), "weight_decay": (0.0, 1e-2, 1e-1), "label_smoothing": (0.1, 0.0, 0.3)}
    data, plan = data.replace(train=data.train[:48]), PLAN.replace(optimizer=optimizer, decay=decay)
    before = DeepEnsemble(make["mlp"], 3, engine="loop")
    members = trained(laid_out_as_networks(before), data, plan.replace(**own))
    for index in range(3):
        single = {name: values[index] for name, values in own.items()}
        assert_equal_states(members.member(index), alone(before, index, data, plan.replace(**single)))


def test_learning_rates_per_member_with_clipping(double, make):
    plan = SGD.replace(clip_norm=0.05)
    before = DeepEnsemble(lambda: make["mlp"]().double(), 2)
    members = trained(before[:], double, plan.replace(lr=(0.1, 0.3)))
    for index, rate in enumerate((0.1, 0.3)):
        single = alone(before, index, double, plan.replace(lr=rate))
        assert_equal_states(members.member(index), single, 1e-10)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_m_members_are_the_first_of_one_more(double, make, engine, bootstrap):
    plan = PLAN.replace(bootstrap=bootstrap)

    def made(count: int) -> DeepEnsemble:
        return trained(DeepEnsemble(lambda: make["normed"]().double(), count, engine=engine), double, plan)

    few, many = made(2), made(3)
    for index in range(2):
        assert_equal_states(few.member(index), many.member(index), 1e-12)


def test_early_stopping_is_per_member(data, make):
    """A member that does not improve is stopped at its best epoch while the others continue."""
    data = data.replace(train=data.train[:48])
    plan = SGD.replace(epochs=12, select="best", patience=1, lr=0.5, schedule="constant")
    before = DeepEnsemble(make["mlp"], 4, engine="loop")
    members = laid_out_as_networks(before)
    history = fit(members, data, config=plan, quiet=True)
    lengths = []
    for index in range(4):
        network = before.member(index)
        single = fit(network, data, config=plan.replace(first_member=index), quiet=True)
        lengths.append(len(single.epochs))
        assert single.chosen == [history.chosen[index]]
        assert_equal_states(members.member(index), network)
    assert len(set(lengths)) > 1, "all members stopped in the same epoch: choose a plan that tells them apart"
    assert len(history.epochs) == max(lengths)


def test_losses_are_summed_over_members(data, make):
    """A member's gradient in the ensemble equals its gradient in a single training."""
    members = DeepEnsemble(make["mlp"], 4, engine="loop")
    batch = next(Order(16, range(4)).batches(data, 0))
    cross_entropy()(members, batch).sum().backward()
    for index in range(4):
        network = members.member(index)
        cross_entropy()(network, Batch(batch.inputs[index], batch.targets[index])).sum().backward()
        for stacked, own in zip(members.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(stacked.grad[index], own.grad)
