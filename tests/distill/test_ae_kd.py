"""AE-KD: its weights, its gradients, and hints."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from enfold.data.batches import Batch, Order
from enfold.distill import distill
from enfold.distill.cached import CachedTeacher
from enfold.distill.losses.ae_kd import AEKD
from enfold.distill.losses.common.features import outputs_and_features, teacher_features
from enfold.distill.losses.kd import KD
from enfold.distill.objective import DistillationObjective
from enfold.distill.teacher import Teacher
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError, NonFiniteLoss
from enfold.evaluate import predict
from enfold.train import TrainConfig
from students import best, fresh

prop = settings(deadline=None, derandomize=True, max_examples=30)
PLAN = TrainConfig(epochs=3, batch_size=16, lr=0.02)


def logits_of_seed(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def losses_of(student: Tensor, teachers: Tensor, temperature: float) -> Tensor:
    """τ² KL of each teacher, (T,), by torch's own distributions."""
    kl = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=teachers / temperature),
        torch.distributions.Categorical(logits=student / temperature),
    )
    return temperature**2 * kl.mean(-1)


@prop
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.5, 10), tolerance=st.floats(0.34, 1))
def test_the_loss_and_its_gradient(seed, temperature, tolerance):
    """The weights are those of autograd's own gradients in the logits, and they are constants of the loss."""
    teachers, student = logits_of_seed(seed, 3, 5, 4), logits_of_seed(seed + 1, 5, 4).requires_grad_()
    method = AEKD(temperature=temperature, tolerance=tolerance)
    losses = losses_of(student, teachers, temperature)
    gradients = torch.stack([torch.autograd.grad(each, student, retain_graph=True)[0] for each in losses])  # (T, B, C)
    closed = temperature * ((student / temperature).softmax(-1) - (teachers / temperature).softmax(-1)) / 5
    torch.testing.assert_close(gradients, closed)
    weights = method.teacher_weights(gradients.sum(1)[:, None])[:, 0]  # (T,)
    loss = method.loss(student[None], method.target(teachers), 0.0)
    torch.testing.assert_close(loss, (weights * losses).sum()[None])
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    torch.testing.assert_close(gradient, (weights[:, None, None] * gradients).sum(0))
    common, mean = gradient.sum(0), gradients.mean(0).sum(0)
    assert common.norm() <= mean.norm() * (1 + 1e-9)


@prop
@given(seed=st.integers(0, 10**6), count=st.integers(1, 5))
def test_the_smallest_tolerance_is_the_mean_of_the_losses(seed, count):
    teachers, student = logits_of_seed(seed, count, 5, 4), logits_of_seed(seed + 1, 1, 5, 4)
    method = AEKD(tolerance=1 / count)
    found = method.loss(student, method.target(teachers), 0.0)
    torch.testing.assert_close(found, losses_of(student[0], teachers, 4.0).mean()[None])


def test_equal_teachers_are_knowledge_distillation():
    teachers, student = logits_of_seed(0, 1, 5, 4).expand(3, 5, 4), logits_of_seed(1, 1, 5, 4)
    method, plain = AEKD(), KD(temperature=4.0)
    expected = plain.loss(student, plain.target(teachers), 0.0)
    torch.testing.assert_close(method.loss(student, method.target(teachers), 0.0), expected)


@pytest.mark.parametrize("normalise", [False, True])
def test_opposite_gradients_cancel(normalise):
    gradient = torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)
    gradients = torch.stack([gradient, -3 * gradient])[:, None]  # (T, S = 1, C)
    weights = AEKD(tolerance=1.0, normalise=normalise).teacher_weights(gradients)
    torch.testing.assert_close(weights[:, 0], torch.tensor([0.75, 0.25], dtype=torch.float64))
    torch.testing.assert_close((weights[..., None] * gradients).sum(0), torch.zeros(1, 3).double(), rtol=0, atol=1e-12)


def test_two_teachers_in_closed_form():
    gradients = logits_of_seed(3, 2, 6, 4)  # (T, S, C): six students
    one, other = gradients
    best = ((other * other).sum(-1) - (one * other).sum(-1)) / (one - other).square().sum(-1)
    expected = torch.stack([best.clamp(0, 1), 1 - best.clamp(0, 1)])
    torch.testing.assert_close(AEKD(tolerance=1.0).teacher_weights(gradients), expected, rtol=0, atol=1e-9)
    capped = torch.stack([best.clamp(0.4, 0.6), 1 - best.clamp(0.4, 0.6)])
    torch.testing.assert_close(AEKD().teacher_weights(gradients), capped, rtol=0, atol=1e-9)


def test_normalised_gradients_by_hand():
    """Orthogonal gradients of lengths 1 and 3: weights 1/2 of the directions, so 1 to 1/3 of the gradients."""
    gradients = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)[:, None]
    expected = torch.tensor([0.75, 0.25], dtype=torch.float64)
    torch.testing.assert_close(AEKD(tolerance=1.0, normalise=True).teacher_weights(gradients)[:, 0], expected)
    plain = torch.tensor([0.9, 0.1], dtype=torch.float64)
    torch.testing.assert_close(AEKD(tolerance=1.0).teacher_weights(gradients)[:, 0], plain)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("zeros", [1, 3])
