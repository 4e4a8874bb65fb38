"""Distillation: the invariants of its loss, its teacher, and the student it gives."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.batches import Batch, Order
from enfold.distill import distill, train_control
from enfold.distill.losses.common.divergence import as_target
from enfold.distill.losses.kd import KD, teacher_log_probs
from enfold.distill.objective import DistillationObjective
from enfold.distill.teacher import Teacher
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError, UnchangedWarning
from enfold.evaluate import best_member, predict
from enfold.metrics import nll, per_member
from enfold.train import TrainConfig, cross_entropy
from students import FixedTeacher, best

prop = settings(deadline=None, derandomize=True, max_examples=30)
REDUCTIONS = ("mean_softened_probs", "mean_probs_then_soften", "mean_logits")
PLAN = TrainConfig(epochs=3, batch_size=16, lr=0.02, select="last")


class Table(nn.Module):
    """A student with its parameters as logits for any inputs."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.logits


def lessons(
    teacher, alpha: float, temperature: float, smoothing: float = 0.0, **settings: object
) -> DistillationObjective:
    return DistillationObjective(KD(alpha=alpha, temperature=temperature, **settings), teacher, None, smoothing)


def teacher_of(members, data: Data, temperature: float = 1.0, reduction: str = "mean_softened_probs", **settings):
    return Teacher(members, data, KD(temperature=temperature, reduction=reduction).target, **settings)


def loss_of(student: Tensor, target: Tensor, labels: Tensor, alpha: float, temperature: float, smoothing: float = 0.0):
    """The loss and its gradient with respect to the logits, for a teacher with `target` = log p_t(τ)."""
    table = Table(student)
    objective = lessons(FixedTeacher(as_target(target)), alpha, temperature, smoothing)
    losses = objective(table, Batch(torch.zeros(len(labels), 1, dtype=student.dtype), labels))
    losses.sum().backward()
    return losses.detach(), table.logits.grad


def logits_of_seed(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 1, 2, 3, 0])


@prop
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.3, 20))
def test_alpha_0_is_the_cross_entropy(seed, temperature):
    student, target = logits_of_seed(seed, 5, 4), logits_of_seed(seed + 1, 5, 4).log_softmax(-1)
    for smoothing in (0.0, 0.2):
        loss, _ = loss_of(student, target, LABELS, 0.0, temperature, smoothing)
        torch.testing.assert_close(loss[0], F.cross_entropy(student, LABELS, label_smoothing=smoothing))


@prop
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.3, 20))
def test_a_student_equal_to_the_teacher_has_zero_loss(seed, temperature):
    student = logits_of_seed(seed, 5, 4)
    target = teacher_log_probs(student[None], temperature, "mean_softened_probs")
    loss, gradient = loss_of(student, target, LABELS, 1.0, temperature)
    torch.testing.assert_close(loss, torch.zeros(1, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient, torch.zeros(5, 4, dtype=torch.float64), rtol=0, atol=1e-9)


@prop
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.3, 20), alpha=st.floats(0, 1))
def test_the_gradient_in_closed_form(seed, temperature, alpha):
    """d/dz of equation (1): (1 - α) (p_s - y) + α τ (p_s(τ) - p_t(τ)), each over the batch size."""
    student, target = logits_of_seed(seed, 5, 4), logits_of_seed(seed + 1, 5, 4).log_softmax(-1)
    _, gradient = loss_of(student, target, LABELS, alpha, temperature)
    hard = student.softmax(-1) - F.one_hot(LABELS, 4)
    soft = (student / temperature).softmax(-1) - target.exp()
    torch.testing.assert_close(gradient, ((1 - alpha) * hard + alpha * temperature * soft) / 5)


def test_a_high_temperature_matches_logits():
    student, teacher = logits_of_seed(0, 5, 4), logits_of_seed(1, 1, 5, 4)
    target = teacher_log_probs(teacher, 1e4, "mean_logits")
    _, gradient = loss_of(student, target, LABELS, 1.0, 1e4)
    difference = student - teacher[0]
    expected = (difference - difference.mean(-1, keepdim=True)) / 4 / 5
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


