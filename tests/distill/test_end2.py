"""EnD²: its loss against torch's distributions and the most likely distribution, its temperature, its student."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Dirichlet as Reference

from enfold.distill import distill
from enfold.distill.cached import CachedTeacher
from enfold.distill.dirichlet import Dirichlet, OverconfidentWarning, warn_if_overconfident
from enfold.distill.losses.end2 import EnD2
from enfold.distill.losses.proxy_end2 import ProxyEnD2
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
DONE = 1.0  # of the training, where the temperature is 1


def logits_of_seed(seed: int, *shape: int, size: float = 2.0) -> Tensor:
    return size * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@prop
@given(
    seed=st.integers(0, 10**6),
    offset=st.sampled_from([0.0, 0.5, 1.0]),
    progress=st.floats(0, 1),
    smoothing=st.sampled_from([0.0, 1e-7, 1e-3]),
)
def test_it_is_the_likelihood_of_the_members(seed, offset, progress, smoothing):
    student, teachers = logits_of_seed(seed, 2, 5, 4), logits_of_seed(seed + 1, 3, 5, 4)
    method = EnD2(offset=offset, smoothing=smoothing)
    temperature = method.temperature_at(progress)
    probs = (1 - smoothing) * (teachers / temperature).softmax(-1) + smoothing / 4
    reference = Reference((student / temperature).exp() + offset)  # (S, B)
    expected = -torch.stack([reference.log_prob(each / each.sum(-1, keepdim=True)) for each in probs]).mean((0, 2))
    torch.testing.assert_close(method.loss(student, method.target(teachers), progress), expected)


def test_its_minimum_is_the_most_likely_distribution():
    """On samples of a known distribution; at the minimum E[ln π_k] is the samples' mean of ln π_k."""
    alphas = torch.tensor([3.0, 1.0, 0.8], dtype=torch.float64)
    torch.manual_seed(0)
    samples = Reference(alphas).sample((20_000,))[:, None]  # (T, N = 1, C)
    method = EnD2(smoothing=0.0)
    logits = torch.zeros(1, 1, 3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = method.loss(logits, samples.log(), DONE).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = logits.detach().exp()[0, 0]
    expected = torch.digamma(found) - torch.digamma(found.sum())
    torch.testing.assert_close(expected, samples.log().mean((0, 1)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, alphas, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("own", [True, False])
def test_each_student_has_its_own_loss(own):
    students = logits_of_seed(0, 3, 5, 4)
    target = logits_of_seed(1, 2, 3, 5, 4) if own else logits_of_seed(1, 2, 5, 4)
    method = EnD2()
    together = method.loss(students, target, 0.2)
    assert together.shape == (3,)
    for index in range(3):
        alone = method.loss(students[index : index + 1], method.select_target(target, index, own), 0.2)
        torch.testing.assert_close(together[index : index + 1], alone)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("progress", [0.0, DONE])
def test_extreme_logits_have_finite_gradients(offset, progress):
    rows = torch.tensor([[60.0, -60.0, 0.0], [60.0, 60.0, 60.0], [-60.0, -60.0, -60.0], [1e4, -1e4, 0.0]])
    student = rows[None].clone().requires_grad_()
    for teachers in (rows.flip(0)[None], rows.expand(3, 4, 3), 1e4 * rows[None]):
        loss = EnD2(offset=offset).loss(student, teachers, progress)
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        assert bool(torch.isfinite(loss).all())
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients_are_right(offset):
    student, teachers = logits_of_seed(0, 2, 3, 4).requires_grad_(), logits_of_seed(1, 3, 3, 4)
    method = EnD2(offset=offset)
    assert torch.autograd.gradcheck(lambda logits: method.loss(logits, teachers, 0.2), student)


def test_equal_teachers_are_finite(members, data):
    equal = DeepEnsemble([members.member(0)] * 3)
    student = distill(equal, data, loss=EnD2(), config=PLAN)
    assert bool(torch.isfinite(student(data.test.inputs)).all())


def test_the_temperature_falls():
    method = EnD2(hold=0.25, anneal=0.5)
    found = [method.temperature_at(progress) for progress in (0.0, 0.24, 0.25, 0.5, 0.75, 0.9, 1.0)]
    assert found == pytest.approx([10.0, 10.0, 10.0, 5.5, 1.0, 1.0, 1.0])
    assert EnD2().temperature_at(0.0) == 10.0
    assert EnD2().temperature_at(0.25) == pytest.approx(5.5)
    assert EnD2().temperature_at(0.5) == 1.0
    assert EnD2(hold=0.0, anneal=0.0).temperature_at(0.0) == 1.0


def test_a_student_learns_the_distribution(members, data):
    """The loss falls, the mean comes to be right, and the network is read as what it learned."""
    untrained = distill(members, data, loss=EnD2(), config=PLAN.replace(epochs=0), init="random")
    method = EnD2(start_temperature=1.5)
    student = distill(members, data, loss=method, init="random", config=PLAN, epochs=40)
    assert type(student) is type(members.member(0))
    target = Teacher(members.eval(), data).logits(data.train.inputs)
    with torch.no_grad():
        first, last = (method.loss(one(data.train.inputs)[None], target, DONE) for one in (untrained, student))
    assert last < first - 1
    predictor = method.as_predictor(student)
    assert isinstance(predictor, Dirichlet)
    assert predictor.offset == 0.0
    assert accuracy(predict(predictor, data.train)) > accuracy(predict(untrained, data.train))
    epistemic = predictor.uncertainties(data.test.inputs)["epistemic"]
    assert bool((epistemic > 0).all())


def test_the_last_epoch_is_returned(members, data):
    """The start predicts well but never learned the distribution."""
    student = distill(members, data, loss=EnD2(), config=PLAN, lr=1e-6)
    start = distill(members, data, loss=EnD2(), config=PLAN.replace(epochs=0))
    assert not torch.equal(student.head.weight, start.head.weight)
    plan = EnD2().configure(PLAN)
    assert (plan.select, plan.patience) == ("last", None)
    assert EnD2().configure(PLAN.replace(patience=1)).patience is None


def constant(logits: list[float]) -> nn.Module:
    """A network that says the same about all inputs."""
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    layer.bias = nn.Parameter(torch.tensor(logits))
    return layer


AT_ODDS = ([8.0, 0.0, 0.0], [0.0, 8.0, 0.0])  # sure of different classes


@pytest.mark.parametrize("method", [EnD2, ProxyEnD2])
def test_an_overconfident_student_gives_a_warning(data, method):
    """It has no time to leave the logits of the member that it starts from."""
    members = DeepEnsemble([constant(logits) for logits in AT_ODDS])
    hasty = PLAN.replace(epochs=1, lr=1e-9)
    with pytest.warns(OverconfidentWarning, match=r"validation data is 2\.9\de\+03"):
        distill(members, data, loss=method(), config=hasty)
    distill(members, data, loss=method(), init="random", config=hasty)  # about as much as knowing nothing


@pytest.mark.parametrize("recorded", [False, True])
def test_overconfidence_is_ten_times_the_precision_of_the_members(data, recorded):
    """β_0 = 3 + 2 / (2 · 1/2 Σ_m KL(π̄ || π_m)) by hand, and α_0 just below and above ten times that."""
    teachers = DeepEnsemble([constant(logits) for logits in AT_ODDS]).eval()
    probs = torch.tensor(AT_ODDS, dtype=torch.float64).softmax(-1)
    apart = (probs.mean(0) * (probs.mean(0).log() - probs.log())).sum(-1).mean()
    members = CachedTeacher(teachers(data.train.inputs).detach()) if recorded else teachers
    for factor in (9.9, 10.1):
        student = Dirichlet(constant(3 * [math.log(factor * (3 + 1 / float(apart)) / 3)]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_if_overconfident(student, members, data)
        assert [each.category for each in caught] == [OverconfidentWarning] * (factor > 10)
    equal = DeepEnsemble([constant([1.0, 0.0, 0.0])] * 2)
    warn_if_overconfident(Dirichlet(constant([15.0, 1.0, 1.0])), equal, data)  # as sure as teachers that never differ


def test_an_ensemble_learns(members, data):
    student = distill(members, data, student=BatchEnsemble(best(members, data), 2), loss=EnD2(), config=PLAN)
    predictor = EnD2().as_predictor(student)
    assert predictor.num_members == 2
    assert predictor.uncertainties(data.test.inputs)["total"].shape == (2, 30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start_temperature": 0.0}, "start_temperature .* got 0.0"),
        ({"start_temperature": math.inf}, "start_temperature .* got inf"),
        ({"hold": 0.6}, "hold and anneal .* got 0.6 and 0.5"),
        ({"hold": -0.1}, "hold .* got -0.1"),
        ({"anneal": math.nan}, "anneal .* got nan"),
        ({"offset": -1.0}, "offset .* got -1.0"),
        ({"smoothing": 1.0}, "smoothing .* got 1.0"),
        ({"smoothing": -1e-3}, "smoothing .* got -0.001"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=message):
        EnD2(**settings)
