"""permAVG: right on planted permutations, and each option does what it says."""

from __future__ import annotations

import inspect
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import perm_avg
from enfold.merge.common.permutation_learning import (
    PUBLISHED,
    PermutationOptions,
)
from enfold.merge.common.sinkhorn import softness
from enfold.merge.common.soft import mix_units, nearest_permutations
from enfold.merge.common.soft_permutations import AnnealedObjective
from enfold.merge.common.states import mean_of, states_of
from enfold.networks import MLP
from enfold.progress import replace_titles
from enfold.symmetry import permute, symmetries
from enfold.train import TrainConfig, cross_entropy, fit
from enfold.train.objective import StepContext
from soft_averages import SHORT, learned


def planted(order: list[int]) -> tuple[DeepEnsemble, Data]:
    """A network, and the same with its hidden units in another order and a little noise; labels are the network's."""
    generator = torch.Generator().manual_seed(1)

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 3))

    first, second = network(), network()
    with torch.no_grad():
        for parameter, scale in zip(first.parameters(), (1.5, 0.5, 1.5, 0.0), strict=True):
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    inputs = torch.randn(256, 6, generator=generator)
    part = Split(inputs, first(inputs).argmax(1))
    symmetry = symmetries(first, inputs[:2])
    state = permute(dict(first.named_parameters()), symmetry, {symmetry.groups[0].name: torch.tensor(order)})
    noisy = {name: t.detach() + 0.01 * torch.randn(t.shape, generator=generator) for name, t in state.items()}
    second.load_state_dict(noisy)
    return DeepEnsemble([first, second]), Data(part, part, part, 3, (6,))


@pytest.mark.parametrize(
    ("order", "said"),
    [("sequential", ["members 1 to 2", "member 3 is added", "member 4 is added"]), ("joint", ["members 1 to 4"])],
)
def test_stages_name_the_learned_members(order, said, capsys):
    _, data = planted([1, 0, 2])
    members = DeepEnsemble([MLP(6, [3], 3) for _ in range(4)])
    with replace_titles("seed 0: merge"):
        perm_avg(members, data, config=SHORT.replace(epochs=1), order=order)
    titles = [line.split(" 100 %")[0] for line in capsys.readouterr().err.splitlines()]
    assert titles == [f"seed 0: merge, {part}" for part in said]


LONGER = PUBLISHED.replace(epochs=40, batch_size=256, schedule="constant", select="last")


def accuracy(logits: Tensor, data: Data) -> float:
    return float((logits.argmax(-1) == data.test.labels).float().mean())


@pytest.mark.parametrize("order", [[1, 0, 2], [1, 2, 0]], ids=["odd", "even"])
def test_a_planted_permutation_is_found_by_matching_and_preserved(order):
    members, data = planted(order)
    model = learned(partial(perm_avg, config=LONGER, iterations=20, matched=10.0), members, data)
    assert model.all_matrices()[0][0].argmax(1).tolist() == torch.tensor(order).argsort().tolist()
    assert float(softness(model.all_matrices()[0]).max()) < 0.5
    naive = members.network(members.mean_state())
    assert accuracy(model(data.test.inputs)[0], data) > max(0.95, accuracy(naive(data.test.inputs), data))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"gradient": "implicit", "warm": True}], ids=str)
def test_learning_from_the_identity_beats_its_start_and_the_plain_average(settings):
    members, data = planted([1, 2, 0])
    fold = partial(perm_avg, config=LONGER, iterations=20, **settings)
    start = partial(fold, config=LONGER.replace(epochs=0))
    naive = members.network(members.mean_state())(data.test.inputs)
    losses = [
        float(F.cross_entropy(logits, data.test.labels).detach())
        for logits in (fold(members, data)(data.test.inputs), start(members, data)(data.test.inputs), naive)
    ]
    assert losses[0] < 0.9 * min(losses[1:])


