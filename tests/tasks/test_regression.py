"""Regression against torch's losses, torch.distributions and moments of samples."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal

from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics import GaussianPredictions, PointPredictions, QuantilePredictions, crps, density_nll, mse, pinball
from enfold.tasks import as_task
from enfold.tasks.regression import Regression
from regression_outputs import LEVELS, rng


def positive(raw, variance):
    """The variance that raw outputs stand for."""
    return {"variance": raw, "log": raw.exp(), "softplus": F.softplus(raw)}[variance]


def outputs_for(variance, *shape, seed=0):
    raw = torch.randn(*shape, generator=rng(seed))
    return raw.abs() + 0.1 if variance == "variance" else raw


# Shapes and losses


@pytest.mark.parametrize(
    ("out", "wanted"),
    [((6,), (6,)), ((6, 1), (6,)), ((6,), (6, 1)), ((6, 3), (6, 3)), ((6, 1, 4, 5), (6, 4, 5)), ((6, 7, 2), (6, 7, 2))],
)
def test_points(out, wanted):
    outputs, targets = torch.randn(3, *out, generator=rng()), torch.randn(wanted, generator=rng(1))
    task = Regression().resolve(outputs, targets)
    assert task.head == "point"
    assert task.criterion == "mse"
    rows = task.flatten(outputs, targets)
    assert rows.values.shape == (3, targets.numel(), 1)
    expected = [F.mse_loss(one.reshape(wanted), targets) for one in outputs]
    torch.testing.assert_close(task.loss(rows), torch.stack(expected))
    found = task.predict(outputs)
    torch.testing.assert_close(found.mean, outputs.mean(0))
    torch.testing.assert_close(found.members, outputs)
    torch.testing.assert_close(found.epistemic, outputs.var(0, correction=0))
    torch.testing.assert_close(found.total, found.epistemic)
    assert not found.aleatoric.any()
    assert found.class_axis is None


LAYOUTS = [  # outputs (B, ...), targets, axis of the parameters
    ((6, "K"), (6,), -1, None),
    ((6, "K"), (6, 1), -1, None),
    ((6, "DK"), (6, 3), -1, None),
    ((6, "K", 4, 5), (6, 4, 5), 1, None),
    ((6, "K", 4, 5), (6, 1, 4, 5), 1, None),
    ((6, "DK", 4, 5), (6, 3, 4, 5), 1, None),
    ((6, 7, "K"), (6, 7), -1, None),
    ((6, 7, "DK"), (6, 7, 3), -1, None),
    ((6, 3, "DK"), (6, 3, 3), 2, 2),
]


@pytest.mark.parametrize("variance", ["variance", "log", "softplus"])
@pytest.mark.parametrize("head", ["gaussian", "uncertainty"])
@pytest.mark.parametrize(("out", "wanted", "axis", "given_axis"), LAYOUTS)
def test_the_layout_of_means_and_variances(head, variance, out, wanted, axis, given_axis):
    """Means first, then variances, at one axis; rows have the order of the targets."""
    K = 2 if head == "gaussian" else 3
    D = 3 if "DK" in out else 1
    shape = [{"K": K, "DK": D * K}.get(size, size) for size in out]
    outputs, targets = outputs_for(variance, 4, *shape), torch.randn(wanted, generator=rng(1))
    task = Regression(head=head, variance=variance, axis=given_axis).resolve(outputs, targets)
    assert task.axis == axis
    assert task.criterion == "nll"
    parts = outputs.split(D, dim=axis if axis < 0 else axis + 1)
    means, variances = parts[0], sum(positive(part, variance) for part in parts[1:])
    rows = task.flatten(outputs, targets)
    assert rows.values.shape == (4, targets.numel(), K)
    torch.testing.assert_close(rows.values[..., 0], means.flatten(1))
    torch.testing.assert_close(rows.values[..., 1].exp(), positive(parts[1], variance).flatten(1))
    expected = [
        F.gaussian_nll_loss(mean.reshape(wanted), targets, v.reshape(wanted), full=True)
        for mean, v in zip(means, variances, strict=True)
    ]
    torch.testing.assert_close(task.loss(rows), torch.stack(expected))
    found = task.predict(outputs)
    assert found.mean.shape == means.shape[1:]
    torch.testing.assert_close(found.members, means)
    own = torch.zeros(()) if head == "gaussian" else positive(parts[2], variance).mean(0)
    torch.testing.assert_close(found.aleatoric, positive(parts[1], variance).mean(0))
    torch.testing.assert_close(found.epistemic, means.var(0, correction=0) + own)
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic)


@pytest.mark.parametrize(
    ("out", "wanted", "axis"),
    [((6, 3), (6,), None), ((6, 3), (6, 1), None), ((6, 2, 3), (6, 2), None), ((6, 3, 4, 5), (6, 4, 5), 1)],
)
def test_quantiles(out, wanted, axis):
    outputs, targets = torch.randn(2, *out, generator=rng()), torch.randn(wanted, generator=rng(1))
    task = Regression(quantiles=LEVELS, axis=axis).resolve(outputs, targets)
    assert (task.head, task.criterion) == ("quantiles", "pinball")
    rows = task.flatten(outputs, targets)
    assert rows.values.shape == (2, targets.numel(), 3)
    last = outputs.movedim(2 if axis == 1 else -1, -1).reshape(2, -1, 3)
    expected = torch.zeros(2)
    for member in range(2):
        for k, level in enumerate(LEVELS):
            for q, y in zip(last[member, :, k], targets.flatten(), strict=True):
                expected[member] += (level * (y - q) if y > q else (1 - level) * (q - y)) / targets.numel() / 3
    torch.testing.assert_close(task.loss(rows), expected)
    found = task.predict(outputs)
    assert found.mean.numel() == targets.numel()


def test_rows_of_several_targets_have_the_order_of_the_targets():
    """So that a student with another head than its teacher has the same rows."""
    truth = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    gaussian = torch.cat([truth, torch.ones_like(truth)], dim=1)[None]
    for task, outputs in [(Regression(), truth[None]), (Regression(head="gaussian", axis=1), gaussian)]:
        rows = task.flatten(outputs, truth)
        assert torch.equal(rows.values[0, :, 0], truth.flatten())
        assert torch.equal(rows.targets, truth.flatten())
        assert not task.flatten(outputs, truth).values[0, :, 0].sub(rows.targets).any()


def test_members_with_batches_of_their_own():
    outputs, targets = torch.randn(3, 6, 2, generator=rng()), torch.randn(3, 6, generator=rng(1))
    task = Regression(head="gaussian", variance="log").resolve(outputs, targets, own=True)
    expected = [
        F.gaussian_nll_loss(one[:, 0], own, one[:, 1].exp(), full=True)
        for one, own in zip(outputs, targets, strict=True)
    ]
    torch.testing.assert_close(task.loss(task.flatten(outputs, targets, own=True)), torch.stack(expected))
    targets[1, 2:] = torch.nan
    task = Regression(head="gaussian", variance="log", ignore_nan=True).resolve(outputs, targets, own=True)
    found = task.loss(task.flatten(outputs, targets, own=True))
    expected[1] = F.gaussian_nll_loss(outputs[1, :2, 0], targets[1, :2], outputs[1, :2, 1].exp(), full=True)
    torch.testing.assert_close(found, torch.stack(expected))


def test_weights_of_examples():
    outputs, targets = torch.randn(2, 6, 3, generator=rng()), torch.randn(6, 3, generator=rng(1))
    weights = torch.rand(6, generator=rng(2))
    task = Regression()
    found = task.loss(task.flatten(outputs, targets, weights))
    expected = ((outputs - targets).square().mean(-1) * weights).sum(1) / weights.sum()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_gradient_of_beta_nll(beta):
    """Seitzer et al., equation (6): the gradient of the likelihood times v^β, which has no gradient."""
    outputs, targets = outputs_for("variance", 1, 6, 2), torch.randn(6, generator=rng(1))
    outputs.requires_grad_()
    task = Regression(head="gaussian", beta=beta)
    task.loss(task.flatten(outputs, targets)).sum().backward()
    mean, v = outputs.detach()[0].unbind(-1)
    expected = (
        torch.stack([(mean - targets) / v, (v - (targets - mean) ** 2) / (2 * v**2)], -1) * v[:, None] ** beta / 6
    )
    torch.testing.assert_close(outputs.grad[0], expected)


def test_small_variances_keep_their_gradient():
    outputs = torch.tensor([[[0.0, 0.0], [0.0, 1e-9], [0.0, 1.0]]], requires_grad=True)
    task = Regression(head="gaussian")
    rows = task.flatten(outputs, torch.tensor([1.0, 1.0, 1.0]))
    torch.testing.assert_close(rows.values[0, :, 1].exp(), torch.tensor([1e-6, 1e-6, 1.0]))
    task.loss(rows).sum().backward()
    assert torch.isfinite(outputs.grad).all()
    assert (outputs.grad[0, :2, 1] < 0).all()  # descent raises a variance that is too small


@pytest.mark.parametrize("variance", ["log", "softplus"])
def test_extreme_outputs_for_variances_are_finite(variance):
    outputs = torch.tensor([[[0.0, -200.0], [0.0, -20.0], [0.0, 80.0]]], requires_grad=True)
    task = Regression(head="gaussian", variance=variance, min_variance=1e-30)
    rows = task.flatten(outputs, torch.zeros(3))
    task.loss(rows).sum().backward()
    assert torch.isfinite(rows.values).all()
    assert torch.isfinite(outputs.grad).all()
    expected = positive(outputs.detach().double()[0, 1:, 1], variance).log().float()
    torch.testing.assert_close(rows.values[0, 1:, 1].detach(), expected)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_outputs(kind):
    outputs, targets = torch.randn(2, 6, 2).to(kind), torch.randn(6)
    task = Regression(head="gaussian", variance="log")
    rows = task.flatten(outputs, targets)
    assert rows.values.dtype == rows.targets.dtype == torch.float32
    assert task.predict(outputs).mean.dtype == torch.float32


# Predictions for the metrics


def test_predictions_of_every_head():
    targets = torch.randn(6, generator=rng(1))
    outputs = torch.randn(3, 6, 3, generator=rng())
    point = Regression()
    found = point.predictions(point.flatten(outputs[..., 0], targets))
    assert isinstance(found, PointPredictions)
    assert mse(found) == pytest.approx(F.mse_loss(outputs[..., 0].mean(0), targets).item())
    gaussian = Regression(head="gaussian", variance="log")
    found = gaussian.predictions(gaussian.flatten(outputs[..., :2], targets))
    assert isinstance(found, GaussianPredictions)
    log = Normal(outputs[..., 0], (outputs[..., 1] / 2).exp()).log_prob(targets)
    assert density_nll(found) == pytest.approx(-(log.logsumexp(0) - math.log(3)).mean().item(), rel=1e-5)
    assert math.isfinite(crps(found))
    both = Regression(head="uncertainty", variance="log")
    found = both.predictions(both.flatten(outputs, targets))
    torch.testing.assert_close(found.epistemic.float(), outputs[..., 2].exp())
    levels = Regression(quantiles=LEVELS)
    rows = levels.flatten(outputs[:1], targets)
    found = levels.predictions(rows)
    assert isinstance(found, QuantilePredictions)
    assert pinball(found) == pytest.approx(levels.loss(rows).item(), rel=1e-5)


# Input that is refused


def test_options_that_contradict_each_other():
    with pytest.raises(EnfoldError, match="quantiles must be given"):
        Regression(head="quantiles")
    with pytest.raises(EnfoldError, match="quantiles must be given"):
        Regression(head="gaussian", quantiles=LEVELS)
    for levels in [(0.9, 0.1), (0.0, 0.5), (0.5, 1.0), (0.5, 0.5), ()]:
        with pytest.raises(EnfoldError, match="quantiles must be"):
            Regression(quantiles=levels)
    with pytest.raises(EnfoldError, match="beta must be 0"):
        Regression(head="point", beta=0.5)
    with pytest.raises(EnfoldError, match="beta must be"):
        Regression(head="gaussian", beta=2.0)
    with pytest.raises(EnfoldError, match="head must be"):
        Regression(head="laplace")
    with pytest.raises(EnfoldError, match="min_variance must be"):
        Regression(min_variance=0.0)


def test_negative_variances_are_refused_with_the_remedy():
    outputs = torch.tensor([[[0.0, 1.0], [0.0, -0.25]]])
    with pytest.raises(EnfoldError, match=r'must not be negative.*got -0.25.*variance="softplus"'):
        Regression(head="gaussian").flatten(outputs, torch.zeros(2))
    with pytest.raises(EnfoldError, match="must not be negative"):
        Regression(head="gaussian").predict(outputs)


def test_targets_that_are_not_finite_are_refused():
    outputs, targets = torch.zeros(1, 4, 2), torch.zeros(4, 2)
    targets[2, 1] = torch.nan
    with pytest.raises(EnfoldError, match=r"targets must be finite, got nan at index \(2, 1\).*ignore_nan=True"):
        Regression().flatten(outputs, targets)
    task = Regression(ignore_nan=True)
    rows = task.flatten(outputs, targets)
    assert rows.values.shape == (1, 7, 1)
    assert rows.chosen.tolist() == [0, 1, 2, 3, 4, 6, 7]
    targets[0, 0] = torch.inf
    with pytest.raises(EnfoldError, match=r"targets must be finite, got inf at index \(0, 0\)"):
        task.flatten(outputs, targets)
    with pytest.raises(EnfoldError, match="a target that is not ignored"):
        task.flatten(outputs, torch.full((4, 2), torch.nan))


def test_integer_targets_are_numbers():
    task = Regression()
    rows = task.flatten(torch.zeros(1, 4), torch.tensor([1, 2, 3, 4]))
    assert rows.targets.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert rows.targets.dtype == torch.float32


@pytest.mark.parametrize(
    ("task", "out", "wanted"),
    [
        (Regression(), (6, 2), (6,)),
        (Regression(), (6, 4), (6, 2)),
        (Regression(head="gaussian"), (6,), (6,)),
        (Regression(head="gaussian"), (6, 2), (6, 2)),
        (Regression(head="gaussian"), (6, 3), (6,)),
        (Regression(head="uncertainty"), (6, 2), (6,)),
        (Regression(quantiles=LEVELS), (6, 2), (6,)),
        (Regression(quantiles=LEVELS), (6, 6), (6, 2)),
        (Regression(head="gaussian", axis=1), (6, 4, 5, 2), (6, 4, 5)),
    ],
)
def test_shapes_of_another_head_are_refused(task, out, wanted):
    with pytest.raises(UnsupportedOutput, match=r"outputs of shape .* and targets of shape .*head="):
        task.resolve(torch.zeros(2, *out), torch.zeros(wanted))
    with pytest.raises(UnsupportedOutput):
        task.flatten(torch.ones(2, *out), torch.zeros(wanted))


def test_an_axis_that_is_left_open():
    with pytest.raises(EnfoldError, match="axis must be given"):
        Regression(head="gaussian").resolve(torch.zeros(1, 6, 2, 2), torch.zeros(6, 2))
    with pytest.raises(EnfoldError, match="axis must be"):
        Regression(head="gaussian").predict(torch.zeros(1, 6, 4, 4))
    task = as_task("regression")
    rows = task.flatten(torch.zeros(1, 6), torch.zeros(6))
    with pytest.raises(EnfoldError, match="label_smoothing"):
        task.loss(rows, 0.1)