@prop
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.3, 20), reduction=st.sampled_from(REDUCTIONS))
def test_equal_teachers_are_one_teacher(seed, temperature, reduction):
    logits = logits_of_seed(seed, 1, 5, 4)
    expected = (logits[0] / temperature).log_softmax(-1)
    torch.testing.assert_close(teacher_log_probs(logits.expand(3, 5, 4), temperature, reduction), expected)


@prop
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.3, 20), reduction=st.sampled_from(REDUCTIONS))
def test_a_teacher_is_normalised_and_invariant_to_the_order_of_members(seed, temperature, reduction):
    logits = logits_of_seed(seed, 3, 5, 4)
    found = teacher_log_probs(logits, temperature, reduction)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(found, teacher_log_probs(logits[[2, 0, 1]], temperature, reduction))


def test_the_three_means_by_hand():
    """Two members that are sure of different classes, at τ = 2."""
    logits = torch.tensor([[[0.0, 4.0]], [[2.0, 0.0]]], dtype=torch.float64)
    one, other = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-1))
    found = [teacher_log_probs(logits, 2.0, reduction).exp()[0, 0].item() for reduction in REDUCTIONS]
    p = (1 / (1 + math.exp(4)) + 1 / (1 + math.exp(-2))) / 2
    assert found[0] == pytest.approx((one + other) / 2)
    assert found[1] == pytest.approx(math.sqrt(p) / (math.sqrt(p) + math.sqrt(1 - p)))
    assert found[2] == pytest.approx(1 / (1 + math.exp(0.5)))
    first, second, third = (teacher_log_probs(logits, 1.0, reduction) for reduction in REDUCTIONS)
    torch.testing.assert_close(first, second)
    assert not torch.allclose(first, third)


def test_each_student_has_its_own_loss():
    students, target = logits_of_seed(0, 3, 5, 4), logits_of_seed(1, 5, 4).log_softmax(-1)

    class Three(Ensemble):
        def __init__(self) -> None:
            super().__init__([], 3)

        def expand(self) -> State:
            raise EnfoldError("members do not exist as networks")

        def forward(self, inputs: Tensor) -> Tensor:
            return students

    together = lessons(FixedTeacher(as_target(target)), 0.7, 2.0)(Three(), Batch(torch.zeros(5, 1), LABELS))
    alone = [loss_of(student, target, LABELS, 0.7, 2.0)[0][0] for student in students]
    torch.testing.assert_close(together, torch.stack(alone))


@pytest.mark.parametrize("own", [True, False])
def test_cached_logits_equal_live_logits(members, data, own):
    members.eval()
    looked_up = teacher_of(members, data, 2.0, "mean_softened_probs", is_constant=True)
    computed = teacher_of(members, data, 2.0, "mean_softened_probs", is_constant=False)
    assert looked_up.targets is not None
    assert looked_up.targets.shape == (40, 3 + 1)
    assert computed.targets is None
    for batch in Order(16, range(2) if own else None).batches(data, 0):
        torch.testing.assert_close(looked_up(batch), computed(batch))


def test_a_loader_is_never_cached(members, data):
    loader = [(data.train.inputs, data.train.labels)]
    assert teacher_of(members, data.replace(train=loader), is_constant=True).targets is None


def test_cached_and_live_teachers_give_equal_students(members, data, monkeypatch):
    plan = PLAN.replace(optimizer="sgd")  # Adam makes steps of rounding errors before a batch norm
    looked_up = distill(members, data, config=plan)
    monkeypatch.setattr(Teacher, "__init__", uncached(Teacher.__init__))
    computed = distill(members, data, config=plan)
    for name, tensor in looked_up.state_dict().items():
        torch.testing.assert_close(tensor, computed.state_dict()[name], rtol=1e-4, atol=1e-5)


def uncached(make):
    def init(self, models, data, target, *, is_constant, folder, task, unseen):
        make(self, models, data, target, is_constant=False, task=task)

    return init


