"""Boosting: weights of examples and members by the equations, both ways of weighting, its ends, and resuming."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import enfold
import enfold.ensembles.boosting as module
from clouds import three_clouds
from enfold.ensembles.boosting import Boosting
from enfold.ensembles.common.search import FewerCandidatesWarning
from enfold.errors import EnfoldError
from enfold.metrics import accuracy, majority_vote
from enfold.networks import MLP
from enfold.train import TrainConfig, fit

pytestmark = [
    pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning"),
    pytest.mark.filterwarnings("ignore::enfold.ensembles.common.search.FewerCandidatesWarning"),
]

PLAN = TrainConfig(epochs=3, batch_size=30, lr=0.05, select="last")
DATA = three_clouds(120, 30, 60)


def weak() -> nn.Module:
    torch.manual_seed(0)
    return MLP(4, [6], 3)


@pytest.fixture
def noisy():
    """Data with a fifth of wrong labels, which no small network can fit."""
    labels = DATA.train.labels.clone()
    labels[::5] = (labels[::5] + 1) % 3
    return DATA.replace(train=enfold.Split(DATA.train.inputs, labels))


def boosted(data, monkeypatch=None, **options):
    """A boosted ensemble, and the objective and the data of each training."""
    seen = []

    def spied(network, own, **settings):
        seen.append((settings.get("objective"), own))
        return fit(network, own, **settings)

    if monkeypatch is not None:
        monkeypatch.setattr(module, "fit", spied)
    members = Boosting(weak(), 4, **options)
    fit(members, data, config=PLAN, quiet=True)
    return members, seen


@pytest.mark.parametrize("rule", ["samme", "adaboost.m1"])
def test_weights_follow_the_equations(noisy, rule, monkeypatch):
    members, seen = boosted(noisy, monkeypatch, rule=rule)
    labels, count = noisy.train.labels.numpy(), 120
    weights, alphas = np.full(count, 1 / count), []
    for index in range(members.num_members):
        np.testing.assert_allclose(seen[index][0].weights.numpy(), count * weights, rtol=1e-4)
        with torch.no_grad():
            missed = members.member(index)(noisy.train.inputs).argmax(-1).numpy() != labels
        error = weights[missed].sum()
        alphas.append(np.log((1 - error) / error) + (np.log(2) if rule == "samme" else 0))
        weights = weights * np.exp(alphas[-1] * missed)
        weights /= weights.sum()
    assert members.num_members >= 2
    np.testing.assert_allclose(members.member_weights, np.array(alphas) / np.sum(alphas), rtol=1e-6)
    prediction = members.predict(DATA.test.inputs)
    expected = (torch.tensor(members.member_weights)[:, None, None] * prediction.members).sum(0)
    torch.testing.assert_close(prediction.mean, expected.to(prediction.mean))


def test_the_vote_of_samme_is_the_weighted_majority(noisy):
    members, _ = boosted(noisy)
    found = enfold.predict(members, DATA.test)
    votes = torch.zeros(60, 3, dtype=torch.float64)
    for weight, log_probs in zip(members.member_weights, found.log_probs, strict=True):
        votes[torch.arange(60), log_probs.argmax(-1)] += weight
    assert torch.equal(majority_vote(found), votes.argmax(-1))
    assert accuracy(found) > 0.6


def test_resampled_members_see_missed_examples_more_often(noisy, monkeypatch):
    members, seen = boosted(noisy, monkeypatch, weighting="resampled")
    assert all(objective is None for objective, _ in seen)
    with torch.no_grad():
        missed = members.member(0)(noisy.train.inputs).argmax(-1) != noisy.train.labels
    rows = {tuple(row): bool(wrong) for row, wrong in zip(noisy.train.inputs.tolist(), missed, strict=True)}
    share = [np.mean([rows[tuple(row)] for row in own.train.inputs.tolist()]) for _, own in seen[:2]]
    assert abs(share[0] - float(missed.double().mean())) < 0.15
    assert share[1] > share[0] + 0.1
    assert all(len(own.train) == 120 for _, own in seen)


def test_it_ends_with_a_member_without_errors():
    noise = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    inputs = noise + 5 * (torch.arange(60)[:, None] // 30 * 2 - 1)
    data = enfold.Split(inputs, torch.arange(60) // 30)
    torch.manual_seed(0)
    members = Boosting(nn.Linear(4, 2), 4)
    with pytest.warns(FewerCandidatesWarning, match="1 of 4"):
        fit(members, data, config=PLAN.replace(epochs=40, lr=0.1), quiet=True)
    assert members.num_members == 1
    assert members.member_weights is None
    assert members.predict(inputs).members.shape[0] == 1


def test_a_member_that_is_no_better_than_chance_is_left_out(noisy):
    never = PLAN.replace(epochs=0)
    members = Boosting(weak(), 3, rule="adaboost.m1")
    with pytest.warns(FewerCandidatesWarning, match="chance"):
        fit(members, noisy, config=never, quiet=True)
    assert members.num_members == 1  # the first is kept


def test_a_saved_ensemble_has_its_members_and_weights(noisy, tmp_path):
    members, _ = boosted(noisy)
    enfold.save(members, tmp_path / "e.safetensors")
    loaded = enfold.load(tmp_path / "e.safetensors", weak())
    assert (loaded.num_members, loaded.member_weights) == (members.num_members, members.member_weights)
    assert torch.equal(loaded.predict(DATA.test.inputs).mean, members.predict(DATA.test.inputs).mean)


def test_an_interrupted_training_gives_the_same_bits(noisy, tmp_path, monkeypatch):
    expected, _ = boosted(noisy)
    members, done = Boosting(weak(), 4), []

    def interrupted(network, own, **settings):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(settings)
        return fit(network, own, **settings)

    run = partial(fit, members, noisy, config=PLAN, checkpoint=tmp_path / "c.safetensors", quiet=True)
    monkeypatch.setattr(module, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(module, "fit", fit)
    members = Boosting(weak(), 4)
    fit(members, noisy, config=PLAN, checkpoint=tmp_path / "c.safetensors", quiet=True)
    torch.testing.assert_close(members.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_it_teaches_with_its_weights(noisy):
    members, _ = boosted(noisy)
    network = enfold.distill(members, noisy.train, init=weak(), epochs=1, quiet=True)
    assert isinstance(network, MLP)


@pytest.mark.parametrize(
    ("data", "settings", "named"),
    [
        ([(torch.randn(4, 4), torch.arange(4) % 3)], {}, "train"),
        ((torch.randn(8, 4), torch.randn(8, 3)), {"task": "regression"}, "regression"),
        (
            (torch.randn(8, 4), torch.arange(8) % 3),
            {"objective": lambda model, batch: model(batch.inputs).sum()},
            "objective",
        ),
    ],
    ids=["loader", "regression", "objective"],
)
def test_what_cannot_be_boosted_is_refused(data, settings, named):
    with pytest.raises(EnfoldError, match=named):
        fit(Boosting(weak(), 3), data, epochs=1, quiet=True, **settings)
