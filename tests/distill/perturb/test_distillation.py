"""Distillation with perturbations: inputs of each loss, and resuming to the same bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from classroom import make_cnn, make_pictures, population
from enfold.data.batches import Order
from enfold.distill import distill
from enfold.distill.losses.kd import KD
from enfold.distill.objective import DistillationObjective
from enfold.distill.perturb.conf_ods import ConfODS
from enfold.distill.perturb.cutmix import CutMix
from enfold.distill.perturb.cutmix_mixup import CutMixMixup
from enfold.distill.perturb.gaussian import Gaussian
from enfold.distill.perturb.mixup import Mixup
from enfold.distill.perturb.ods import ODS
from enfold.distill.perturb.tdiv_sdiv import TDivSDiv
from enfold.distill.perturbation import Perturbation
from enfold.distill.teacher import Teacher
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.train import TrainConfig
from enfold.train.objective import StepContext
from students import best

PERTURBATIONS = [Gaussian(), ODS(), ConfODS(), TDivSDiv(), Mixup(), CutMix(), CutMixMixup()]
every = pytest.mark.parametrize("perturb", PERTURBATIONS, ids=lambda perturb: type(perturb).__name__)
PLAN = TrainConfig(epochs=1, batch_size=4, lr=0.02, select="last")


def states_equal(first: nn.Module, second: nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@every
def test_an_ensemble_learns_at_perturbed_inputs(perturb, pictures, snapshot):
    teachers = DeepEnsemble(population(make_cnn)).train()
    unchanged = snapshot(teachers)
    options = {"student": BatchEnsemble(best(teachers, pictures), 3), "loss": KD(alpha=0.9), "config": PLAN}
    student = distill(teachers, pictures, perturb=perturb, **options)
    assert isinstance(student, Ensemble)
    assert student.num_members == 3
    assert not student.training
    assert states_equal(student, distill(teachers, pictures, perturb=perturb, **options))
    assert not states_equal(student, distill(teachers, pictures, **options))
    assert unchanged()


@pytest.mark.slow
@pytest.mark.parametrize("perturb", [ODS(), TDivSDiv()], ids=lambda perturb: type(perturb).__name__)
def test_a_killed_training_resumes_to_the_same_bits(perturb, pictures, tmp_path, monkeypatch):
    teachers, file = DeepEnsemble(population(make_cnn)).eval(), tmp_path / "fold.safetensors"
    plan = PLAN.replace(epochs=2, augment=("flip",))
    student = BatchEnsemble(best(teachers, pictures), 3)
    run = partial(distill, teachers, pictures, student=student, loss=KD(alpha=0.9), perturb=perturb, config=plan)
    expected = run()
    steps: list[int] = []
    move = Perturbation.apply

    def killed(self, *args):
        steps.append(1)
        if len(steps) == 5:  # in the second epoch
            raise KeyboardInterrupt
        return move(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Perturbation, "apply", killed)
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=file)
    assert file.exists()
    steps.clear()
    with monkeypatch.context() as patched:
        patched.setattr(Perturbation, "apply", lambda self, *args: (steps.append(1), move(self, *args))[1])
        assert states_equal(expected, run(checkpoint=file))
    assert len(steps) == 3  # one epoch, not two


def test_a_checkpoint_belongs_to_one_perturbation(pictures, tmp_path):
    teachers, file = DeepEnsemble(population(make_cnn)).eval(), tmp_path / "student.safetensors"
    student = BatchEnsemble(best(teachers, pictures), 3)
    distill(teachers, pictures, student=student, perturb=ODS(), config=PLAN, checkpoint=file)
    with pytest.raises(ValueError, match="checkpoint"):
        distill(teachers, pictures, student=student, perturb=ODS(step=2.0), config=PLAN, checkpoint=file)


@every
def test_labels_are_learned_at_clean_inputs_unless_the_batch_is_replaced(perturb, pictures):
    teachers, student = DeepEnsemble(population(make_cnn)).eval(), DeepEnsemble(population(make_cnn, seed=7)).train()
    loss = KD(alpha=0.5)
    objective = DistillationObjective(loss, Teacher(teachers, pictures, loss.target), perturb)
    batch = next(Order(6).batches(pictures, 0))
    prepared = objective.for_batch(student, batch, StepContext(seed=3))
    assert not torch.equal(prepared.seen.inputs, batch.inputs)
    assert torch.equal(prepared.labelled.inputs, (prepared.seen if perturb.replaces_batch else batch).inputs)
    torch.testing.assert_close(prepared.target, loss.target(teachers(prepared.seen.inputs)).detach())
    again = objective.for_batch(student, batch, StepContext(seed=3))
    assert torch.equal(again.seen.inputs, prepared.seen.inputs)


@pytest.mark.parametrize(
    "perturb", [TDivSDiv(), Mixup(), CutMix(), CutMixMixup()], ids=lambda perturb: type(perturb).__name__
)
def test_each_member_may_have_its_own_batch(perturb, pictures):
    teachers, student = DeepEnsemble(population(make_cnn)).eval(), DeepEnsemble(population(make_cnn, seed=7)).train()
    loss = KD(alpha=0.5)
    objective = DistillationObjective(loss, Teacher(teachers, pictures, loss.target), perturb)
    batch = next(Order(4, range(3)).batches(pictures, 0))
    prepared = objective.for_batch(student, batch, StepContext())
    assert prepared.seen.inputs.shape == (3, 4, 2, 4, 4)
    assert prepared(student, batch).shape == (3,)


def test_one_network_learns_at_inputs_perturbed_by_teachers():
    student = distill(DeepEnsemble(population(make_cnn)), make_pictures(False), perturb=ODS(), config=PLAN)
    assert bool(torch.isfinite(torch.cat([value.flatten() for value in student.state_dict().values()])).all())
