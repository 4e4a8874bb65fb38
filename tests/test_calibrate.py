"""Calibrated models and cuts on the uncertainty, for every task."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import enfold
from enfold import DeepEnsemble, calibrate, threshold
from enfold.calibrate import Calibrated
from enfold.errors import EnfoldError
from enfold.evaluate import evaluate, predict, score
from enfold.metrics import accuracy, density_nll, nll, rmse
from enfold.tasks import Binary, Classification, Multilabel, Regression

LEVELS = (0.1, 0.5, 0.9)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


class Scaled(nn.Module):
    """A network that is too sure: its outputs are large."""

    def __init__(self, inputs=4, outputs=3, factor=4.0):
        super().__init__()
        self.layer, self.factor = nn.Linear(inputs, outputs), factor

    def forward(self, inputs):
        return self.factor * self.layer(inputs)


class Quantiles(Scaled):
    """Quantiles that do not cross."""

    def forward(self, inputs):
        low, *steps = self.layer(inputs).unbind(1)
        return torch.stack([low, *(low + sum(F.softplus(each) for each in steps[:k]) for k in (1, 2))], 1)


class Dense(nn.Module):
    """Outputs (B, K, H, W)."""

    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Conv2d(4, outputs, 1)

    def forward(self, inputs):
        return 3 * self.layer(inputs)


def case(name):
    """A network, its task, inputs and targets."""
    x = torch.randn(200, 4, generator=rng())
    images = torch.randn(20, 4, 5, 6, generator=rng())
    noise = torch.randn(200, generator=rng(1))
    pixels = torch.randn(20, 5, 6, generator=rng(1))
    return {
        "classes": (Scaled, Classification(), x, torch.randint(3, (200,), generator=rng(2))),
        "dense": (lambda: Dense(3), Classification(), images, torch.randint(3, (20, 5, 6), generator=rng(2))),
        "binary": (lambda: Scaled(outputs=1), Binary(), x, (noise > 0).long()),
        "dense binary": (lambda: Dense(1), Binary(), images, (pixels > 0).long()),
        "labels": (Scaled, Multilabel(), x, torch.randint(2, (200, 3), generator=rng(2))),
        "points": (lambda: Scaled(outputs=1), Regression(), x, noise),
        "gaussians": (lambda: Scaled(outputs=2, factor=1.0), Regression(head="gaussian", variance="log"), x, noise),
        "two numbers": (
            lambda: Scaled(outputs=4, factor=1.0),
            Regression(head="gaussian", variance="softplus"),
            x,
            torch.randn(200, 2, generator=rng(2)),
        ),
        "maps": (lambda: Dense(2), Regression(head="gaussian", variance="softplus"), images, pixels),
        "quantiles": (Quantiles, Regression(quantiles=LEVELS), x, noise),
    }[name]


CASES = [
    "classes", "dense", "binary", "dense binary", "labels", "points", "gaussians", "two numbers", "maps", "quantiles",
]  # fmt: skip


def halves(x, y):
    half = len(x) // 2
    return (x[:half], y[:half]), (x[half:], y[half:])


def members(make, count=3):
    torch.manual_seed(0)
    return DeepEnsemble([make() for _ in range(count)])


@pytest.mark.combinations
@pytest.mark.parametrize("kind", ["network", "ensemble"])
@pytest.mark.parametrize("name", CASES)
def test_the_calibrated_scores_are_those_of_evaluate(name, kind):
    """The factor is fitted on the validation data, and outputs with it have the scores cnll and so on."""
    make, task, x, y = case(name)
    val, test = halves(x, y)
    model = members(make) if kind == "ensemble" else members(make).member(0)
    found = calibrate(model, val, task)
    expected = score(predict(model, test, task=task), predict(model, val, task=task))
    own = predict(found, test)
    assert own.num_members == 1
    is_number = isinstance(task, Regression)
    assert found.factor.item() == pytest.approx(expected["scale" if is_number else "temperature"], rel=1e-5)
    for metric in ("nll", "crps", "coverage_90") if is_number else ("nll", "brier"):
        calibrated = score(own)[metric]
        assert calibrated == pytest.approx(expected[f"c{metric}"], rel=1e-3, abs=1e-4), metric


@pytest.mark.parametrize("kind", ["network", "ensemble"])
@pytest.mark.parametrize("name", CASES)
def test_the_prediction_of_a_calibrated_model(name, kind):
    make, task, x, y = case(name)
    val, (inputs, _) = halves(x, y)
    model = members(make) if kind == "ensemble" else members(make).member(0)
    found = calibrate(model, val, task)
    p = found.predict(inputs)
    of_outputs = found.task.predict(found(inputs).detach()[None])
    torch.testing.assert_close(p.mean.flatten(), of_outputs.mean.flatten())
    torch.testing.assert_close(p.total.flatten(), of_outputs.total.flatten(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    assert bool((p.aleatoric >= 0).all())
    assert bool((p.epistemic >= 0).all())
    assert len(p.members) == (3 if kind == "ensemble" else 1)
    if name == "points":
        torch.testing.assert_close(p.aleatoric, torch.full_like(p.mean, found.scale.item() ** 2))


@pytest.mark.parametrize("name", CASES)
def test_outputs_of_a_factor_of_one_are_the_mean(name):
    make, task, x, y = case(name)
    ensemble = members(make)
    outputs = ensemble(x).detach()
    resolved = task.resolve(outputs, y)
    found = Calibrated(ensemble, resolved)
    expected, own = resolved.predict(outputs), found.predict(x)
    torch.testing.assert_close(own.mean, expected.mean)
    torch.testing.assert_close(own.members, expected.members)
    torch.testing.assert_close(own.epistemic, expected.epistemic, rtol=1e-4, atol=1e-5)
    if not isinstance(task, Regression):
        assert found(x).shape == outputs.shape[1:]


def test_logits_of_one_network_are_divided():
    make, _, x, y = case("classes")
    network = make()
    found = calibrate(network, (x, y))
    assert found.temperature.item() > 1.5
    torch.testing.assert_close(found(x), network(x) / found.temperature)
    assert nll(predict(found, (x, y))) < nll(predict(network, (x, y)))
    assert accuracy(predict(found, (x, y))) == accuracy(predict(network, (x, y)))
    assert calibrate(found, (x, y)).temperature == found.temperature
    assert calibrate(network.train(), (x, y)).training


@pytest.mark.parametrize("name", CASES)
def test_the_factor_is_saved_and_loaded(name, tmp_path):
    make, task, x, y = case(name)
    model = calibrate(members(make).member(0), (x, y), task)
    fresh = Calibrated(make(), model.model_task)
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(fresh(x), model(x))
    assert {"temperature", "scale"} & set(dict(model.named_buffers()))
    enfold.save(model, tmp_path / "model.safetensors")
    loaded = enfold.load(tmp_path / "model.safetensors", Calibrated(make(), model.model_task))
    torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_calibrated_network_is_exported(name):
    make, task, x, y = case(name)
    model = calibrate(members(make).member(0), (x, y), task).eval()
    program = torch.export.export(model, (x[:8],))
    torch.testing.assert_close(program.module()(x[:8]), model(x[:8]))


def test_a_calibrated_ensemble_is_evaluated_beside_its_reference():
    make, task, x, y = case("gaussians")
    val, test = halves(x, y)
    ensemble = members(make)
    ensemble.task = task
    row = evaluate(calibrate(ensemble, val), test, val, reference=ensemble)
    assert math.isfinite(row.scores["nll"])
    assert row.scores["scale"] == pytest.approx(1, abs=1e-4)


def test_wrapped_networks_take_batches_of_several_inputs():
    """The network inside shows that (x, z, y) are two inputs and a target."""
    torch.manual_seed(0)
    batches = [(*torch.randn(2, 6, 4, generator=rng()), torch.arange(6) % 3)]
    network = nn.Bilinear(4, 4, 3)
    for model in (enfold.calibrate(network, batches), enfold.Dirichlet(network, 1.0)):
        again = [((x, z), y) for x, z, y in batches]
        assert evaluate(model, batches).scores == evaluate(model, again).scores
        assert predict(model, batches).num_members == 1


# Thresholds


@pytest.mark.parametrize("name", ["classes", "dense", "binary", "labels", "gaussians", "quantiles", "maps"])
@pytest.mark.parametrize("reject", [0.1, 0.5])
def test_the_share_that_is_rejected(name, reject):
    make, task, x, y = case(name)
    ensemble = members(make)
    found = threshold(ensemble, (x, y), reject, task)
    p = predict(ensemble, (x, y), task=task)
    assert found.rejected == pytest.approx(reject, abs=0.01)
    assert found.everything[0] == pytest.approx(score(p)[p.criterion])
    assert found.metrics == (p.criterion, p.score)
    outputs = ensemble(x).detach()
    prediction = task.resolve(outputs, y).predict(outputs)
    accepted = found.accepts(prediction)
    assert accepted.shape == prediction.total.shape
    assert accepted.double().mean().item() == pytest.approx(1 - found.rejected)


def test_metrics_of_what_is_accepted():
    x, y = torch.randn(500, 4, generator=rng()), torch.randn(500, generator=rng(1))
    y = y * (0.2 + (x[:, 0] > 0.5))
    task = Regression(head="gaussian")

    class Known(nn.Module):
        def forward(self, inputs):
            return torch.stack([0 * inputs[:, 0], 0.04 + 1.2 * (inputs[:, 0] > 0.5) + 0.01 * inputs[:, 1].abs()], 1)

    found = threshold(Known(), (x, y), 0.3, task)
    total = Known()(x)[:, 1]
    kept = total.argsort()[:350]
    assert found.accepted[1] == pytest.approx(y[kept].square().mean().sqrt().item(), rel=1e-5)
    assert found.everything[1] == pytest.approx(y.square().mean().sqrt().item(), rel=1e-5)
    assert found.accepted[1] < found.everything[1] / 2
    expected = F.gaussian_nll_loss(torch.zeros(350), y[kept], total[kept], full=True)
    assert found.accepted[0] == pytest.approx(expected.item(), rel=1e-4)
    assert str(found).startswith("reject 30.0 %")
    assert "rmse" in str(found)


def test_rejecting_uncertain_classes_raises_the_accuracy():
    x = torch.randn(600, 4, generator=rng())
    y = (x[:, 0] + 0.5 * torch.randn(600, generator=rng(1)) > 0).long()

    class Known(nn.Module):
        def forward(self, inputs):
            return torch.stack([0 * inputs[:, 0], 3 * inputs[:, 0]], 1)

    found = threshold(Known(), (x, y), reject=0.4)
    everything, accepted = (values[found.metrics.index("accuracy")] for values in (found.everything, found.accepted))
    assert accepted > everything + 0.05
    wrong = threshold(calibrate(Known(), (x, y)), (x, y), reject=0.4)
    assert wrong.rejected == found.rejected  # a temperature does not change the order of one logit
    assert wrong.cut != found.cut


def test_ties_are_kept_or_rejected_together():
    class Two(nn.Module):
        def forward(self, inputs):
            return torch.stack([0 * inputs[:, 0], 0.5 + (inputs[:, 0] > 0)], 1)

    x, y = torch.arange(-50.0, 50)[:, None], torch.zeros(100)
    for reject in (0.1, 0.3, 0.6):
        found = threshold(Two(), (x, y), reject, Regression(head="gaussian"))
        assert found.rejected == pytest.approx(0.49)
        assert found.cut == pytest.approx(1.0)


def test_what_is_refused():
    make, _, x, y = case("points")
    network = make()
    with pytest.raises(EnfoldError, match="different uncertainty"):
        threshold(network, (x, y))
    for reject in (0.0, 1.0, -0.1):
        with pytest.raises(EnfoldError, match="reject must be"):
            threshold(network, (x, y), reject)
    with pytest.raises(EnfoldError, match="calibrate needs val examples"):
        calibrate(network, None)
    with pytest.raises(EnfoldError, match="threshold needs val examples"):
        threshold(network, None)


def test_a_scale_of_points_gives_a_likelihood():
    make, _, x, y = case("points")
    ensemble = members(make)
    found = calibrate(ensemble, (x, y))
    own = predict(found, (x, y))
    assert math.isfinite(density_nll(own))
    assert rmse(own) == pytest.approx(rmse(predict(ensemble, (x, y))), rel=1e-5)
