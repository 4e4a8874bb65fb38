"""Regression as the target of students: mixtures of teachers and divergences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from enfold.errors import UnsupportedOutput
from enfold.tasks.regression import Regression
from regression_outputs import LEVELS, rng


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_the_moments_are_those_of_samples_of_the_mixture(seed, T):
    g = rng(seed)
    outputs = torch.randn(T, 1, 2, generator=g, dtype=torch.float64)
    task = Regression(head="gaussian", variance="log")
    mean, aleatoric, epistemic = task.mixture(task.rows(outputs))[0]
    chosen = torch.randint(T, (200_000,), generator=g)
    noise = torch.randn(len(chosen), generator=g, dtype=torch.float64)
    samples = outputs[chosen, 0, 0] + noise * (outputs[chosen, 0, 1] / 2).exp()
    std = samples.std().item()
    assert mean.item() == pytest.approx(samples.mean().item(), abs=0.02 * std)
    assert (aleatoric + epistemic).item() == pytest.approx(samples.var().item(), rel=0.05)


def test_the_law_of_total_variance_nests():
    """An ensemble of networks with their own epistemic variance, in groups or all at once."""
    members = torch.randn(6, 4, 2, generator=rng(), dtype=torch.float64)
    task = Regression(head="gaussian", variance="log")
    whole = task.mixture(task.rows(members))
    groups = torch.stack([task.mixture(task.rows(group)) for group in members.split(2)])  # (3, N, 3)
    uncertainty = Regression(head="uncertainty", variance="variance")
    torch.testing.assert_close(uncertainty.mixture(uncertainty.rows(groups)), whole)


def test_the_mixture_of_points_and_quantiles():
    points = torch.randn(5, 7, 1, generator=rng())
    moments = Regression().mixture(points)
    torch.testing.assert_close(moments[:, 0], points.mean(0)[:, 0])
    torch.testing.assert_close(moments[:, 2], points.var(0, correction=0)[:, 0])
    assert not moments[:, 1].any()
    normal = Normal(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.5]))
    values = torch.stack([normal.icdf(torch.tensor(level)) for level in LEVELS], -1)[None]
    task = Regression(quantiles=LEVELS)
    found = task.mixture(values)
    assert found.shape == (2, 6)
    torch.testing.assert_close(found[:, :3], torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.25, 0.0]]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[:, 3:], values[0])


def test_the_target_of_one_teacher_is_a_mixture_of_one():
    values = torch.randn(3, 5, 2, generator=rng())
    task = Regression(head="gaussian")
    found = task.member_targets(values)
    assert found.shape == (3, 5, 3)
    torch.testing.assert_close(found[1], torch.stack([values[1, :, 0], values[1, :, 1].exp(), torch.zeros(5)], -1))


def mixture_of_four(N=6):
    teacher = Regression(head="gaussian", variance="log")
    return teacher.mixture(torch.randn(4, N, 2, generator=rng(3)))


def test_divergences_of_students():
    target = mixture_of_four()
    mean, aleatoric, epistemic = target.unbind(-1)
    students = torch.randn(2, 6, 3, generator=rng(4))
    point = Regression().divergence(students[..., :1], target)
    torch.testing.assert_close(point, (students[..., 0] - mean).square().mean(1))
    gaussian = Regression(head="gaussian").divergence(students[..., :2], target)
    own = Normal(students[..., 0], (students[..., 1] / 2).exp())
    torch.testing.assert_close(gaussian, kl_divergence(Normal(mean, (aleatoric + epistemic).sqrt()), own).mean(1))
    uncertainty = Regression(head="uncertainty").divergence(students, target)
    ratio = epistemic / students[..., 2].exp()
    expected = kl_divergence(Normal(mean, aleatoric.sqrt()), own) + (ratio - 1 - ratio.log()) / 2
    torch.testing.assert_close(uncertainty, expected.mean(1))
    own_targets = torch.stack([target, target])
    torch.testing.assert_close(Regression(head="uncertainty").divergence(students, own_targets), uncertainty)


def test_a_perfect_student_has_no_divergence():
    target = mixture_of_four()
    mean, a, e = target.unbind(-1)
    perfect = {
        "point": mean[:, None],
        "gaussian": torch.stack([mean, (a + e).log()], -1),
        "uncertainty": torch.stack([mean, a.log(), e.log()], -1),
    }
    for head, values in perfect.items():
        task = Regression(head=head)
        assert task.divergence(values[None], target).item() == pytest.approx(0, abs=1e-6)
        worse = task.divergence((values + 0.3 * torch.randn(values.shape, generator=rng()))[None], target)
        assert worse.item() > 1e-3


def test_students_of_quantiles():
    task = Regression(quantiles=LEVELS)
    teachers = torch.randn(3, 5, 3, generator=rng()).sort(-1).values
    target = task.mixture(teachers)
    students = torch.randn(2, 5, 3, generator=rng(1))
    expected = (students - teachers.mean(0)).square().mean((1, 2))
    torch.testing.assert_close(task.divergence(students, target), expected)
    target = mixture_of_four(5)
    mean, a, e = target.unbind(-1)
    wanted = torch.stack([Normal(mean, (a + e).sqrt()).icdf(torch.tensor(level)) for level in LEVELS], -1)
    torch.testing.assert_close(task.divergence(students, target), (students - wanted).square().mean((1, 2)))


def test_one_point_teacher_is_a_finite_target():
    target = Regression().mixture(torch.randn(1, 5, 1, generator=rng()))
    for head, width in [("gaussian", 2), ("uncertainty", 3)]:
        values = torch.randn(1, 5, width, generator=rng(1), requires_grad=True)
        loss = Regression(head=head).divergence(values, target)
        loss.sum().backward()
        assert torch.isfinite(loss).all()
        assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize(
    ("teacher", "out", "wanted", "head"),
    [
        (Regression(), (6, 1), (6,), "point"),
        (Regression(), (6, 2), (6,), "gaussian"),
        (Regression(), (6, 3), (6,), "uncertainty"),
        (Regression(), (6, 3), (6, 3), "point"),
        (Regression(head="gaussian"), (6, 2), (6, 1), "gaussian"),
        (Regression(head="gaussian"), (6, 2), (6, 2), "point"),
        (Regression(head="gaussian"), (6, 12), (6, 4), "uncertainty"),
        (Regression(head="gaussian", axis=1), (6, 1, 4, 5), (6, 4, 5), "point"),
        (Regression(head="gaussian", axis=1), (6, 3, 4, 5), (6, 4, 5), "uncertainty"),
        (Regression(head="gaussian", axis=1), (6, 4, 5), (6, 4, 5), "point"),
        (Regression(quantiles=LEVELS), (6, 3), (6,), "quantiles"),
        (Regression(quantiles=LEVELS), (6, 2), (6,), "gaussian"),
        (Regression(quantiles=LEVELS), (6, 4, 3), (6, 4), "quantiles"),
        (Regression(quantiles=LEVELS), (6, 8), (6, 4), "gaussian"),
    ],
)
def test_the_head_of_a_student_follows_from_its_outputs(teacher, out, wanted, head):
    student = teacher.for_outputs(torch.zeros(2, *out), torch.zeros(wanted))
    assert student.head == head
    rows = student.flatten(torch.ones(2, *out), torch.zeros(wanted))
    assert rows.values.shape[1] == torch.zeros(wanted).numel()


def test_a_student_without_a_head_is_refused():
    with pytest.raises(UnsupportedOutput, match=r"\(6, 5\).*\(6,\)"):
        Regression(head="gaussian").for_outputs(torch.zeros(1, 6, 5), torch.zeros(6))