class Picture(nn.Module):
    """Counts its calls and records its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2)
        self.asked: list[tuple[int, bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.asked.append((len(images), self.training))
        return self.head(images.flatten(1))


@pytest.fixture
def pictures() -> Data:
    pixels = torch.randint(0, 256, (24, 1, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    split = Split(pixels, torch.arange(24) % 2)
    return Data(split, split[:8], split[:8], 2, (1, 4, 4))


@pytest.mark.parametrize("augment", [(), ("pad-crop", "flip")])
def test_augmented_images_are_not_cached(pictures, augment):
    """One pass over the part if the pictures stay; a pass in each epoch if they move; always in eval mode."""
    teacher = Picture()
    plan = PLAN.replace(epochs=3, augment=augment, select="last")
    distill(MixedEnsemble([teacher]).train(), pictures, student=Picture, config=plan)
    assert (
        sum(size for size, _ in teacher.asked) == (72 if augment else 24) + 2
    )  # two, to see that it knows the classes
    assert not any(training for _, training in teacher.asked)
    assert teacher.training


def test_teacher_and_student_have_the_same_augmented_images(pictures):
    members = DeepEnsemble([Picture()])
    teacher = teacher_of(members, pictures, 1.0, "mean_logits", is_constant=False)
    batch = next(Order(8, range(1), augment=("flip",)).batches(pictures, 0))
    loss = lessons(teacher, 1.0, 1.0)(members.member(0), batch)
    torch.testing.assert_close(loss, torch.zeros(1), rtol=0, atol=1e-6)


def test_teachers_get_no_gradient(members, data, snapshot):
    unchanged = snapshot(members.eval())
    teacher = teacher_of(members, data, 1.0, "mean_logits", is_constant=False)
    batch = next(Order(8).batches(data, 0))
    assert not teacher(batch).requires_grad
    lessons(teacher, 1.0, 1.0)(members.member(0), batch).sum().backward()
    assert all(parameter.grad is None for parameter in members.parameters())
    distill(members, data, config=PLAN)
    assert unchanged()


def test_a_student_approaches_the_ensemble(members, data):
    """At α = 1 the divergence to the ensemble decreases, and labels are not used."""
    wrong = data.replace(train=Split(data.train.inputs, (data.train.labels + 1) % 3))
    student = distill(members, wrong, config=PLAN.replace(epochs=60, select="last"), init="random")
    ensemble = predict(members, data.train).mean().log_probs[0]
    distances = [
        F.kl_div(predict(one, data.train).log_probs[0], ensemble, reduction="batchmean", log_target=True)
        for one in (student, *members.networks())
    ]
    assert distances[0] < min(distances[1:])


def test_a_random_start_differs_from_all_members(members, data):
    fresh = distill(members, data, config=PLAN.replace(epochs=0), init="random")
    from_member = distill(members, data, config=PLAN.replace(epochs=0))
    best = best_member(members, data)
    found = per_member(nll, predict(members, data.val))
    assert best == int(found.argmin())
    assert torch.equal(from_member.head.weight, members.member(best).head.weight)
    assert all(not torch.equal(fresh.head.weight, network.head.weight) for network in members.networks())
    other = distill(members, data, config=PLAN.replace(epochs=0, seed=5), init="random")
    assert not torch.equal(fresh.head.weight, other.head.weight)


def test_alpha_0_from_a_member_is_the_control(members, data):
    """Without the ensemble's term a student is a member trained on."""
    student = distill(members, data, loss=KD(alpha=0.0), config=PLAN)
    control = train_control(members, data, config=PLAN)
    for name, tensor in student.state_dict().items():
        torch.testing.assert_close(tensor, control.state_dict()[name])


def test_another_architecture_as_student(members, data, networks):
    student = distill(members, data, config=PLAN, student=lambda: networks["plain"](width=3))
    assert type(student) is networks["plain"]
    assert student.inner.weight.shape == (3, 4)
    again = distill(members, data, config=PLAN, student=lambda: networks["plain"](width=3))
    assert torch.equal(student.inner.weight, again.inner.weight)


