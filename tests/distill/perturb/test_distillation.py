"""Distillation with perturbations: what is learned where, and that a killed training goes on to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from students import best, fresh
from classroom import make_cnn, make_pictures, population
from enfold.data.batches import Order
from enfold.distill import distill
from enfold.distill.objective import DistillationObjective
from enfold.distill.losses.kd import KD
from enfold.distill.perturb.conf_ods import ConfODS
from enfold.distill.perturb.gaussian import Gaussian
from enfold.distill.perturb.ods import ODS
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.distill.perturbation import Perturbation
from enfold.distill.teacher import Teacher
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.train import TrainConfig
from enfold.train.objective import StepContext

PERTURBATIONS = [Gaussian(), ODS(), ConfODS(), TDivSDiv()]
every = pytest.mark.parametrize("perturb", PERTURBATIONS, ids=lambda perturb: type(perturb).__name__)
PLAN = TrainConfig(epochs=1, batch_size=4, lr=0.02, select="last")


def states_equal(first: nn.Module, second: nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@every
def test_a_share_learns_at_moved_inputs(perturb, pictures, snapshot):
    teachers = DeepEnsemble(population(make_cnn)).train()
    unchanged = snapshot(teachers)
    fold = KD(alpha=0.9, share=BatchEnsemble(3), perturb=perturb, plan=PLAN)
    student = fold(teachers, pictures)
    assert isinstance(student, Ensemble)
    assert student.num_members == 3
    assert not student.training
    assert states_equal(student, fold(teachers, pictures))
    assert not states_equal(student, distill(teachers, pictures, loss=KD(alpha=0.9), config=PLAN, student=BatchEnsemble(best(teachers, pictures), 3)))
    assert unchanged()


@pytest.mark.parametrize("perturb", [ODS(), TDivSDiv()], ids=lambda perturb: type(perturb).__name__)
def test_a_killed_training_goes_on_to_the_same_bits(perturb, pictures, tmp_path, monkeypatch):
    teachers, file = DeepEnsemble(population(make_cnn)).eval(), tmp_path / "fold.safetensors"
    plan = PLAN.replace(epochs=2, augment=("flip",))
    fold = KD(alpha=0.9, share=BatchEnsemble(3), perturb=perturb, plan=plan)
    expected = fold(teachers, pictures)
    steps: list[int] = []
    move = Perturbation.__call__

    def killed(self, *args):
        steps.append(1)
        if len(steps) == 5:  # in the second epoch
            raise KeyboardInterrupt
        return move(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Perturbation, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            fold(teachers, pictures, checkpoint=file)
    assert file.exists()
    steps.clear()
    with monkeypatch.context() as patched:
        patched.setattr(Perturbation, "__call__", lambda self, *args: (steps.append(1), move(self, *args))[1])
        assert states_equal(expected, fold(teachers, pictures, checkpoint=file))
    assert len(steps) == 3  # one epoch, not two


def test_a_checkpoint_belongs_to_one_perturbation(pictures, tmp_path):
    teachers, file = DeepEnsemble(population(make_cnn)).eval(), tmp_path / "fold.safetensors"
    distill(teachers, pictures, perturb=ODS(), config=PLAN, student=BatchEnsemble(best(teachers, pictures), 3), checkpoint=file)
    with pytest.raises(ValueError, match="checkpoint"):
        distill(teachers, pictures, perturb=ODS(step=2.0), config=PLAN, student=BatchEnsemble(best(teachers, pictures), 3), checkpoint=file)


@every
def test_labels_are_learned_at_clean_inputs_unless_the_batch_is_replaced(perturb, pictures):
    teachers, student = DeepEnsemble(population(make_cnn)).eval(), DeepEnsemble(population(make_cnn, seed=7)).train()
    fold = KD(alpha=0.5, perturb=perturb)
    lessons = DistillationObjective(fold, Teacher(teachers, pictures, fold.target), perturb)
    batch = next(Order(6).batches(pictures, 0))
    lesson = lessons.for_batch(student, batch, StepContext(seed=3))
    assert not torch.equal(lesson.taught.inputs, batch.inputs)
    assert torch.equal(lesson.clean.inputs, lesson.taught.inputs if perturb.replaces else batch.inputs)
    torch.testing.assert_close(lesson.target, fold.target(teachers(lesson.taught.inputs)).detach())
    again = lessons.for_batch(student, batch, StepContext(seed=3))
    assert torch.equal(again.taught.inputs, lesson.taught.inputs)


def test_each_member_may_have_its_own_batch(pictures):
    teachers, student = DeepEnsemble(population(make_cnn)).eval(), DeepEnsemble(population(make_cnn, seed=7)).train()
    fold = KD(perturb=TDivSDiv())
    lessons = DistillationObjective(fold, Teacher(teachers, pictures, fold.target), fold.perturb)
    batch = next(Order(4, range(3)).batches(pictures, 0))
    lesson = lessons.for_batch(student, batch, StepContext())
    assert lesson.taught.inputs.shape == (3, 4, 2, 4, 4)
    assert lesson(student, batch).shape == (3,)


def test_by_name_and_settings(pictures):
    fold = KD(perturb={"method": "tdiv-sdiv", "divergence": "js", "step": 2.0})
    assert fold.perturb == TDivSDiv(step=2.0, divergence="js")
    assert KD(perturb="conf_ods").perturb == ConfODS()


def test_one_network_learns_at_inputs_moved_by_teachers_alone():
    student = distill(DeepEnsemble(population(make_cnn)), make_pictures(False), perturb=ODS(), config=PLAN)
    assert bool(torch.isfinite(torch.cat([value.flatten() for value in student.state_dict().values()])).all())
