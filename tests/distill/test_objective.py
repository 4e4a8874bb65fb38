"""The objective of a distillation: each student's labels are smoothed by its own amount, together or one by one."""

import pytest
import torch
from torch import Tensor

from enfold.data.batches import Batch
from enfold.distill import distill
from enfold.distill.losses.common.divergence import as_target
from enfold.distill.losses.kd import KD
from enfold.distill.objective import DistillationObjective, SeparableBatchLoss
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.train import TrainConfig, cross_entropy
from enfold.train.objective import StepContext
from students import FixedTeacher, best

BATCH = Batch(torch.zeros(6, 2), torch.arange(6) % 3)
SMOOTHING = (0.0, 0.1, 0.4)


class Table(Ensemble):
    """Students with given logits for any inputs."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__([], len(logits))
        self.logits = logits

    def expand(self) -> State:
        raise EnfoldError("members do not exist as networks")

    def forward(self, inputs: Tensor) -> Tensor:
        return self.logits


@pytest.mark.parametrize("fitted", ["members", "ensemble"])
def test_smoothing_a_student(fitted):
    source = torch.Generator().manual_seed(0)
    logits, target = torch.randn(3, 6, 3, generator=source), torch.randn(6, 3, generator=source).log_softmax(-1)
    loss = KD(alpha=0.3, fit=fitted)
    objective = DistillationObjective(loss, FixedTeacher(as_target(target)), None, SMOOTHING)
    found = objective(Table(logits), BATCH)
    soft = 0.3 * loss.loss(logits, as_target(target), 0.0)
    hard = torch.cat([cross_entropy(each).of_outputs(logits[k : k + 1], BATCH) for k, each in enumerate(SMOOTHING)])
    torch.testing.assert_close(found, soft + 0.7 * hard)
    prepared = objective.for_batch(Table(logits), BATCH, StepContext())
    if isinstance(prepared, SeparableBatchLoss):
        alone = [prepared.member(k)(Table(logits[k : k + 1]), BATCH) for k in range(3)]
        torch.testing.assert_close(found, torch.cat(alone))


def test_there_are_as_many_as_students(pupils):
    members, data = pupils
    for student, count in ((None, 1), (BatchEnsemble(best(members, data), 2), 2)):
        with pytest.raises(EnfoldError, match=f"label_smoothing .* {count} members, got 3"):
            distill(members, data, loss=KD(alpha=0.5), student=student, epochs=1, label_smoothing=SMOOTHING)


@pytest.fixture
def pupils():
    from classroom import make_mlp, make_pictures

    return DeepEnsemble(make_mlp, 2, seed=0), make_pictures()


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_an_ensemble_is_trained_with_one_each(pupils):
    """Members that start as one part where nothing but their smoothing differs."""
    members, data = pupils
    plan = TrainConfig(epochs=2, label_smoothing=(0.0, 0.5), select="last", lr=0.05)
    student = BatchEnsemble(best(members, data), 2, init="ones", bias="member")
    parted, equal = (
        distill(members, data, loss=KD(alpha=0.0), config=each, student=student)(data.prepare(data.test.inputs))
        for each in (plan, plan.replace(label_smoothing=0.5))
    )
    assert not torch.allclose(parted[0], parted[1], atol=1e-4)
    torch.testing.assert_close(equal[0], equal[1])
