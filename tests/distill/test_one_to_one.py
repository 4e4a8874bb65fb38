"""One-to-one distillation: pairs of teachers and students for any efficient ensemble."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from enfold.data.batches import Order
from enfold.distill import distill
from enfold.distill.cached import CachedTeacher
from enfold.distill.losses.kd import KD
from enfold.distill.losses.one_to_one import OneToOne
from enfold.distill.objective import DistillationObjective
from enfold.distill.teacher import Teacher
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.hydra_ensemble import HydraEnsemble
from enfold.ensembles.mimo import MIMO
from enfold.ensembles.packed_ensemble import PackedEnsemble
from enfold.ensembles.tree_net import TreeNet
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.saving import load, save
from enfold.train import TrainConfig
from enfold.train.backward import backward
from students import best

prop = settings(deadline=None, derandomize=True, max_examples=15)
alike = pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
plain = pytest.mark.parametrize("members", ["plain"], indirect=True)
PLAN = TrainConfig(epochs=2, batch_size=16, lr=0.02, select="last")


def logits_of_seed(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@prop
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.3, 20), size=st.integers(1, 4))
def test_the_loss_and_its_gradient_in_closed_form(seed, temperature, size):
    """τ² KL(t_m || p_m), whose gradient is τ (p_m(τ) - t_m(τ)) over the batch size."""
    method = OneToOne(temperature=temperature)
    students, teachers = logits_of_seed(seed, size, 5, 4).requires_grad_(), logits_of_seed(seed + 1, size, 5, 4)
    losses = method.loss(students, method.target(teachers), 0.0)
    p, t = (students / temperature).softmax(-1), (teachers / temperature).softmax(-1)
    torch.testing.assert_close(losses, temperature**2 * (t * (t.log() - p.log())).sum(-1).mean(-1))
    losses.sum().backward()
    torch.testing.assert_close(students.grad, temperature * (p - t).detach() / 5)


@prop
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.3, 20))
def test_one_pair_is_knowledge_distillation(seed, temperature):
    student, teacher = logits_of_seed(seed, 1, 5, 4), logits_of_seed(seed + 1, 1, 5, 4)
    found = [
        method.loss(student, method.target(teacher), 0.0)
        for method in (OneToOne(temperature=temperature), KD(temperature=temperature))
    ]
    torch.testing.assert_close(*found)


@prop
@given(seed=st.integers(0, 10**6), order=st.permutations(range(4)))
def test_the_loss_is_invariant_to_the_order_of_pairs(seed, order):
    method = OneToOne(temperature=3.0)
    students, teachers = logits_of_seed(seed, 4, 5, 3), logits_of_seed(seed + 1, 4, 5, 3)
    losses = method.loss(students, method.target(teachers), 0.0)
    torch.testing.assert_close(method.loss(students[order], method.target(teachers[order]), 0.0), losses[order])
    if order != [0, 1, 2, 3]:
        assert not torch.allclose(method.loss(students[order], method.target(teachers), 0.0), losses[order])


@pytest.mark.parametrize("own", [True, False])
def test_students_are_trained_equally_one_by_one_and_together(own):
    """A target is (T, B, K), or (T, S, B, K) where students have their own batches; K is the classes and 1."""
    method = OneToOne(temperature=2.0)
    students = logits_of_seed(0, 3, 5, 4)
    answers = logits_of_seed(1, 3, 3 * 5, 4) if own else logits_of_seed(1, 3, 5, 4)
    target = method.target(answers).view(3, 3, 5, 5) if own else method.target(answers)
    together = method.loss(students, target, 0.0)
    alone = [method.loss(students[m : m + 1], method.select_target(target, m, own), 0.0) for m in range(3)]
    torch.testing.assert_close(together, torch.cat(alone))
    pairs = [method.target(answers)[m].view(-1, 5, 5)[m if own else 0] for m in range(3)]
    expected = [method.loss(students[m : m + 1], pair[None], 0.0) for m, pair in enumerate(pairs)]
    torch.testing.assert_close(together, torch.cat(expected))


@plain
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("remembers", [True, False])
def test_engines_give_one_gradient(members, data, own, remembers):
    """Students run by the loop or stacked engine; logits cached or computed."""
    method, gradients = OneToOne(alpha=0.6, temperature=2.0), []
    teacher = Teacher(members.eval(), data, method.target, is_constant=remembers)
    batch = next(Order(16, range(4) if own else None).batches(data, 0))
    for engine in ("loop", "stacked"):
        student = BatchEnsemble(members.member(0), 4, engine=engine).train()
        losses = backward(student, batch, DistillationObjective(method, teacher))
        gradients.append([losses, *(parameter.grad for parameter in student.parameters())])
    assert len(gradients[0][0]) == 4
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


@alike
def test_the_default_student_is_a_batch_ensemble(members, data, tmp_path):
    student = distill(members, data, loss=OneToOne(), config=PLAN)
    assert type(student) is BatchEnsemble
    assert student.num_members == 4
    assert type(student.member(0)) is type(members.member(0))
    assert distill(members[:3], data, loss=OneToOne(), config=PLAN).num_members == 3
    save(student, tmp_path / "student.safetensors")
    again = load(tmp_path / "student.safetensors", lambda: members.member(0))
    torch.testing.assert_close(predict(again, data.test).log_probs, predict(student, data.test).log_probs)


@alike
@pytest.mark.parametrize("kind", [BatchEnsemble, HydraEnsemble, TreeNet, MIMO, PackedEnsemble])
def test_any_ensemble_can_learn(members, data, kind):
    student = distill(members, data, loss=OneToOne(), config=PLAN, student=kind(best(members, data), 4))
    assert type(student) is kind
    assert student.num_members == 4
    assert torch.isfinite(student(data.test.inputs)).all()


@pytest.mark.slow
@plain
def test_each_student_is_closest_to_its_own_teacher(members, data):
    plan = PLAN.replace(epochs=60, batch_size=40, lr=0.05, select="last")
    student = distill(
        members,
        data,
        loss=OneToOne(),
        config=plan,
        student=BatchEnsemble(best(members, data), 4, fast_grad_scale=4, spread=0.1),
    )
    ours, theirs = predict(student, data.train).log_probs, predict(members, data.train).log_probs
    apart = (theirs.exp()[:, None] * (theirs[:, None] - ours[None])).sum(-1).mean(-1)  # (T, S)
    assert apart.diagonal().mean() < 0.9 * apart[~torch.eye(4, dtype=bool)].mean()


def test_cached_teachers_can_teach(members, data, networks):
    with torch.no_grad():
        recorded = CachedTeacher(members.eval()(data.train.inputs))
    kind = type(members.member(0))
    learned, expected = (
        distill(teacher, data, loss=OneToOne(), student=kind, config=PLAN) for teacher in (recorded, members)
    )
    torch.testing.assert_close(predict(learned, data.test).log_probs, predict(expected, data.test).log_probs)


@pytest.mark.parametrize(("kind", "size"), [(BatchEnsemble, 3), (HydraEnsemble, 5)])
def test_every_student_needs_a_teacher(members, data, kind, size):
    with pytest.raises(EnfoldError, match=f"got 4 teachers and {size} students"):
        distill(members, data, loss=OneToOne(), config=PLAN, student=kind(best(members, data), size))


@alike
@plain
def test_a_weight_penalty_needs_no_student_to_be_given(members, data):
    plan, theirs = PLAN.replace(epochs=10, select="last"), members.expand()["head.weight"]
    tied, free = (
        distill(members, data, loss=OneToOne(), weight_penalty=tie, config=plan).expand()["head.weight"]
        for tie in (10.0, 0.0)
    )
    assert (tied - theirs).norm() < (free - theirs).norm()
