"""Every distillation loss and every merge, for every task and several inputs."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
import torch.nn.functional as F

import enfold
from any_task import (
    IGNORED,
    NUMBERS,
    PLAIN,
    PROBLEMS,
    STRUCTURES,
    assert_close,
    every_task,
    examples,
    loader,
    outputs_of,
    shuffled,
)
from enfold import merge
from enfold.distill.losses.kd import KD
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import evaluate, member_logits, predict
from enfold.registry import methods
from enfold.symmetry import symmetries

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a few steps of tiny networks: members are similar

LOSSES_OF_CLASSES = {
    "ae_kd": "is a loss of logits of classes",
    "end2": "has Dirichlet distributions of classes as its target",
    "proxy_end2": "has Dirichlet distributions of classes as its target",
}


"""Losses that are defined for classes, and are refused for numbers."""


@pytest.mark.combinations
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
    if perturbation in ("cutmix", "cutmix_mixup"):
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


@pytest.mark.combinations
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


@pytest.mark.combinations
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


@pytest.mark.combinations
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
