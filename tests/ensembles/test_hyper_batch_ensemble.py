"""Hyper-batch ensembles: the equations written out, the penalties' distributions, tuning, resuming."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from torch import nn

import enfold
from clouds import three_clouds
from enfold.data.batches import Batch
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.common.layer_shapes import layer_shape
from enfold.ensembles.common.penalties import Penalised, Penalties, by_output, entropy, mean, penalty_groups, sample
from enfold.ensembles.hyper_batch_ensemble import HyperBatchEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import nll
from enfold.networks import MLP
from enfold.train import TrainConfig, cross_entropy, fit
from fitting import any_network, fitted

DATA = three_clouds(96, 64, 60)
PLAN = TrainConfig(epochs=3, batch_size=16, lr=0.02, select="last")
EMBEDDED = partial(
    HyperBatchEnsemble, num_members=3, embedding_spread=0.5
)  # so that λ makes a difference before training


def network():
    torch.manual_seed(0)
    return MLP(4, [8], 3)


def toy(limits=(0.1, 100.0)):
    return Penalties(2, {"weight": 3, "bias": 3}, {"weight": 4, "bias": 5}, limits, 0.2, 0.5, 0)


# The distributions


@settings(max_examples=25, deadline=None)
@given(low=st.floats(-3, 3), width=st.floats(1e-3, 5))
def test_mean_and_entropy_are_those_of_numerical_integration(low, width):
    bounds = torch.tensor([low, low + width], dtype=torch.float64)
    start, end = math.exp(low), math.exp(low + width)
    density = lambda x: 1 / (x * width)  # noqa: E731
    assert quad(density, start, end)[0] == pytest.approx(1)
    assert float(mean(bounds)) == pytest.approx(quad(lambda x: x * density(x), start, end)[0], rel=1e-6)
    expected = quad(lambda x: -density(x) * math.log(density(x)), start, end)[0]
    assert float(entropy(bounds)) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_draws_fill_the_distribution_log_uniformly_and_a_narrow_one_has_a_mean():
    bounds = torch.tensor([[0.0], [2.0]])
    values = sample(bounds, torch.linspace(0, 1, 5)[:, None])[:, 0]
    torch.testing.assert_close(values, torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0]).exp())
    torch.testing.assert_close(mean(torch.tensor([2.0, 2.0 + 1e-5])), torch.tensor(math.exp(2.0)), rtol=1e-4, atol=0)
    drawn = toy().draw(500)
    assert drawn.shape == (2, 500, 2)
    low, high = toy().bounds.exp()
    assert bool(((drawn >= low[:, None] - 1e-4) & (drawn <= high[:, None] + 1e-4)).all())


def test_bounds_start_around_the_mean_of_the_range_and_members_are_the_first_of_more():
    centre = (100 - 0.1) / math.log(1000)
    low, high = toy().bounds.exp()
    torch.testing.assert_close((low + high) / 2, torch.full((2, 2), centre), rtol=0, atol=0.1)
    torch.testing.assert_close(high - low, torch.full((2, 2), 0.4), rtol=1e-3, atol=1e-3)
    more = Penalties(5, {"weight": 3, "bias": 3}, {"weight": 4, "bias": 5}, (0.1, 100.0), 0.2, 0.5, 0)
    assert torch.equal(more.bounds[:, :2], toy().bounds)


def test_tuning_is_adam_and_stays_in_the_range():
    penalties, source = toy(), torch.Generator()
    reference = nn.Parameter(penalties.bounds.clone())
    optimizer = torch.optim.Adam([reference], lr=0.01)
    for step in range(5):
        penalties.tune(lambda: penalties.current.square().sum(), source.manual_seed(step), 0.1, 0.01)
        place = torch.rand(2, 2, generator=source.manual_seed(step))
        optimizer.zero_grad()
        (sample(reference, place).square().sum() - 0.1 * entropy(reference).mean()).backward()
        optimizer.step()
    torch.testing.assert_close(penalties.bounds, reference.detach())
    for _ in range(30):  # far more than the range is wide, downwards
        penalties.tune(lambda: penalties.current.sum(), source, 0.0, 10.0)
        low, high = penalties.bounds
        assert bool((low >= math.log(0.1)).all())
        assert bool((high <= math.log(100) + 1e-6).all())
        assert bool((high > low).all())
    assert bool(torch.isfinite(entropy(penalties.bounds)).all())
    assert penalties.current is None


def test_layers_form_six_groups():
    names = [f"{index}." for index in range(8)]
    groups = penalty_groups(names)
    assert [groups[f"{name}weight"] for name in names] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert [groups[f"{name}bias"] for name in names] == [0, 1, 1, 2, 2, 3, 3, 5]
    assert penalty_groups([""]) == {"weight": 4, "bias": 5}
    assert penalty_groups(["a.", "b."]) == {"a.weight": 0, "a.bias": 0, "b.weight": 4, "b.bias": 5}
    members = HyperBatchEnsemble(MLP(4, [8, 8], 3), 2)
    assert members.distribution.bounds.shape == (2, 2, 4)  # no second and third group of hidden layers
    assert sorted(set(members.distribution.groups.values())) == [0, 1, 2, 3]


# The equations


@pytest.mark.parametrize("bias", ["member", "shared_post", "shared_pre"])
def test_without_embedding_it_is_batch_ensemble(bias):
    source, inputs = network(), torch.randn(6, 4)
    members = HyperBatchEnsemble(source, 3, bias=bias, embedding_spread=0.0)
    expected = BatchEnsemble(source, 3, bias=bias, spread=0.75)
    torch.testing.assert_close(members.expand(), expected.expand(), rtol=0, atol=0)
    torch.testing.assert_close(members.eval()(inputs), expected.eval()(inputs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(members.train()(inputs), expected.train()(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 6), (4,)),
        (nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 6, 6)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2), (4, 5, 5)),
    ],
)
def test_a_layer_is_equations_1_and_2(layer, shape, tied):
    members = HyperBatchEnsemble(layer, 2, embedding_spread=0.5, tied=tied).eval()
    with torch.no_grad():
        members.delta.state()["bias"].normal_()
    inputs, fast = torch.randn(3, *shape), members.fast.state()
    axes = (-1, *(1,) * (len(shape) - 1))
    scaled = (mean(members.distribution.bounds).log() - math.log(0.1)) / math.log(1000)  # (M, H)
    rows = members.distribution.embedding.state()
    delta = members.delta.state()

    def plain(weight, values):
        return torch.func.functional_call(layer, {"weight": weight, "bias": torch.zeros(6)}, values)

    for m, outputs in enumerate(members(inputs)):
        r, s = fast["r"][0, m].view(axes), fast["s"][0, m].view(axes)
        u, v = (r, s) if tied else (fast["u"][0, m].view(axes), fast["v"][0, m].view(axes))
        e1, e2 = (scaled[m] @ rows["weight"]).view(axes), (scaled[m] @ rows["bias"]).view(axes)
        answer = s * plain(layer.weight, r * inputs) + e1 * v * plain(delta["weight"], u * inputs)
        expected = answer + layer.bias.view(axes) + e2 * delta["bias"][m].view(axes)
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


def test_embedding_layers_are_scaled_along_their_outputs():
    members = HyperBatchEnsemble(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), 2, embedding_spread=0.5)
    e, s = members.distribution.embed()["0.weight"], members.fast.state()["0.s"][0]
    W, D = members.shared.state()["0.weight"], members.delta.state()["0.weight"]
    expected = torch.stack([W * s[m] + D * (s[m] * e[m]) for m in range(2)])
    torch.testing.assert_close(members.expand()["0.weight"], expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 6),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ConvTranspose1d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(4, 6, 3),
        nn.Embedding(5, 6),
    ],
)
def test_the_penalty_in_three_terms_is_the_direct_expectation(layer):
    members = HyperBatchEnsemble(layer, 3, embedding_spread=0.5)
    with torch.no_grad():
        for tensor in (*members.delta.parameters(), *members.own.parameters()):
            tensor.normal_()
    values, shape = members.distribution.draw(7), layer_shape(layer)  # a toy batch of 7
    kinds, total = members.distribution.groups, torch.zeros(3)
    for draw in range(7):
        e = members.distribution.embed(values[:, draw])
        ones = torch.ones(1, 3, shape.inputs) if shape.inputs else None
        weights = members.shared.state()["weight"] + members.delta.state()["weight"] * shape.factor(
            ones, e["weight"][None]
        )
        total += values[:, draw, kinds["weight"]] * weights.square().flatten(1).sum(1) / 7
        if "bias" in kinds:
            biases = members.own.state()["bias"] + e["bias"] * members.delta.state()["bias"]
            total += values[:, draw, kinds["bias"]] * biases.square().sum(1) / 7
    torch.testing.assert_close(members.penalty(values), total, rtol=1e-4, atol=1e-3)
    assert by_output(layer.weight, 0 if isinstance(layer, nn.Linear | nn.Conv2d) else 1, shape.groups).shape == (6,)


def test_the_objective_adds_the_penalty_of_a_biased_shared_weight():
    for bias in ("member", "shared_post"):
        members = HyperBatchEnsemble(nn.Linear(4, 3), 2, embedding_spread=0.0, bias=bias).train()
        batch = Batch(torch.randn(5, 4), torch.randint(3, (5,)))
        torch.manual_seed(1)
        members.num_examples = 10
        losses = Penalised(cross_entropy())(members, batch)
        torch.manual_seed(1)
        values = members.distribution.draw(5).mean(1)  # (M, H): without embedding the penalty is linear in λ
        weight, own = members.shared.state()["weight"], members.expand()["bias"]
        penalty = values[:, 0] * weight.square().sum() + values[:, 1] * own.square().sum(1)
        plain = torch.stack([F.cross_entropy(logits, batch.targets) for logits in members(batch.inputs)])
        torch.testing.assert_close(losses, plain + penalty / 10)


def test_in_training_the_loss_is_taken_at_drawn_penalties_and_elsewhere_at_the_mean():
    members = EMBEDDED(network()).train()
    inputs = torch.randn(5, 4)
    at_mean = members(inputs)
    with members.distribution.at(torch.full((3, 3), 0.1)):
        assert not torch.allclose(members(inputs), at_mean)
        with torch.no_grad():
            elsewhere = members.eval()(inputs)
    with torch.no_grad():
        torch.testing.assert_close(members(inputs), at_mean)
        assert not torch.allclose(members(inputs), elsewhere)


def test_penalised_parameters_are_not_decayed():
    source = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    members = HyperBatchEnsemble(source, 2, batch_norm="own")
    decayed = {id(p): group for group in members.param_groups(0.1) for p in group["params"]}
    named = {name: decayed[id(parameter)] for name, parameter in members.named_parameters()}
    assert {name for name, group in named.items() if group["weight_decay"]} == {"own.1.weight", "own.1.bias"}
    assert named["shared.0.weight"]["grad_scale"] == named["delta.0.weight"]["grad_scale"] == 0.5
    assert named["distribution.embedding.0.weight"]["grad_scale"] == 0.5
    assert named["delta.0.bias"]["member_axis"] is named["own.0.bias"]["member_axis"] is True
    assert named["fast.0.r"]["grad_scale"] * named["fast.0.r"]["step_scale"] == 0.25


# Training


@pytest.fixture(scope="module")
def trained():
    build = partial(HyperBatchEnsemble, num_members=3, penalties=(1e-3, 1.0), embedding_spread=0.1, tune_rate=0.02)
    return fitted(build(network()), DATA, PLAN.replace(epochs=6, lr=0.05))


def test_it_learns_and_tunes_each_member(trained):
    untrained = HyperBatchEnsemble(network(), **trained.options())
    assert nll(predict(trained, DATA.test)) < nll(predict(untrained, DATA.test)) - 0.2
    assert int(trained.distribution.steps) == 6 * 6 // 3
    moved = trained.distribution.bounds != untrained.distribution.bounds  # (2, M, H)
    assert bool(moved.any(2).any(0).all())
    assert trained.tuning is None
    assert not trained.training


def test_saved_and_loaded_is_equal(trained, tmp_path):
    enfold.save(trained, tmp_path / "members.safetensors")
    loaded = enfold.load(tmp_path / "members.safetensors", network())
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(loaded(inputs), trained(inputs), rtol=0, atol=0)
    assert loaded.options() == trained.options()


def test_resumed_training_gives_the_same_bits(tmp_path, monkeypatch):
    build, checkpoint = (
        partial(HyperBatchEnsemble, num_members=2, penalties=(1e-3, 1.0), embedding_spread=0.1),
        tmp_path / "members.ckpt",
    )
    once = fitted(build(network()), DATA, PLAN)
    epochs = []

    def dying(model, epoch, plan):
        epochs.append(epoch)
        if len(epochs) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("enfold.ensembles.hyper_batch_ensemble.HyperBatchEnsemble.on_epoch_end", dying)
    with pytest.raises(KeyboardInterrupt):
        fitted(build(network()), DATA, PLAN, checkpoint=checkpoint)
    again = fitted(build(network()), DATA, PLAN, checkpoint=checkpoint)
    assert epochs == [1, 2, 3, 3]
    torch.testing.assert_close(dict(again.state_dict()), dict(once.state_dict()), rtol=0, atol=0)


def test_tuning_finds_the_best_penalty_on_validation_data():
    """With weights that answer to λ and are held, the bounds move to where the validation loss is lower."""
    members = EMBEDDED(network()).eval()
    members.tuning = (DATA.val, DATA.prepare, 64)
    before = nll(predict(members, DATA.val))
    members.tune_rate = 0.1
    for step in range(3, 120, 3):
        members.on_step_end(step, None)
    assert nll(predict(members, DATA.val)) < before - 1e-3
    assert all(parameter.grad is None for parameter in members.parameters())


def test_fit_trains_as_the_method_does():
    build = partial(HyperBatchEnsemble, num_members=2, penalties=(1e-3, 1.0), embedding_spread=0.1)
    by_method, by_fit = fitted(build(network()), DATA, PLAN), build(network())
    fit(by_fit, DATA, config=PLAN, quiet=True)
    assert int(by_fit.distribution.steps) > 0
    torch.testing.assert_close(dict(by_fit.state_dict()), dict(by_method.state_dict()), rtol=0, atol=0)


def test_an_interrupted_training_leaves_no_data_in_a_copy(monkeypatch):
    members = HyperBatchEnsemble(network(), 2)
    monkeypatch.setattr(type(members), "on_step_end", lambda *ignored: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fit(members, DATA, config=PLAN, quiet=True)
    assert copy.deepcopy(members).tuning is None


def test_invalid_inputs():
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        HyperBatchEnsemble(any_network(), 0)
    with pytest.raises(EnfoldError, match=r"0 < low < high, got \(1\.0, 0\.1\)"):
        HyperBatchEnsemble(any_network(), penalties=(1.0, 0.1))
    with pytest.raises(EnfoldError, match=r"tune_every .*got 0"):
        HyperBatchEnsemble(any_network(), tune_every=0)
    with pytest.raises(EnfoldError, match=r"width .*got -1"):
        HyperBatchEnsemble(any_network(), width=-1)
    with pytest.raises(EnfoldError, match=r"val .*got a list"):
        fitted(HyperBatchEnsemble(network()), DATA.replace(val=[]), PLAN)
    with pytest.raises(EnfoldError, match=r"train .*got empty"):
        fitted(HyperBatchEnsemble(network()), DATA.replace(train=DATA.train[:0]), PLAN)