def test_hard_permutations_have_their_transpose_as_inverse():
    members, data = planted([1, 2, 0])
    found = {}
    for inverse in ("exact", "transpose", "none"):
        model = learned(partial(perm_avg, config=SHORT.replace(epochs=0), inverse=inverse, matched=40.0), members, data)
        matrix = model.all_matrices()[0][0]
        torch.testing.assert_close(matrix, nearest_permutations(matrix[None])[0], rtol=0, atol=1e-6)
        found[inverse] = model(data.test.inputs)[0].detach()
    torch.testing.assert_close(found["transpose"], found["exact"], rtol=1e-4, atol=1e-4)
    assert float((found["none"] - found["exact"]).abs().max()) > 0.1


@pytest.mark.parametrize("members", ["plain"], indirect=True)
def test_a_random_start_follows_the_seed_and_not_the_stage(members, data):
    def start(seed: int, count: int, order: str) -> Tensor:
        config = SHORT.replace(epochs=0, seed=seed)
        model = learned(partial(perm_avg, config=config, start="random", order=order), members[:count], data)
        return model.all_matrices()[0]

    joint = start(0, 3, "joint")
    torch.testing.assert_close(joint, start(0, 3, "sequential"), rtol=0, atol=1e-4)
    torch.testing.assert_close(joint[:1], start(0, 2, "joint"), rtol=0, atol=1e-4)
    assert float((joint[0] - joint[1]).abs().max()) > 0.01
    assert float((joint - start(1, 3, "joint")).abs().max()) > 0.01
    assert float((joint[0] - joint[0].T).abs().max()) > 0.01  # C = I would be symmetric


@pytest.mark.parametrize("members", ["plain"], indirect=True)
def test_sequential_stages_begin_at_the_published_start(members, data):
    model = learned(partial(perm_avg, config=SHORT.replace(epochs=0)), members[:3], data)
    (matrices,), size = model.all_matrices(), 6
    expected = (torch.eye(size) * (math.e - 1) + 1) / (math.e - 1 + size)  # S(I) in closed form
    assert model.num_settled == 1
    torch.testing.assert_close(matrices, expected.expand(2, -1, -1), rtol=1e-5, atol=1e-6)


def test_odd_permutations_cannot_be_reached_from_the_identity():
    members, data = planted([1, 0, 2])
    (matrices,) = learned(partial(perm_avg, config=LONGER, iterations=20), members, data).all_matrices()
    assert float(torch.linalg.det(matrices[0])) > 0


def test_the_published_settings_are_the_defaults():
    parameters = inspect.signature(perm_avg).parameters
    for name, value in {
        "temperature": 1.0,
        "iterations": 100,
        "matched": None,
        "start": "identity",
        "inverse": "exact",
        "gradient": "unrolled",
        "order": "sequential",
        "alpha": 0.0,
        "ridge": 0.0,
        "warm": False,
        "mixing": "equal",
        "universe": False,
        "gain": False,
        "project": False,
        "final_temperature": None,
        "config": None,
    }.items():
        assert parameters[name].default == value, name
    plan = PUBLISHED
    assert (plan.weight_decay, plan.label_smoothing, plan.clip_norm) == (0.0, 0.0, None)
    assert (plan.epochs, plan.optimizer, plan.lr, plan.schedule) == (20, "adam", 0.1, "cosine")
    assert PermutationOptions().config == plan


def test_equal_members_are_returned_unchanged(members, data):
    expected = members.member(1).state_dict()
    for given in (members[[1]], DeepEnsemble([members.member(1)] * 3)):
        found = perm_avg(given, data).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_members_are_the_same_in_order_and_jointly(members, data):
    one, other = (perm_avg(members[:2], data, order=order, config=SHORT) for order in ("sequential", "joint"))
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name])


