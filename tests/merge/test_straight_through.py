"""Straight-through matching: the mid-point's loss falls or stays, functions stay, copies need no training."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import enfold.train.descent as descent
from enfold.arguments import arguments_of
from enfold.data import Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import align, straight_through
from enfold.merge.common.states import states_of
from enfold.symmetry import match_state
from enfold.train.checkpoint import stored_history
from planted import assert_back, planted


def midpoint_loss(members: DeepEnsemble, data) -> float:
    network = members.network(members.mean_state()).train()
    for part in network.modules():
        part.training = isinstance(part, torch.nn.BatchNorm1d)
    return float(F.cross_entropy(network(data.train.inputs), data.train.labels).detach())


@pytest.mark.parametrize("name", ["shallow", "deep", "convolutional"])
def test_permuted_copies_average_to_the_original(name):
    members, network, data = planted(name, 2)
    assert_back(straight_through(members, data, repair="none"), network, data)


def test_zero_epochs_equal_weight_matching(members, data):
    one, other = (
        align(members, data, **options).state_dict() for options in ({"method": "straight_through", "epochs": 0}, {})
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_midpoint_loss_decreases(members, data):
    pair = members[[0, 2]]
    found = align(pair, data, method="straight_through", lr=1.0)
    begun = align(pair, data)
    assert midpoint_loss(found, data) < midpoint_loss(begun, data)
    inputs = data.test.inputs
    torch.testing.assert_close(found.eval()(inputs), pair.eval()(inputs), rtol=1e-4, atol=1e-5)


def test_patience_and_epochs_end_it(members, data):
    short, long = (align(members[[0, 2]], data, method="straight_through", lr=1.0, epochs=n) for n in (1, 20))
    assert midpoint_loss(long, data) <= midpoint_loss(short, data)


def test_the_best_order_is_returned(members, data):
    """At such a rate the loss falls in the first epoch and rises in the second."""
    folds = [partial(align, method="straight_through", lr=10.0, epochs=epochs) for epochs in (0, 1, 2, 3)]
    losses = [midpoint_loss(fold(members[[0, 2]], data), data) for fold in folds]
    assert losses[0] > losses[-1]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("members", ["plain"], indirect=True)
def test_a_step_follows_the_gradient_of_the_permuted_member(members, data, monkeypatch):
    """Half of the slope at the mid-point, as the member is half of it."""
    goals, results = [], []

    def spied(goal, *args, **settings):
        goals.append({name: tensor.clone() for name, tensor in goal.items()})
        results.append(match_state(goal, *args, **settings))
        return results[-1]

    monkeypatch.setattr(sys.modules["enfold.merge.straight_through"], "match_state", spied)
    pair = members[:2]
    align(pair, data, method="straight_through", epochs=1, lr=0.5)  # all data are one batch
    fixed, moved = states_of(pair)[0], {name: tensor.requires_grad_() for name, tensor in results[0].items()}
    midpoint = {name: (tensor + moved[name]) / 2 for name, tensor in fixed.items()}
    loss = F.cross_entropy(functional_call(pair.member(0), midpoint, (data.train.inputs,)), data.train.labels)
    slopes = dict(zip(moved, torch.autograd.grad(loss, list(moved.values())), strict=True))
    torch.testing.assert_close(goals[-2], {name: tensor - 0.5 * slopes[name] for name, tensor in fixed.items()})


def test_modes_are_preserved(members, data, snapshot):
    modes = [part.training for part in members.skeleton.network.modules()]
    straight_through(members, data, epochs=1)
    assert modes == [part.training for part in members.skeleton.network.modules()]


def stopped_at(number: int, monkeypatch) -> None:
    """Ctrl-C after a number of checkpoints."""
    written, save = [], descent.save_checkpoint

    def stop(*given: object) -> None:
        save(*given)
        written.append(given)
        if len(written) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(descent, "save_checkpoint", stop)


@pytest.mark.combinations
@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("number", [1, 3, 5])
def test_training_resumes_to_the_same_bits(members, data, tmp_path, monkeypatch, number, loader, capsys):
    if loader:
        shuffled = DataLoader(TensorDataset(data.train.inputs, data.train.labels), 16, shuffle=True)
        data = data.replace(train=shuffled)
    fold, file = partial(align, method="straight_through", lr=1.0, batch_size=16, epochs=3), tmp_path / "st.safetensors"
    expected = fold(members[:3], data).state_dict()
    with monkeypatch.context() as patched:
        stopped_at(number, patched)
        with pytest.raises(KeyboardInterrupt):
            fold(members[:3], data, checkpoint=file)
    capsys.readouterr()
    found = fold(members[:3], data, checkpoint=file).state_dict()
    assert "epoch 3/3  loss " in capsys.readouterr().err
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert [path.name for path in tmp_path.iterdir()] == ["st.safetensors"]
    assert len(stored_history(file).epochs) == 3, "of the last member"


def test_early_stopping_is_reported(members, data, capsys):
    straight_through(members[[0, 2]], data, lr=1e-9, patience=2)  # too small a rate for another order
    shown = capsys.readouterr().err
    assert "straight_through 100 %  member 1: loss not below " in shown
    assert shown.endswith(" since epoch 0\n")


def test_a_checkpoint_of_other_settings_is_refused(members, data, tmp_path):
    file = tmp_path / "st.safetensors"
    straight_through(members[[0, 2]], data, checkpoint=file, epochs=1)
    with pytest.raises(EnfoldError, match="epochs"):
        straight_through(members[[0, 2]], data, checkpoint=file, epochs=2)
    other = data.replace(train=Split(data.train.inputs + 1, data.train.labels))
    with pytest.raises(EnfoldError, match="training inputs"):
        straight_through(members[[0, 2]], other, checkpoint=file, epochs=1)


@pytest.mark.parametrize("size", [13, 1])
def test_a_loaders_batch_of_one_example(members, data, size):
    """Behind larger ones it is left out; where all are of one, batch norm cannot be trained."""
    loader = DataLoader(TensorDataset(data.train.inputs, data.train.labels), size)  # 40 = 3 x 13 + 1
    fold, pair = partial(straight_through, epochs=1), members[[0, 2]]
    if size > 1:
        fold(pair, data.replace(train=loader))
        return
    with pytest.raises(EnfoldError, match=r"batch norm needs .* got 1"):
        fold(pair, data.replace(train=loader))


@pytest.mark.parametrize("settings", [{"epochs": -1}, {"patience": 0}, {"batch_size": 1}, {"lr": 0.0}])
def test_invalid_options(settings):
    with pytest.raises(EnfoldError, match=next(iter(settings))):
        straight_through(None, None, **settings)


def test_the_published_settings_are_the_defaults_and_momentum_is_not_negative():
    options = arguments_of(straight_through)
    defaults = [options[name].default for name in ("epochs", "lr", "momentum", "batch_size")]
    assert defaults == [250, 1e-2, 0.9, 1000]
    with pytest.raises(EnfoldError, match="momentum"):
        straight_through(None, None, momentum=-0.1)
