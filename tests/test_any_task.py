"""Every method with every task and every structure of batches, against a loop over deep copies of the members."""

from __future__ import annotations

import copy
import inspect
import math
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import enfold
from enfold import merge
from enfold.analysis.interpolation import interpolate
from enfold.data.batches import Batch
from enfold.distill.losses.kd import KD
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import evaluate, member_logits, predict
from enfold.registry import methods
from enfold.symmetry import permute, symmetries
from enfold.tasks import Regression
from enfold.train.objective import TaskLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # a few steps of tiny networks: members are alike, and more
]

IGNORED = -100
SIZE = 6  # examples in a batch
WIDTH = 8

# Networks: two inputs, x and z, for every task.


class Vector(nn.Module):
    """(B, 5) and (B, 4) -> (B, outputs)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(5, WIDTH), nn.Linear(4, WIDTH)
        self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)
        self.norm: nn.Module = nn.Identity()

    def body(self, x, z):
        hidden = torch.relu(self.first(x) + self.other(z))
        return self.head(torch.relu(self.norm(self.middle(hidden))))


class Dense(nn.Module):
    """(B, 3, 4, 4) and (B, 2, 4, 4) -> (B, outputs, 4, 4)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.other = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(2, WIDTH, 1)
        self.middle, self.head = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, outputs, 1)
        self.norm: nn.Module = nn.Identity()

    body = Vector.body


class Tokens(nn.Module):
    """Indices (B, T) and a mask (B, T) -> (B, T, outputs)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)
        self.norm: nn.Module = nn.Identity()

    def body(self, x, z):
        hidden = self.words(x) * z[..., None]
        context = hidden.sum(1, keepdim=True) / z.sum(1)[:, None, None]
        return self.head(torch.relu(self.norm(self.middle(torch.relu(self.first(hidden + context))))))


def taking(body: type[nn.Module], structure: str) -> type[nn.Module]:
    """A network that takes its inputs as a loader of this structure yields them."""

    class TakesTwo(body):
        def forward(self, x, z):
            return self.body(x, z)

    class TakesObject(body):
        def forward(self, batch):
            return self.body(batch.x, batch.z)

    return TakesObject if structure == "object" else TakesTwo


# Tasks: the network, inputs and targets, what is passed as task=, and the loss in plain PyTorch.


@dataclass(frozen=True)
class Problem:
    body: type[nn.Module]
    outputs: int
    task: object  # for fit; None is inferred
    loss: object  # (outputs, targets) -> scalar

    def network(self, structure: str = "dict", seed: int = 0, *, norm: bool = False) -> nn.Module:
        torch.manual_seed(seed)
        network = taking(self.body, structure)(self.outputs)
        if norm:
            network.norm = nn.BatchNorm2d(WIDTH) if self.body is Dense else nn.LayerNorm(WIDTH)
        return network


def gaussian_nll(outputs, targets):
    return F.gaussian_nll_loss(outputs[:, 0], targets, outputs[:, 1].exp(), full=True, eps=1e-6)


PROBLEMS = {
    "classes": Problem(Vector, 3, None, F.cross_entropy),
    "dense": Problem(Dense, 3, None, F.cross_entropy),
    "tokens": Problem(Tokens, 3, None, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())),
    "binary": Problem(Vector, 1, None, lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y.float())),
    "multilabel": Problem(Vector, 3, "multilabel", lambda out, y: F.binary_cross_entropy_with_logits(out, y.float())),
    "point": Problem(Vector, 1, "regression", lambda out, y: F.mse_loss(out[:, 0], y)),
    "gaussian": Problem(Vector, 2, Regression(head="gaussian", variance="log"), gaussian_nll),
}


def examples(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, z and y of one batch."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=draw)

    if name == "dense":
        y = integers(3, SIZE, 4, 4)
        y[0, :2] = IGNORED
        return normal(SIZE, 3, 4, 4), normal(SIZE, 2, 4, 4), y
    if name == "tokens":
        length = 4 + seed % 2  # batches are padded to different lengths
        mask = (torch.arange(length) < torch.randint(2, length + 1, (SIZE, 1), generator=draw)).float()
        y = integers(3, SIZE, length).masked_fill(mask == 0, IGNORED)
        return integers(11, SIZE, length), mask, y
    x, z = normal(SIZE, 5), normal(SIZE, 4)
    targets = {
        "classes": integers(3, SIZE),
        "binary": torch.arange(SIZE) % 2,
        "multilabel": integers(2, SIZE, 3).float(),
        "point": x[:, 0] - z[:, 1],
        "gaussian": x[:, 0] - z[:, 1],
    }
    return x, z, targets[name]


# Structures of batches.

Named = namedtuple("Named", ["x", "z", "label"])


@dataclass
class Record:
    x: torch.Tensor
    z: torch.Tensor
    target: torch.Tensor


class Graph:
    """An object that is the input itself, with its target as `y`."""

    def __init__(self, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.z, self.y = x, z, y


STRUCTURES = {
    "tuple": lambda x, z, y: ((x, z), y),
    "two": lambda x, z, y: (x, z, y),
    "dict": lambda x, z, y: {"x": x, "z": z, "labels": y},
    "named": Named,
    "record": Record,
    "object": Graph,
}


def loader(name: str, structure: str = "dict", seeds: tuple[int, ...] = (1, 2)) -> list[object]:
    return [STRUCTURES[structure](*examples(name, seed)) for seed in seeds]


every_task = pytest.mark.parametrize("name", PROBLEMS)
PLAIN = {
    "optimizer": "sgd", "lr": 0.1, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "schedule": "constant",
    "quiet": True,
}  # fmt: skip


def copies(networks: list[nn.Module]) -> list[nn.Module]:
    return [copy.deepcopy(network) for network in networks]


def outputs_of(network: nn.Module, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Call a network of this file with its inputs."""
    return network.body(x, z)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=tolerance)


