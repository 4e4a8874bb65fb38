"""Every method with every task and every structure of batches, against a loop over deep copies of the members."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from torch import nn

import enfold
from any_task import (
    NUMBERS,
    PLAIN,
    PROBLEMS,
    STRUCTURES,
    WIDTH,
    Graph,
    assert_close,
    every_task,
    examples,
    loader,
    outputs_of,
    shuffled,
)
from enfold import merge
from enfold.analysis.interpolation import interpolate
from enfold.data.batches import Batch
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import evaluate, member_logits, predict
from enfold.registry import methods
from enfold.symmetry import symmetries
from enfold.train.objective import TaskLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # a few steps of tiny networks: members are alike, and more
]


def copies(networks: list[nn.Module]) -> list[nn.Module]:
    return [copy.deepcopy(network) for network in networks]


# Training: every structure with every task, against a loop over deep copies.


@pytest.mark.combinations
@every_task
@pytest.mark.parametrize("structure", STRUCTURES)
def test_fit_is_a_loop_over_deep_copies(name, structure):
    problem, seeds = PROBLEMS[name], (1, 2)
    networks = [problem.network(structure, seed) for seed in range(2)]
    expected = copies(networks)
    for network in expected:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for seed in seeds:
            batch = examples(name, seed)
            optimizer.zero_grad()
            problem.loss(outputs_of(network, *batch), batch[-1]).backward()
            optimizer.step()

    ensemble = DeepEnsemble(networks)
    history = enfold.fit(ensemble, loader(name, structure), epochs=1, select="last", task=problem.task, **PLAIN)
    for index, network in enumerate(expected):
        found = ensemble.member(index).state_dict()
        for key, value in network.state_dict().items():
            assert_close(found[key], value)
    assert all(math.isfinite(loss) for loss in history.epochs[-1].train_loss)

    val = loader(name, structure, (3,))
    own = predict(ensemble, val, task=problem.task)
    row = evaluate(ensemble, val, loader(name, structure, (4,)), task=problem.task)
    assert own.num_members == 2
    assert math.isfinite(row.scores[own.criterion])

    student = merge.average(ensemble, loader(name, structure))
    for key, value in student.state_dict().items():
        assert_close(value, torch.stack([network.state_dict()[key] for network in expected]).mean(0))


@pytest.mark.combinations
@every_task
@pytest.mark.parametrize("structure", STRUCTURES)
def test_symmetry_and_matching(name, structure):
    """A permuted copy of a network is found to be the same network."""
    network, batches = PROBLEMS[name].network(structure).eval(), loader(name, structure)
    inputs = enfold.data.unpack.unpack_batch(batches[0], None, 1 if structure == "object" else 2).inputs
    symmetry = symmetries(network, inputs)
    assert sorted(group.size for group in symmetry.groups) == [WIDTH] * len(symmetry.groups)
    assert len(symmetry.groups) >= 2
    twin = shuffled(network, symmetry)
    assert_close(outputs_of(twin, *examples(name, 1)), outputs_of(network, *examples(name, 1)))
    for options in ({"example": inputs}, {"train": batches}):
        found = merge.weight_matching([network, twin], **options)
        for key, value in network.state_dict().items():
            assert_close(found.state_dict()[key], value)


# Ensembles: every method with every task.

SETTINGS = {
    "hyper_deep_ensemble": {"candidates": 2, "stratify": False},
    "mc_dropout": {"inject": 0.1},
    "mimo": {"first_layer": "first", "last_layer": "head"},
    "multi_head": {"split": "head"},
    "masksembles": {"min_features": 4},
    "subspace_sampling": {"fitted": 2},
    "swa": {"num_members": 1},
}
REFUSED = {
    "boosting": "must be tensors or a Dataset",
    "bagging": "bootstrap needs a separate order of the examples",
    "hyper_batch_ensemble": "must be examples in memory",
    "mimo": "joins the inputs of its members to one tensor",
}
"""Methods that do not train from a loader of dictionaries, and the reason in the error."""
CLASSES_ONLY = {
    "dice": "compares examples of one class",
    "boosting": "weighs examples by errors of classification",
    "hyper_deep_ensemble": "selects candidates by predictions of classes",
}
"""Methods for tasks of classes, and the reason in the error for others."""


def make_ensemble(method: str, network: nn.Module) -> nn.Module:
    target = methods("ensemble")[method].target
    options = {"num_members": 2, "seed": 0} | SETTINGS.get(method, {})
    known = inspect.signature(target).parameters
    return target(network, **{key: value for key, value in options.items() if key in known})


@pytest.mark.combinations
@every_task
@pytest.mark.parametrize("method", methods("ensemble"))
def test_every_ensemble(method, name):
    problem, batches = PROBLEMS[name], loader(name)
    ensemble = make_ensemble(method, problem.network(norm=method == "film_ensemble"))
    settings = {**PLAIN, "lr": 0.01, "epochs": 4, "task": problem.task}
    reason = (CLASSES_ONLY.get(method) if name in NUMBERS else None) or REFUSED.get(method)
    if reason is not None:
        before = copy.deepcopy(ensemble.state_dict())
        with pytest.raises(EnfoldError, match=reason):
            enfold.fit(ensemble, batches, batches, **settings)
        assert all(torch.equal(before[key], value) for key, value in ensemble.state_dict().items())
        return
    enfold.fit(ensemble, batches, batches, **settings)
    assert math.isfinite(evaluate(ensemble, batches).scores[predict(ensemble, batches).criterion])
    x, z, y = examples(name, 1)
    prediction = ensemble.predict(x=x, z=z)
    assert bool(prediction.mean.isfinite().all())
    if not ensemble.is_expandable:
        return
    ensemble.eval()
    assert_equal_to_loop(ensemble, problem, x, z, y)


def assert_equal_to_loop(ensemble, problem, x, z, y) -> None:
    """Outputs, losses and gradients of one step are those of deep copies of the members."""
    networks = [network.eval() for network in ensemble.networks()]
    outputs = member_logits(ensemble, {"x": x, "z": z})
    expected = [outputs_of(network, x, z, y) for network in networks]
    assert_close(outputs, torch.stack(expected))
    losses = TaskLoss(problem.task)(ensemble, Batch({"x": x, "z": z}, y))
    own = [problem.loss(each, y) for each in expected]
    assert_close(losses, torch.stack(own))
    # The gradients of the copies, pulled back to the parameters of the ensemble.
    parameters = [parameter for parameter in ensemble.parameters() if parameter.requires_grad]
    if not losses.requires_grad:  # members are statistics of a training
        return
    found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
    state = {key: value for key, value in ensemble.expand().items() if value.requires_grad}
    for network in networks:
        network.requires_grad_()
    own = [problem.loss(outputs_of(network, x, z, y), y) for network in networks]
    gradients = []
    for network, loss in zip(networks, own, strict=True):
        named = dict(network.named_parameters())
        values = torch.autograd.grad(loss, [named[key] for key in state], allow_unused=True)
        gradients.append(
            [torch.zeros_like(named[key]) if v is None else v for key, v in zip(state, values, strict=True)]
        )
    stacked = [torch.stack(each) for each in zip(*gradients, strict=True)]
    wanted = torch.autograd.grad(list(state.values()), parameters, stacked, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        zero = torch.zeros(())
        assert_close(
            zero if one is None else one,
            torch.zeros_like(one) if other is None and one is not None else zero if other is None else other,
        )


def plain_network(name: str, outputs: int) -> nn.Module:
    """A network of one tensor."""
    torch.manual_seed(0)
    if name == "dense":
        return nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv2d(WIDTH, outputs, 1))
    return nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


@pytest.mark.combinations
@every_task
@pytest.mark.parametrize("method", REFUSED)
def test_methods_for_tensors_in_memory(method, name):
    """Methods that take no loader of dictionaries train on tensors for every task."""
    problem, (x, _, y) = PROBLEMS[name], examples(name, 1)
    x = torch.randn(*x.shape, 5) if name == "tokens" else x
    network = plain_network(name, problem.outputs)
    ensemble = methods("ensemble")[method].target(network, num_members=2, seed=0)
    settings = {"epochs": 8, "batch_size": 3, "lr": 0.05, "task": problem.task, "quiet": True}
    if method == "boosting" and name not in ("classes", "binary"):
        with pytest.raises(EnfoldError, match=r"one class for each example|errors of classification"):
            enfold.fit(ensemble, (x, y), (x, y), **settings)
        return
    with torch.no_grad():
        start = problem.loss(member_logits(ensemble, x).mean(0), y)
    enfold.fit(ensemble, (x, y), (x, y), **settings)
    outputs = member_logits(ensemble, x)
    assert outputs.shape[1:] == network(x).shape
    assert problem.loss(outputs.mean(0), y) < start
    assert bool(ensemble.predict(x).mean.isfinite().all())


# Cost and analyses.


@every_task
def test_flops(name):
    network, (x, z, _) = PROBLEMS[name].network(), examples(name, 1)
    one, two = (enfold.cost.flops(each, {"x": x, "z": z}) for each in (network, DeepEnsemble([network, network])))
    assert two == 2 * one > 0


def test_cost():
    network, (x, z, _) = PROBLEMS["tokens"].network(), examples("tokens", 1)
    models = {"one": network, "two": DeepEnsemble([network, network])}
    found = enfold.measure(models, "one", {"x": x[0], "z": z[0]}, batch_sizes=(1, 3), rounds=1, warmup=0)
    assert found["two"].flops == 2 * found["one"].flops > 0
    assert found["one"].peak_memory > 0


def test_cost_of_a_network_that_takes_an_object():
    network, (x, z, y) = PROBLEMS["classes"].network("object"), examples("classes", 1)
    by_size = enfold.measure(
        {"one": network}, "one", lambda size: Graph(x[:size], z[:size], y[:size]), batch_sizes=(2,), rounds=1
    )
    assert by_size["one"].flops == enfold.cost.flops(PROBLEMS["classes"].network(), (x, z))
    with pytest.raises(EnfoldError, match="example"):
        enfold.measure({"one": network}, "one", Graph(x[0], z[0], y[0]), batch_sizes=(2,), rounds=1)
    with pytest.raises(EnfoldError, match="examples"):
        enfold.cost.flops(network, Graph(x, z, y))


@every_task
def test_analyses_of_weights_need_classes(name):
    problem, batches = PROBLEMS[name], loader(name)
    first, second = (problem.network(seed=seed) for seed in range(2))
    if name in ("multilabel", *NUMBERS):
        with pytest.raises(EnfoldError):
            interpolate(first, first, second, batches, points=3)
        return
    line = interpolate(first, first, second, batches, points=3)
    outputs, targets = zip(
        *((outputs_of(second, *examples(name, seed)), examples(name, seed)[-1]) for seed in (1, 2)), strict=True
    )
    if name not in ("tokens", "dense"):  # whose batches have different numbers of targets
        expected = torch.stack([problem.loss(each, y) for each, y in zip(outputs, targets, strict=True)]).mean()
        assert_close(line.loss[0].float(), expected)


def test_models_of_other_inputs_are_refused_by_name():
    with pytest.raises(EnfoldError, match="example"):
        symmetries(PROBLEMS["classes"].network(), {"x": "text"})
    with pytest.raises(EnfoldError, match="score"):
        merge.soup(
            [PROBLEMS["point"].network(seed=k) for k in range(2)], loader("point"), score="accuracy", task="regression"
        )