def test_members_are_added_sequentially_with_fixed_permutations(members, data):
    short, longer = (learned(partial(perm_avg, config=SHORT), members[:count], data) for count in (2, 3))
    for first, both in zip(short.all_matrices(), longer.all_matrices(), strict=True):
        assert both.shape[0] == 2
        torch.testing.assert_close(both[:1], first)
    assert longer.get_buffer("weights").tolist() == [1 / 3] * 3
    universe = learned(partial(perm_avg, config=SHORT, universe=True), members[:3], data)
    assert [len(each) for each in universe.all_matrices()] == [3]
    joint = learned(partial(perm_avg, config=SHORT, order="joint"), members, data)
    assert joint.learned == 3


def test_a_universe_aligns_the_first_member_too(members, data):
    fold = partial(perm_avg, config=SHORT, universe=True, order="joint", matched=2.0)
    model = learned(fold, members[:3], data)
    states = states_of(members[:3])
    mixed_ones = [
        mix_units(state, model.groups, [each[index] for each in model.all_matrices()])
        for index, state in enumerate(states)
    ]
    expected = mean_of(mixed_ones)
    for name, parameter in fold(members[:3], data).named_parameters():  # statistics are measured
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5)
    assert len(model.scores[0]) == 3
    assert not torch.allclose(model.scores[0][0], 2 * torch.eye(6)), "the first member's are learned too"