# Training: every structure with every task, against a loop over deep copies.


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


def shuffled(network: nn.Module, symmetry) -> nn.Module:
    draw = torch.Generator().manual_seed(5)
    orders = {group.name: torch.randperm(group.size, generator=draw) for group in symmetry.groups}
    twin = copy.deepcopy(network)
    twin.load_state_dict(permute(dict(network.state_dict()), symmetry, orders))
    return twin


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
NUMBERS = ("point", "gaussian")
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


# Distillation: every loss with every task.

LOSSES_OF_CLASSES = {
    "ae_kd": "is a loss of logits of classes",
    "end2": "has Dirichlet distributions of classes as its target",
    "proxy_end2": "has Dirichlet distributions of classes as its target",
}
"""Losses that are defined for classes, and are refused for numbers."""


@every_task
@pytest.mark.parametrize("loss", methods("distill"))
def test_every_distillation_loss(loss, name):
    problem, batches = PROBLEMS[name], loader(name)
    teacher = DeepEnsemble([problem.network(seed=seed) for seed in range(2)])
    settings = {"epochs": 1, "lr": 0.01, "task": problem.task, "quiet": True}
    kind = methods("distill")[loss].target
    if loss in LOSSES_OF_CLASSES and name in NUMBERS:
        with pytest.raises(EnfoldError, match="defined for classes"):
            enfold.distill(teacher, batches, loss=kind(), **settings)
        return
    student = enfold.distill(teacher, batches, loss=kind(), **settings)
    x, z, _ = examples(name, 1)
    student.eval()
    outputs = member_logits(student, {"x": x, "z": z})
    assert bool(outputs.isfinite().all())


@pytest.mark.parametrize("perturbation", methods("perturb"))
def test_perturbations_of_two_inputs(perturbation):
    batches, settings = loader("classes"), {"epochs": 1, "quiet": True}
    teacher = DeepEnsemble([PROBLEMS["classes"].network(seed=seed) for seed in range(2)])
    settings["student"] = DeepEnsemble([PROBLEMS["classes"].network(seed=seed) for seed in range(2, 4)])
    perturb = methods("perturb")[perturbation].target()
    if perturbation == "cutmix":
        with pytest.raises(EnfoldError, match=r"perturb.*images"):
            enfold.distill(teacher, batches, perturb=perturb, **settings)
        return
    found = enfold.distill(teacher, batches, perturb=perturb, **settings)
    plain = enfold.distill(teacher, batches, **settings)
    assert not all(torch.equal(*pair) for pair in zip(found.parameters(), plain.parameters(), strict=True))


@every_task
def test_kd_is_the_divergence_from_the_mixture(name):
    """One step of gradient descent with the divergence written out."""
    problem, (x, z, y) = PROBLEMS[name], examples(name, 1)
    networks = [problem.network(seed=seed) for seed in range(2)]
    start = problem.network(seed=7)
    expected = copy.deepcopy(start)
    with torch.no_grad():
        teachers = torch.stack([outputs_of(network, x, z, y) for network in networks])
    loss = divergence(name, outputs_of(expected, x, z, y), teachers, y)
    loss.backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 0.1 * parameter.grad
    student = enfold.distill(
        networks, loader(name, seeds=(1,)), loss=KD(), init=start, epochs=1, select="last", task=problem.task, **PLAIN
    )
    for key, value in expected.state_dict().items():
        assert_close(student.state_dict()[key], value)


def divergence(name, outputs, teachers, y):
    if name == "point":
        return F.mse_loss(outputs, teachers.mean(0))
    if name == "gaussian":
        mean = teachers[..., 0].mean(0)
        variance = teachers[..., 1].exp().mean(0) + teachers[..., 0].var(0, correction=0)
        own, log = outputs[:, 0], outputs[:, 1]
        return ((log - variance.log() - 1 + (variance + (own - mean) ** 2) / log.exp()) / 2).mean()
    if name in ("binary", "multilabel"):
        outputs, teachers = (torch.stack([torch.zeros_like(each), each], dim=-1) for each in (outputs, teachers))
        known = torch.ones(outputs.shape[:-1], dtype=torch.bool)
    else:
        axis = 1 if name == "dense" else -1
        outputs, teachers = outputs.movedim(axis, -1), teachers.movedim(axis if axis < 0 else axis + 1, -1)
        known = y != IGNORED
    target = teachers.softmax(-1).mean(0)
    rows = (target * (target.log() - outputs.log_softmax(-1))).sum(-1)
    return rows[known].mean()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["tokens", "gaussian"])
