"""WASH: a shuffle keeps a weight's values over members, takes the optimizer's memory along, and helps the average."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import enfold
from clouds import three_clouds
from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.wash import WASH, optimizer_moments
from enfold.errors import EnfoldError
from enfold.merge import average
from enfold.networks import MLP
from enfold.train import TrainConfig, fit
from enfold.train.optimize import Optimizer
from fitting import any_network, fitted


def distinct_members(**fields):
    """Members that differ in all parameters."""
    members = WASH(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), 4, **fields)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in members.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return members


def shuffled(members, step=1, plan=None):
    """The values before and after a step's shuffle."""
    before = {name: tensor.detach().clone() for name, tensor in members.expand().items()}
    members.on_step_end(step, Optimizer(members, plan or TrainConfig()))
    return before, {name: tensor.detach().clone() for name, tensor in members.expand().items()}


@settings(max_examples=30)
@given(probability=st.floats(0, 1), step=st.integers(1, 1000), engine=st.sampled_from(["loop", "stacked"]))
def test_a_shuffle_keeps_the_values_of_each_weight_over_members(probability, step, engine):
    before, after = shuffled(distinct_members(probability=probability, schedule="constant", engine=engine), step)
    for name, tensor in after.items():
        torch.testing.assert_close(tensor.sort(dim=0).values, before[name].sort(dim=0).values, rtol=0, atol=0)
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.mean(0), before[name].mean(0))


def test_as_many_weights_are_swapped_as_their_layer_says():
    members = WASH(MLP(50, [60, 60], 40), 4, probability=0.5)
    with torch.no_grad():
        for parameter in members.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert members.probabilities() == {
        "hidden.0.weight": 0.5,
        "hidden.0.bias": 0.5,
        "hidden.1.weight": 0.25,
        "hidden.1.bias": 0.25,
        "head.weight": 0.0,
        "head.bias": 0.0,
    }
    before, after = shuffled(members)
    for name, expected in (("hidden.0.weight", 0.5), ("hidden.1.weight", 0.25), ("head.weight", 0.0)):
        moved = (before[name] != after[name]).any(0).float().mean()
        assert abs(float(moved) - expected * (1 - 1 / 24)) < 0.03  # one order of four in 24 changes nothing


def test_schedules_and_frozen_parameters():
    network = MLP(4, [6], 3)
    assert set(WASH(network, 2, probability=0.1, schedule="constant").probabilities().values()) == {0.1}
    assert set(WASH(nn.Linear(4, 3), 2, probability=0.1).probabilities().values()) == {0.1}
    network.hidden[0].requires_grad_(False)
    assert set(WASH(network, 2, schedule="constant").probabilities()) == {"head.weight", "head.bias"}


def test_draws_depend_on_the_seed_and_the_step_but_not_on_the_engine():
    def after(step, **fields):
        return shuffled(distinct_members(probability=0.3, **fields), step)[1]["0.weight"]

    torch.testing.assert_close(after(1), after(1), rtol=0, atol=0)
    torch.testing.assert_close(after(1, engine="loop"), after(1, engine="stacked"), rtol=0, atol=0)
    assert not torch.equal(after(1), after(2))
    assert not torch.equal(after(1), after(1, seed=1))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("rate", [0.01, (0.01, 0.02, 0.03, 0.04)])
@pytest.mark.parametrize("together", [True, False])
def test_the_optimizer_state_is_shuffled_with_its_weight(optimizer, rate, together):
    members = distinct_members(probability=0.5, optimizer_state=together)
    trained = Optimizer(members, TrainConfig(optimizer=optimizer, lr=rate))
    parameter = members.tree.state()["0.weight"]
    members.train()(torch.randn(8, 6)).square().sum().backward()
    trained.step(1.0, torch.amp.GradScaler("cpu", enabled=False))
    with torch.no_grad():  # memory that names its weight
        for memory in optimizer_moments(trained, parameter):
            for own, weight in zip(memory, parameter, strict=True):
                own.copy_(weight)
    before = parameter.detach().clone()
    members.on_step_end(1, trained)
    assert not torch.equal(parameter, before)
    kept = [torch.stack(list(memory)) for memory in optimizer_moments(trained, parameter)]
    assert len(kept) == (1 if optimizer == "sgd" else 2)
    for memory in kept:
        torch.testing.assert_close(memory, parameter.detach() if together else before, rtol=0, atol=0)


def test_one_member_and_probability_zero_change_nothing():
    before, after = shuffled(distinct_members(probability=0.0))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    alone = WASH(nn.Linear(4, 3), 1, probability=1.0)
    before, after = shuffled(alone)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"probability": 1.5}, r"probability .*got 1\.5"),
        ({"schedule": "rising"}, "got 'rising'"),
        ({"start": "zero"}, "got 'zero'"),
        ({"num_members": 0}, r"num_members .*got 0"),
    ],
)
def test_invalid_options_are_refused(fields, message):
    with pytest.raises(EnfoldError, match=message):
        WASH(any_network(), **fields)


def test_the_configuration_selects_the_population_jointly():
    assert WASH(any_network(), 2).configure(TrainConfig()).select == "last"
    with pytest.raises(EnfoldError, match=r"patience .*got 2"):
        WASH(any_network(), 2).configure(TrainConfig(patience=2))


def accuracy(network: nn.Module, data: Data) -> float:
    return float((network.eval()(data.test.inputs).argmax(-1) == data.test.labels).float().mean())


@pytest.mark.slow
def test_the_average_is_a_network_where_that_of_independent_members_is_not():
    torch.manual_seed(0)
    inputs = torch.randn(1024, 2)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    data = Data(Split(inputs[:512], labels[:512]), [], Split(inputs[512:], labels[512:]), 2, (2,))
    network = MLP(2, [16, 16], 2)
    plan = TrainConfig(epochs=10, batch_size=16, lr=0.03, weight_decay=0.0, select="last")
    independent = DeepEnsemble(network, 4)
    fit(independent, data, config=plan, quiet=True)
    washed = fitted(WASH(network, 4, probability=0.05), data, plan)
    mean = accuracy(average(washed, data), data)
    assert accuracy(average(independent, data), data) < 0.85
    assert mean > 0.95
    assert mean > sum(accuracy(member, data) for member in washed) / 4


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_training_resumes_to_the_same_bits_and_is_stored(tmp_path, engine):
    torch.manual_seed(0)
    data, network = three_clouds(64, 16, 8), MLP(4, [8, 8], 3)
    build = partial(WASH, num_members=3, probability=0.1, optimizer_state=True, engine=engine)
    plan = TrainConfig(epochs=4, batch_size=16, lr=0.02)
    complete = fitted(build(network), data, plan)

    def stop(record):
        if record.epoch == 1:
            raise KeyboardInterrupt

    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        fit(build(network), data, config=plan, checkpoint=state, on_epoch=stop, quiet=True)
    resumed = fitted(build(network), data, plan, checkpoint=state)
    torch.testing.assert_close(resumed.state_dict(), complete.state_dict(), rtol=0, atol=0)
    loaded = enfold.load(enfold.save(resumed, tmp_path / "members.safetensors"), network)
    torch.testing.assert_close(loaded(data.test.inputs), resumed(data.test.inputs), rtol=0, atol=0)
    assert loaded.options() == resumed.options()
    assert build.keywords.items() <= loaded.options().items()