def test_it_resumes_in_a_later_stage_to_the_same_bits(members, data, tmp_path, monkeypatch):
    fold = partial(perm_avg, config=SHORT, gain=True, final_temperature=0.5, mixing="dirichlet")
    expected = fold(members, data)
    file = tmp_path / "fold.safetensors"
    true, calls = AnnealedObjective.for_batch, iter(range(1000))

    def stopped(*args):
        if next(calls) == 16:  # 3 batches an epoch, 2 epochs a stage: in the last epoch of the last stage
            raise KeyboardInterrupt
        return true(*args)

    monkeypatch.setattr(AnnealedObjective, "for_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        fold(members, data, checkpoint=file)
    monkeypatch.setattr(AnnealedObjective, "for_batch", true)
    assert file.exists()
    found = fold(members, data, checkpoint=file)
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["fold.safetensors"]
    with pytest.raises(EnfoldError, match="loss"):
        partial(fold, temperature=0.9)(members, data, checkpoint=file)


@pytest.mark.parametrize("members", ["plain"], indirect=True)
def test_temperature_and_weights_follow_the_training(members, data):
    model = learned(partial(perm_avg, config=SHORT), members[:3], data).train()
    inputs = data.test.inputs
    torch.testing.assert_close(model(inputs), model.eval()(inputs))  # nothing is drawn yet
    model.train()
    steps = AnnealedObjective(cross_entropy(), "", 3, (1.0, 0.1), "dirichlet")
    drawn = []
    for progress in (0.0, 0.5, 1.0):
        steps.for_batch(model, None, StepContext(int(10 * progress), progress))
        assert float(model.get_buffer("temperature")) == pytest.approx(0.1**progress)
        drawn.append(model.drawn)
    assert all(sum(weights) == pytest.approx(1.0) and min(weights) > 0 for weights in drawn)
    assert drawn[0] != drawn[1]
    training = model(inputs)
    assert not torch.allclose(model.eval()(inputs), training)  # in eval mode members count alike


@pytest.mark.parametrize("members", ["plain", "normed"], indirect=True)
def test_a_projection_averages_permuted_members(members, data):
    members = members[:2]
    network = perm_avg(members, data, config=SHORT, project=True, repair="none")
    (first, second), folded = members.networks(), network.inner.weight.detach()
    order = torch.cdist(2 * folded - first.inner.weight.detach(), second.inner.weight.detach()).argmin(1)
    assert sorted(order.tolist()) == list(range(6))
    torch.testing.assert_close(folded, (first.inner.weight + second.inner.weight[order]).detach() / 2)
    torch.testing.assert_close(
        network.head.weight.detach(), (first.head.weight + second.head.weight[:, order]).detach() / 2
    )


@pytest.mark.parametrize("members", ["plain"], indirect=True)
def test_a_projection_includes_fixed_matrices(members, data):
    fold, given = partial(perm_avg, config=SHORT, project=True), members[:3]
    model = learned(fold, given, data)
    (matrices,) = model.all_matrices()
    assert model.num_settled == 1
    assert float(softness(matrices).min()) > 0.5
    first, *others = states_of(given)
    hard = nearest_permutations(matrices)
    expected = mean_of([first, *(mix_units(one, model.groups, [each]) for one, each in zip(others, hard, strict=True))])
    for name, parameter in fold(given, data).named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("members", ["plain"], indirect=True)
def test_gains_are_preserved_when_a_member_is_added(members, data, monkeypatch):
    gains = []

    def spied(model, *given, **settings):
        gains.append(model.gains[0].detach().clone())
        fit(model, *given, **settings)
        gains.append(model.gains[0].detach().clone())

    monkeypatch.setattr("enfold.merge.common.permutation_learning.fit", spied)
    learned(partial(perm_avg, config=SHORT, gain=True), members[:3], data)
    start, settled, taken, end = gains
    torch.testing.assert_close(start, torch.ones(6))
    assert torch.equal(taken, settled)
    assert all(float((one - other).abs().max()) > 0.01 for one, other in ((start, settled), (taken, end)))


def test_gains_are_learned_and_scale_outputs(members, data):
    model = learned(partial(perm_avg, config=SHORT, gain=True), members[:2], data)
    assert float((model.gains[0].detach() - 1).abs().max()) > 0.01
    with torch.no_grad():
        model.gains[0].fill_(2.0)
        doubled = model.average(model.matrices())
        model.gains[0].fill_(1.0)
        plain = model.average(model.matrices())
    torch.testing.assert_close(doubled["inner.weight"], plain["inner.weight"])
    torch.testing.assert_close(doubled["head.weight"], 2 * plain["head.weight"])


def test_it_learns_from_the_ensemble(members, data):
    alone, taught = (perm_avg(members, data, config=SHORT, alpha=a) for a in (0.0, 1.0))
    assert not torch.equal(alone(data.test.inputs), taught(data.test.inputs))


@pytest.mark.parametrize("members", ["plain"], indirect=True)
def test_a_step_follows_the_gradient_of_the_mixed_loss(members, data):
    """One step of plain SGD on all data is the slope of the loss, which is written out here."""
    plan = TrainConfig(epochs=1, batch_size=40, optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.0)
    fold, pair = partial(perm_avg, config=plan.replace(schedule="constant", select="last"), alpha=0.3), members[:2]
    start = learned(partial(fold, config=plan.replace(epochs=0)), pair, data)
    logits, teacher = start(data.train.inputs)[0], pair(data.train.inputs).detach().softmax(-1).mean(0)
    ensembles = F.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")
    loss = 0.7 * F.cross_entropy(logits, data.train.labels) + 0.3 * ensembles
    (slope,) = torch.autograd.grad(loss, start.scores[0])
    expected = start.scores[0].detach() - 0.1 * slope
    torch.testing.assert_close(learned(fold, pair, data).scores[0].detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("members", ["plain"], indirect=True)
@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_equal_members_share_a_permutation(members, data, order):
    fold, given = (
        partial(perm_avg, config=SHORT, order=order),
        DeepEnsemble([members.member(index) for index in (0, 1, 1, 0, 0, 2)]),
    )
    model, (first, second, third) = learned(fold, given, data), states_of(members[:3])
    (matrices,) = model.all_matrices()
    assert len(matrices) == 2
    second, third = mix_units(second, model.groups, matrices[:1]), mix_units(third, model.groups, matrices[1:])
    expected = mean_of([first, second, second, first, first, third])
    for name, parameter in fold(given, data).named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-5)