def test_zero_gradients(normalise, zeros):
    gradients = logits_of_seed(0, 3, 1, 4)
    gradients[:zeros] = 0.0
    weights = AEKD(normalise=normalise).teacher_weights(gradients)
    assert bool(torch.isfinite(weights).all())
    torch.testing.assert_close(weights.sum(0), torch.ones(1).double())


@pytest.mark.parametrize("own", [True, False])
def test_each_student_has_its_own_weights(own):
    students = logits_of_seed(0, 3, 5, 4)
    teachers = logits_of_seed(1, 2, 3, 5, 4) if own else logits_of_seed(1, 2, 5, 4)
    method = AEKD()
    target = method.target(teachers)
    together = method.loss(students, target, 0.0)
    assert together.shape == (3,)
    for index in range(3):
        alone = method.loss(students[index : index + 1], method.select_target(target, index, own), 0.0)
        torch.testing.assert_close(together[index : index + 1], alone)


def test_labels_and_teachers_have_separate_weights(members, data):
    """Equation (4) as an objective: γ CE + α Σ a ℓ."""
    method = AEKD(hard=0.3, alpha=0.7)
    assert AEKD().weights == (1.0, 0.9)
    assert method.weights == (0.3, 0.7)
    student, batch = members.member(0).eval(), next(Order(16).batches(data, 0))
    teacher = Teacher(members.eval(), data, method.target)
    found = DistillationObjective(method, teacher)(student, batch)
    logits = student(batch.inputs)[None]
    soft = method.loss(logits, teacher(batch), 0.0)
    torch.testing.assert_close(found, 0.3 * F.cross_entropy(logits[0], batch.targets) + 0.7 * soft)


@pytest.mark.parametrize("kind", ["plain", "normed"])
@pytest.mark.parametrize("inplace", [True, False])
def test_features_are_the_outputs_of_the_layer(networks, data, kind, inplace):
    """For members and for one network, also if the next layer works in place."""

    class Hidden(networks[kind]):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.inner(inputs)
            return self.head(hidden.tanh_() if inplace else hidden.tanh())

    members = DeepEnsemble([Hidden() for _ in range(3)]).eval()
    batch = Batch(data.train.inputs[:5], data.train.labels[:5])
    logits, features = outputs_and_features(members, batch, "inner")
    torch.testing.assert_close(logits, members(batch.inputs))
    for index, member in enumerate(members):
        torch.testing.assert_close(features[index], member.inner(batch.inputs))
        torch.testing.assert_close(outputs_and_features(member, batch, "inner")[1][0], features[index])
        assert not member.inner._forward_hooks
    asked = teacher_features(Teacher(MixedEnsemble(members.networks()), data), batch.inputs, "inner")
    torch.testing.assert_close(asked, features)
    assert not asked.requires_grad


def test_the_loss_of_features():
    """Equations (6) and (7), the gradients against autograd."""
    given, wanted = logits_of_seed(0, 1, 5, 2, 3).requires_grad_(), logits_of_seed(1, 4, 5, 2, 3)
    method = AEKD(feature="inner")
    losses = (given - wanted).square().mean((1, 2, 3))  # (T,)
    gradients = torch.stack([torch.autograd.grad(each, given, retain_graph=True)[0][0].sum(0) for each in losses])
    weights = method.teacher_weights(gradients.flatten(1)[:, None])[:, 0]
    found = method.feature_loss(given, wanted)
    torch.testing.assert_close(found, (weights * losses).sum()[None])
    (gradient,) = torch.autograd.grad(found.sum(), given)
    torch.testing.assert_close(gradient[0].sum(0), torch.einsum("t,tij->ij", weights, gradients))
    own = method.feature_loss(given, wanted[:, None])  # each student with a batch of its own
    torch.testing.assert_close(own, found)


@pytest.mark.parametrize("order", ["own", "shared"])
def test_a_hint_is_added_to_the_loss(members, data, order):
    plain, hinted = (AEKD(feature=feature, beta=0.3) for feature in (None, "inner"))
    student = members.member(0).eval()
    batch = next(Order(16, range(1) if order == "own" else None).batches(data, 0))
    teacher = Teacher(members.eval(), data, plain.target)
    inputs = batch.inputs[0] if batch.own else batch.inputs
    given = student.inner(inputs)[None]
    hint = hinted.feature_loss(given, teacher_features(teacher, inputs, "inner"))
    found = DistillationObjective(hinted, teacher)(student, batch)
    torch.testing.assert_close(found, DistillationObjective(plain, teacher)(student, batch) + 0.3 * hint)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