def test_different_architectures_can_teach(networks, data, snapshot):
    teachers = MixedEnsemble([networks["plain"](), networks["normed"]()])
    unchanged = snapshot(teachers)
    student = distill(teachers, data, config=PLAN, student=networks["plain"])
    assert unchanged()
    assert type(student) is networks["plain"]
    with pytest.raises(EnfoldError, match=r"student=None .* MixedEnsemble"):
        distill(teachers, data, config=PLAN)


def test_the_checkpoint_of_other_teachers_is_refused(members, data, tmp_path):
    file = tmp_path / "distill.safetensors"
    distill(members, data, config=PLAN, init="random", checkpoint=file)
    for other in (
        lambda: distill(members[:3], data, config=PLAN, init="random", checkpoint=file),
        lambda: distill(members, data, loss=KD(alpha=0.5), config=PLAN, init="random", checkpoint=file),
        lambda: distill(members, data, loss=KD(reduction="mean_logits"), config=PLAN, init="random", checkpoint=file),
    ):
        with pytest.raises(EnfoldError, match="checkpoint"):
            other()
    again = distill(members, data, config=PLAN, init="random", checkpoint=file)
    assert torch.isfinite(again.head.weight).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.5}, "alpha .* got 1.5"),
        ({"alpha": math.nan}, "alpha .* got nan"),
        ({"alpha": True}, "alpha .* got True"),
        ({"alpha": "a"}, "alpha .* got 'a'"),
        ({"temperature": 0.0}, "temperature .* got 0.0"),
        ({"temperature": math.nan}, "temperature .* got nan"),
        ({"temperature": math.inf}, "temperature .* got inf"),
        ({"reduction": "median"}, "reduction .* got 'median'"),
        ({"fit": "mean"}, "fit .* got 'mean'"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=message):
        KD(**settings)


@pytest.mark.parametrize("cached", [True, False])
def test_a_diverged_teacher_is_named(members, data, cached):
    with torch.no_grad():
        members.expand()["head.weight"][2] = math.nan
    loader = data.replace(train=[(data.train.inputs, data.train.labels)])
    with pytest.raises(EnfoldError, match="teacher must have finite outputs"):
        distill(members, data if cached else loader, config=PLAN, student=lambda: nn.Linear(4, 3))


def test_the_cross_entropy_of_the_plan_is_used(members, data):
    """A plan's label smoothing holds for the labels' part of the loss."""
    student = members.member(0).eval()
    batch = next(Order(16).batches(data, 0))
    teacher = teacher_of(members.eval(), data, 1.0, "mean_logits", is_constant=True)
    mixed = lessons(teacher, 0.25, 1.0, 0.3)(student, batch)
    soft, hard = lessons(teacher, 1.0, 1.0)(student, batch), cross_entropy(0.3)(student, batch)
    torch.testing.assert_close(mixed, 0.25 * soft + 0.75 * hard)


RUINOUS = PLAN.replace(lr=50.0, select="best")


def test_an_unchanged_student_gives_a_warning_with_the_member(members, data):
    with pytest.warns(UnchangedWarning, match=f"member {best_member(members, data)}"):
        student = distill(members, data, config=RUINOUS)
    start = members.member(best_member(members, data))
    assert all(torch.equal(one, other) for one, other in zip(student.parameters(), start.parameters(), strict=True))


def test_unchanged_ensembles_and_inits_give_a_warning(members, data):
    with pytest.warns(UnchangedWarning, match="student"):
        distill(members, data, config=RUINOUS, student=BatchEnsemble(best(members, data), 2))
    with pytest.warns(UnchangedWarning, match="init"):
        distill(members, data, init=members.member(0), config=RUINOUS)


def test_untrained_students_and_last_epochs_give_no_warning(members, data):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnchangedWarning)
        untrained = distill(members, data, config=PLAN.replace(epochs=0))
        trained = distill(members, data, config=RUINOUS.replace(select="last", lr=0.1))
    start = best(members, data)
    assert all(torch.equal(*each) for each in zip(untrained.parameters(), start.parameters(), strict=True))
    assert not all(torch.equal(*each) for each in zip(trained.parameters(), start.parameters(), strict=True))
