"""Proxy-EnD²: its target, both divergences against torch's, and its student."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.distributions import Dirichlet as Reference

from enfold.distill import distill
from enfold.distill.dirichlet import Dirichlet
from enfold.distill.losses.proxy_end2 import EPSILON, ProxyEnD2
from enfold.distill.teacher import Teacher
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import accuracy
from enfold.train import TrainConfig
from students import best

prop = settings(deadline=None, derandomize=True, max_examples=30)
PLAN = TrainConfig(epochs=3, batch_size=16, lr=0.02)
DIRECTIONS = ("reverse", "forward")


def logits_of_seed(seed: int, *shape: int, size: float = 2.0) -> Tensor:
    return size * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def proxy_of(teachers: Tensor, method: ProxyEnD2) -> tuple[Tensor, Tensor, Tensor]:
    """π̄, β_0 and β of equations (1) and (2), by torch's own divergence."""
    probs = teachers.softmax(-1)
    mean = probs.mean(0)
    divergence = kl_divergence(Categorical(probs=mean), Categorical(logits=teachers)).mean(0)
    precision = (teachers.shape[-1] - 1) / (2 * divergence + EPSILON)
    return mean, precision, mean * precision[..., None] + method.target_offset


@prop
@given(seed=st.integers(0, 10**6), count=st.integers(2, 5), offset=st.sampled_from([0.0, 1.0]))
def test_the_proxy(seed, count, offset):
    teachers, method = logits_of_seed(seed, count, 5, 4), ProxyEnD2(target_offset=offset)
    target = method.target(teachers)
    mean, precision, betas = proxy_of(teachers, method)
    assert target.shape == (5, 5)
    torch.testing.assert_close(target[:, :4], mean)
    torch.testing.assert_close(target[:, 4], precision)
    torch.testing.assert_close(method.proxy(target[:, :4], target[:, 4:]), betas)
    torch.testing.assert_close(betas.sum(-1), precision + 4 * offset)


@prop
@given(seed=st.integers(0, 10**6), offset=st.sampled_from([0.5, 1.0]), target_offset=st.sampled_from([0.1, 1.0]))
def test_forward_is_the_divergence_of_torch(seed, offset, target_offset):
    student, teachers = logits_of_seed(seed, 2, 5, 4), logits_of_seed(seed + 1, 3, 5, 4)
    method = ProxyEnD2(direction="forward", offset=offset, target_offset=target_offset)
    _, _, betas = proxy_of(teachers, method)
    expected = kl_divergence(Reference(betas.expand(2, 5, 4)), Reference(student.exp() + offset)).mean(-1)
    found = method.loss(student, method.target(teachers), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert bool((found >= 0).all())


@prop
@given(seed=st.integers(0, 10**6))
def test_forward_is_0_at_the_proxy(seed):
    method = ProxyEnD2(direction="forward", offset=0.0)
    teachers = logits_of_seed(seed, 3, 5, 4)
    _, _, betas = proxy_of(teachers, method)
    student = betas.log()[None].requires_grad_()
    loss = method.loss(student, method.target(teachers), 0.0)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-7)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-7)


@prop
@given(seed=st.integers(0, 10**6), target_offset=st.sampled_from([0.0, 1.0]))
def test_reverse_is_a_scaled_divergence_of_torch(seed, target_offset):
    """Up to a constant of the student, KL(Dir(α) || Dir(1 + β_0' π̄)) / β_0'; so differences of students agree."""
    students, teachers = logits_of_seed(seed, 4, 5, 4), logits_of_seed(seed + 1, 3, 5, 4)
    method = ProxyEnD2(target_offset=target_offset)
    mean, _, betas = proxy_of(teachers, method)
    precision = betas.sum(-1, keepdim=True)
    alphas = students.exp() + 1
    divergence = kl_divergence(Reference(alphas), Reference((1 + precision * mean).expand_as(alphas)))
    expected = (divergence / precision[..., 0]).mean(-1)
    found = method.loss(students, method.target(teachers), 0.0)
    torch.testing.assert_close(found - found[0], expected - expected[0], rtol=1e-6, atol=1e-8)


def test_reverse_in_its_own_terms():
    student, teachers = logits_of_seed(0, 1, 5, 4), logits_of_seed(1, 3, 5, 4)
    method = ProxyEnD2()
    assert method.direction == "reverse"
    mean, _, betas = proxy_of(teachers, method)
    alphas = student.exp() + 1
    expected_log = torch.digamma(alphas) - torch.digamma(alphas.sum(-1, keepdim=True))
    expected = -(mean * expected_log).sum(-1) - Reference(alphas).entropy() / betas.sum(-1)
    torch.testing.assert_close(method.loss(student, method.target(teachers), 0.0), expected.mean(-1))