def test_distillation_takes_every_structure(name, structure):
    problem = PROBLEMS[name]
    networks = [problem.network(structure, seed) for seed in range(2)]
    settings = {"init": networks[0], "epochs": 1, "lr": 0.01, "task": problem.task, "quiet": True}
    found = enfold.distill(networks, loader(name, structure), loss=KD(alpha=0.5), **settings)
    expected = enfold.distill(
        [problem.network("dict", seed) for seed in range(2)],
        loader(name),
        loss=KD(alpha=0.5),
        **{**settings, "init": problem.network("dict", 0)},
    )
    for key, value in expected.state_dict().items():
        assert_close(found.state_dict()[key], value)


# Merges: every one with every task.

SHORT = {
    "straight_through": {"epochs": 1},
    "perm_avg": {"epochs": 2, "quiet": True, "select": "last"},
    "fisher": {"examples": 6},
    "regmean": {"examples": 6},
}
EXACT = (
    "activation_matching", "c2m3", "merge_many", "ot_fusion", "straight_through", "weight_matching", "zipit"
)  # fmt: skip
"""Merges that give back a network from permuted copies of it."""
TASK = ("fisher", "perm_avg", "soup", "straight_through", "task_arithmetic", "wise_ft")
"""Merges that use targets."""


@every_task
@pytest.mark.parametrize("method", methods("merge"))
def test_every_merge(method, name):
    problem, batches = PROBLEMS[name], loader(name, seeds=(1, 2, 3))
    network = problem.network().eval()
    x, z, y = examples(name, 1)
    twin = shuffled(network, symmetries(network, {"x": x, "z": z}))
    function = methods("merge")[method].target
    options = SHORT.get(method, {}) | ({"task": problem.task} if method in TASK else {})
    if "base" in inspect.signature(function).parameters:
        options |= {"base": network}
    if method == "wise_ft":
        options |= {"val": batches}
    if method == "repair":
        found = function(copy.deepcopy(network), [network, twin], batches)
    elif method == "soup":
        found = function([network, copy.deepcopy(network)], batches, batches, **options)
    else:
        found = function([network, twin], batches, **options)
    outputs, expected = outputs_of(found, x, z, y), outputs_of(network, x, z, y)
    assert bool(outputs.isfinite().all())
    if method in EXACT or method in ("repair", "soup"):
        assert_close(outputs, expected, 1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["repair", "rescale", "closed_form", "reset"])
def test_repair_takes_every_structure(kind, structure):
    """Units of the mean of two copies have the statistics of the copies already."""
    network = PROBLEMS["classes"].network(structure).eval()
    found = merge.average([network, copy.deepcopy(network)], loader("classes", structure), repair=kind)
    assert_close(outputs_of(found, *examples("classes", 1)), outputs_of(network, *examples("classes", 1)), 1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batch_norm_statistics_are_measured_for_every_structure(structure):
    networks = [PROBLEMS["dense"].network(structure, seed, norm=True) for seed in range(2)]
    found = merge.average(networks, loader("dense", structure))
    seen = []
    found.norm.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    for seed in (1, 2):
        outputs_of(found, *examples("dense", seed))
    assert_close(found.norm.running_mean, torch.cat(seen).mean((0, 2, 3)))


@every_task
@pytest.mark.parametrize("kind", ["greedy", "learned"])
def test_soups_are_chosen_by_the_task(name, kind):
    problem, batches = PROBLEMS[name], loader(name)
    networks = [problem.network(seed=seed) for seed in range(3)]
    found = merge.soup(
        networks,
        batches,
        kind=kind,
        score=None if kind == "learned" else "nll" if name != "point" else "mse",
        task=problem.task,
    )
    if kind == "greedy":
        criterion = predict(found, batches, task=problem.task).criterion
        best = min(evaluate(network, batches, task=problem.task).scores[criterion] for network in networks)
        assert evaluate(found, batches, task=problem.task).scores[criterion] <= best + 1e-5


@every_task
def test_perm_avg_learns_from_the_members(name):
    problem, batches = PROBLEMS[name], loader(name)
    networks = [problem.network(seed=seed) for seed in range(2)]
    found = merge.perm_avg(networks, batches, batches, alpha=0.5, epochs=1, quiet=True, task=problem.task)
    assert math.isfinite(
        evaluate(found, batches, task=problem.task).scores[predict(found, batches, task=problem.task).criterion]
    )


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