@pytest.mark.parametrize("size", [None, 2])
def test_the_feature_loss_reduces_the_distance(members, data, size, snapshot):
    """A large weight on the features, for one network and for an ensemble."""
    unchanged = snapshot(members)
    plan = PLAN.replace(epochs=25, select="last")
    loss = AEKD(hard=0.0, alpha=0.0, feature="inner", tolerance=0.25, beta=5.0)
    start = {"init": "random"} if size is None else {"student": BatchEnsemble(fresh(members), size)}
    batch = Batch(data.train.inputs, data.train.labels)
    wanted = outputs_and_features(members[:].eval(), batch, "inner")[1].mean(0).detach()

    def distance(epochs: int) -> float:
        student = distill(members, data, loss=loss, config=plan, epochs=epochs, **start).eval()
        return float((outputs_and_features(student, batch, "inner")[1].detach() - wanted).square().mean())

    assert distance(25) < 0.5 * distance(0)
    assert unchanged()


def test_a_hint_resumes(members, data, tmp_path):
    file = tmp_path / "hint.safetensors"
    first, again = (
        distill(members, data, loss=AEKD(feature="inner"), init="random", config=PLAN, checkpoint=file)
        for _ in range(2)
    )
    assert torch.equal(first.head.weight, again.head.weight)
    with pytest.raises(EnfoldError, match="checkpoint must belong"):
        distill(members, data, loss=AEKD(feature="head"), config=PLAN, init="random", checkpoint=file)


def test_a_student_learns(members, data):
    """Without labels it is the ensemble that the student comes closer to."""
    before, after = (
        distill(members, data, loss=AEKD(hard=0.0), config=PLAN.replace(epochs=epochs, select="last"), init="random")
        for epochs in (0, 30)
    )
    ensemble = predict(members, data.train).mean().log_probs[0]
    first, last = (
        F.kl_div(predict(one, data.train).log_probs[0], ensemble, reduction="batchmean", log_target=True)
        for one in (before, after)
    )
    assert last < 0.5 * first


def test_an_ensemble_learns(members, data):
    student = distill(members, data, loss=AEKD(), config=PLAN, student=BatchEnsemble(best(members, data), 2))
    assert student.num_members == 2
    assert bool(torch.isfinite(student(data.test.inputs)).all())


def test_a_diverged_student_raises_an_error(members, data):
    with pytest.raises(NonFiniteLoss, match="finite"):
        distill(members, data, loss=AEKD(), config=PLAN.replace(optimizer="sgd", lr=1e6, epochs=5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerance": 0.0}, "tolerance .* got 0.0"),
        ({"tolerance": 1.1}, "tolerance .* got 1.1"),
        ({"tolerance": math.nan}, "tolerance .* got nan"),
        ({"hard": -1.0}, "hard .* got -1.0"),
        ({"beta": math.inf}, "beta .* got inf"),
        ({"alpha": 2.0}, "alpha .* got 2.0"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=message):
        AEKD(**settings)


def test_a_tolerance_that_leaves_no_weights(members, data):
    message = r"tolerance .* \[1/4, 1\] .* got 0.2"
    with pytest.raises(EnfoldError, match=message):
        distill(members, data, loss=AEKD(tolerance=0.2), config=PLAN)


def test_invalid_hints(members, data, networks):
    with pytest.raises(EnfoldError, match=r"feature .* got 'iner', did you mean 'inner'"):
        distill(members, data, loss=AEKD(feature="iner"), config=PLAN)
    with pytest.raises(EnfoldError, match=r"feature .* 'inner' gives \(3,\) in the student and \(6,\) in the teachers"):
        distill(members, data, loss=AEKD(feature="inner"), config=PLAN, student=lambda: networks["plain"](width=3))
    mixed = MixedEnsemble([networks["plain"](), networks["plain"](width=3)])
    with pytest.raises(EnfoldError, match=r"feature .* all teachers"):
        distill(mixed, data, loss=AEKD(feature="inner"), config=PLAN, student=networks["plain"])
    recorded = CachedTeacher(torch.zeros(4, 40, 3))
    with pytest.raises(EnfoldError, match=r"feature .* CachedTeacher"):
        distill(recorded, data, loss=AEKD(feature="inner"), config=PLAN, student=networks["plain"])


def test_layers_without_features_are_refused(data):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.pair, self.head = nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.pair(self.inner(self.inner(inputs)))[0])

    members = DeepEnsemble([Twice() for _ in range(2)])
    with pytest.raises(EnfoldError, match=r"feature .* 'inner' ran 4 times for 2 networks"):
        distill(members, data, loss=AEKD(feature="inner"), config=PLAN)
    with pytest.raises(EnfoldError, match=r"feature .* 'pair' returns tuple"):
        distill(members, data, loss=AEKD(feature="pair"), config=PLAN)


def test_an_ensemble_without_single_members(data, networks):
    members = DeepEnsemble([networks["normed"]() for _ in range(2)])
    with pytest.raises(EnfoldError, match=r"feature .* got a BatchEnsemble"):
        distill(
            members,
            data,
            loss=AEKD(feature="inner"),
            config=PLAN,
            student=BatchEnsemble(best(members, data), 2, batch_norm="joint"),
        )