@pytest.mark.parametrize(("direction", "more"), [("forward", 0.0), ("reverse", 4.0)])
def test_the_minimum(direction, more):
    """Forward: the proxy. Reverse: C = 4 more precise, with the same mean but for the offset."""
    method = ProxyEnD2(direction=direction)
    teachers = logits_of_seed(2, 3, 1, 4, size=1.0)
    mean, precision, _ = proxy_of(teachers, method)
    target = method.target(teachers)
    logits = torch.zeros(1, 1, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-13, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = method.loss(logits, target, 0.0).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    expected = mean * (precision[:, None] + more) + 1
    torch.testing.assert_close(logits.detach().exp()[0] + 1, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 3])
def test_equal_teachers_have_a_large_finite_precision(direction, count, members, data):
    logits = logits_of_seed(0, 1, 5, 4)
    method = ProxyEnD2(direction=direction)
    target = method.target(logits.expand(count, 5, 4))
    torch.testing.assert_close(target[:, 4], torch.full((5,), 3 / EPSILON, dtype=torch.float64), rtol=1e-5, atol=0)
    student = logits.clone().requires_grad_()
    loss = method.loss(student, target, 0.0)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(gradient).all())
    learned = distill(DeepEnsemble([members.member(0)] * count), data, loss=ProxyEnD2(direction=direction), config=PLAN)
    assert bool(torch.isfinite(learned(data.test.inputs)).all())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_extreme_logits_have_finite_gradients(direction, offset):
    rows = torch.tensor([[60.0, -60.0, 0.0], [60.0, 60.0, 60.0], [-60.0, -60.0, -60.0], [1e4, -1e4, 0.0]])
    student = rows[None].clone().requires_grad_()
    method = ProxyEnD2(direction=direction, offset=offset)
    for teachers in (rows.flip(0)[None], torch.stack([rows, rows.flip(0)]), rows.expand(3, 4, 3)):
        loss = method.loss(student, method.target(teachers), 0.0)
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        assert bool(torch.isfinite(loss).all())
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_are_right(direction):
    student, teachers = logits_of_seed(0, 2, 3, 4).requires_grad_(), logits_of_seed(1, 3, 3, 4, size=1.0)
    method = ProxyEnD2(direction=direction)
    target = method.target(teachers)
    assert torch.autograd.gradcheck(lambda logits: method.loss(logits, target, 0.0), student)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("own", [True, False])
def test_each_student_has_its_own_loss_and_targets_are_left_as_they_are(direction, own):
    students, method = logits_of_seed(0, 3, 5, 4), ProxyEnD2(direction=direction)
    teachers = logits_of_seed(1, 2, 15 if own else 5, 4)
    target = method.target(teachers)
    target = target.view(3, 5, 5) if own else target
    before = target.clone()
    together = method.loss(students, target, 0.0)
    assert together.shape == (3,)
    assert torch.equal(target, before)
    for index in range(3):
        alone = method.loss(students[index : index + 1], method.select_target(target, index, own), 0.0)
        torch.testing.assert_close(together[index : index + 1], alone)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_student_learns_the_distribution(direction, members, data):
    """The loss falls, the mean comes to be right, and the network is read as what it learned."""
    untrained = distill(members, data, loss=ProxyEnD2(), config=PLAN.replace(epochs=0), init="random")
    method = ProxyEnD2(direction=direction)
    student = distill(members, data, loss=method, init="random", config=PLAN, epochs=40)
    assert type(student) is type(members.member(0))
    target = Teacher(members.eval(), data, method.target).target(members(data.train.inputs))
    with torch.no_grad():
        first, last = (method.loss(one(data.train.inputs)[None], target, 1.0) for one in (untrained, student))
    assert last < first
    predictor = method.as_predictor(student)
    assert isinstance(predictor, Dirichlet)
    assert predictor.offset == 1.0
    assert accuracy(predict(predictor, data.train)) > accuracy(predict(untrained, data.train))
    assert bool((predictor.uncertainties(data.test.inputs)["precision"] > 3).all())


def test_the_last_epoch_is_returned_and_evaluated_by_the_mean(members, data):
    method = ProxyEnD2()
    plan = method.configure(PLAN.replace(patience=2))
    assert (plan.select, plan.patience) == ("last", None)
    judged = method.evaluated_model(members.member(0).eval())
    inputs = data.test.inputs
    torch.testing.assert_close(judged(inputs).exp(), members.member(0).eval()(inputs).exp() + 1)


def test_an_ensemble_learns(members, data):
    student = distill(members, data, student=BatchEnsemble(best(members, data), 2), loss=ProxyEnD2(), config=PLAN)
    predictor = ProxyEnD2().as_predictor(student)
    assert predictor.num_members == 2
    assert predictor.concentrations(data.test.inputs).shape == (2, 30, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"direction": "sideways"}, "direction .* got 'sideways'"),
        ({"offset": math.nan}, "offset .* got nan"),
        ({"target_offset": -1.0}, "target_offset .* got -1.0"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=message):
        ProxyEnD2(**settings)
