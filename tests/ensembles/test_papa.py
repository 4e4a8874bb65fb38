"""PAPA: what a pull does to members, when it comes, and that the average of the result is a network."""

from functools import cache, partial

import pytest
import torch
from torch import nn

import enfold
from clouds import three_clouds
from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.papa import PAPA
from enfold.errors import EnfoldError
from enfold.merge import average
from enfold.networks import MLP
from enfold.train import TrainConfig, fit
from enfold.train.optimize import Optimizer
from fitting import any_network, fitted

similar = pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def distinct_members(**settings):
    """Members that differ in all they have."""
    members = PAPA(normed(), 4, start="own", **settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in members.tree.state().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return members


def values(members):
    return {name: tensor.detach().clone() for name, tensor in members.expand().items()}


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_averaging_moves_weights_and_statistics_and_preserves_their_mean(engine):
    members = distinct_members(engine=engine)
    before = values(members)
    members.pull(0.75)
    for name, tensor in values(members).items():
        if not tensor.is_floating_point():
            torch.testing.assert_close(tensor, before[name])
            continue
        mean = before[name].mean(0)
        torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * mean)
        torch.testing.assert_close(tensor.mean(0), mean)


def test_retaining_zero_gives_equal_members_and_one_changes_nothing():
    members = distinct_members()
    before = values(members)
    members.pull(1.0)
    torch.testing.assert_close(values(members), before, rtol=0, atol=0)
    members.pull(0.0)
    for tensor in values(members).values():
        torch.testing.assert_close(tensor, tensor[:1].expand_as(tensor), rtol=0, atol=0)


def test_pairs_are_means_of_two_members():
    members = distinct_members(kind="pairs")
    before = members.expand()["0.weight"].detach().clone()
    members.pair(1)
    for tensor in members.expand()["0.weight"]:
        means = [(before[i] + before[j]) / 2 for i in range(4) for j in range(i)]
        assert any(torch.allclose(tensor, mean) for mean in means)
    again = distinct_members(kind="pairs")
    again.pair(1)
    torch.testing.assert_close(again.expand()["0.weight"], members.expand()["0.weight"])
    other = distinct_members(kind="pairs")
    other.pair(2)
    assert not torch.allclose(other.expand()["0.weight"], members.expand()["0.weight"])


def test_steps_of_the_averaging():
    def steps(**settings):
        found = []
        for step in range(1, 13):
            members = distinct_members(**settings)
            before = values(members)
            members.on_step_end(step, Optimizer(members, TrainConfig()))
            found += [step] if not torch.equal(before["0.weight"], members.expand()["0.weight"]) else []
        return found

    def epochs(**settings):
        found = []
        for epoch in range(1, 12):
            members = distinct_members(**settings)
            before = values(members)
            members.on_epoch_end(epoch, TrainConfig(epochs=11))
            found += [epoch] if not torch.equal(before["0.weight"], members.expand()["0.weight"]) else []
        return found

    assert steps() == [10]
    assert steps(every_steps=4) == [4, 8, 12]
    assert steps(kind="all") == []
    assert epochs() == []
    assert epochs(kind="all") == [1, 6]  # never after the last
    assert epochs(kind="pairs", every_epochs=3) == [1, 4, 7, 10]


def test_starts():
    network = MLP(4, [8], 3)
    assert len(PAPA(network, 3).equal_parameters()) == 4
    own = PAPA(network, 3, start="own")
    assert "hidden.0.weight" not in own.equal_parameters()
    torch.testing.assert_close(
        PAPA(network, 4, start="own").expand()["hidden.0.weight"][:3], own.expand()["hidden.0.weight"]
    )


def test_the_plan_gets_a_smoothing_for_each_member_and_no_choice_of_epochs():
    plan = PAPA(any_network(), 5).configure(TrainConfig())
    assert plan.label_smoothing == (0.0, 0.05, 0.1, 0.0, 0.05)
    assert plan.select == "last"
    assert PAPA(any_network(), 5).configure(TrainConfig(label_smoothing=0.2)).label_smoothing == 0.2
    assert PAPA(any_network(), 5, smoothing=()).configure(TrainConfig()).label_smoothing == 0.0
    with pytest.raises(EnfoldError, match=r"patience .*got 3"):
        PAPA(any_network(), 5).configure(TrainConfig(patience=3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 1.5}, r"keep .*got 1\.5"),
        ({"kind": "some"}, r"kind .*got 'some'"),
        ({"every_steps": 0}, r"every_steps .*got 0"),
        ({"every_epochs": 0}, r"every_epochs .*got 0"),
        ({"start": "zero"}, "got 'zero'"),
        ({"num_members": 0}, r"num_members .*got 0"),
    ],
)
def test_invalid_options_are_refused(settings, message):
    with pytest.raises(EnfoldError, match=message):
        PAPA(any_network(), **settings)


def quadrants(count: int = 1024) -> Data:
    """Whether two numbers have the same sign: no linear network can tell."""
    inputs = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    half = count // 2
    return Data(Split(inputs[:half], labels[:half]), [], Split(inputs[half:], labels[half:]), 2, (2,))


def accuracy(network: nn.Module, data: Data) -> float:
    return float((network.eval()(data.test.inputs).argmax(-1) == data.test.labels).float().mean())


@cache
def independent() -> tuple[Data, nn.Module, TrainConfig, DeepEnsemble]:
    """Members that were trained independently, for comparison."""
    torch.manual_seed(0)
    data, network = quadrants(), MLP(2, [16, 16], 2)
    plan = TrainConfig(epochs=12, batch_size=32, lr=0.01, weight_decay=0.0, select="last")
    members = DeepEnsemble(network, 3)
    fit(members, data, config=plan, quiet=True)
    return data, network, plan, members


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
@pytest.mark.parametrize("settings", [{"keep": 0.9, "every_steps": 1}, {"kind": "all", "every_epochs": 1}])
def test_the_average_is_a_network_where_that_of_independent_members_is_not(settings):
    data, network, plan, alone = independent()
    together = fitted(PAPA(network, 3, start="own", smoothing=(), **settings), data, plan)
    assert min(accuracy(member, data) for member in alone) > 0.95
    assert accuracy(average(alone, data), data) < 0.85
    assert accuracy(average(together, data), data) > 0.95


@similar
@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("kind", ["gradual", "pairs"])
def test_training_resumes_to_the_same_bits_and_is_stored(tmp_path, engine, kind):
    torch.manual_seed(0)
    data, network = three_clouds(64, 16, 8), normed()
    build = partial(PAPA, num_members=3, kind=kind, every_steps=2, every_epochs=2, engine=engine)
    plan = TrainConfig(epochs=4, batch_size=16, lr=0.02)
    complete = fitted(build(network), data, plan)
    stopped = build(network)
    adapted = build(any_network()).configure(plan)

    def stop(record):
        if record.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(stopped, data, config=adapted, checkpoint=tmp_path / "state", on_epoch=stop, quiet=True)
    resumed = fitted(build(network), data, plan, checkpoint=tmp_path / "state")
    torch.testing.assert_close(resumed.state_dict(), complete.state_dict(), rtol=0, atol=0)
    loaded = enfold.load(enfold.save(resumed, tmp_path / "members.safetensors"), network)
    torch.testing.assert_close(loaded(data.test.inputs), resumed(data.test.inputs), rtol=0, atol=0)
    assert loaded.options() == resumed.options()
    assert build.keywords.items() <= loaded.options().items()
