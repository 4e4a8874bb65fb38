"""Lessons: each student's labels are smoothed by its own amount, together or one by one."""

import pytest
import torch
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.distill import distill
from enfold.distill.divergence import as_target
from enfold.distill.objective import DistillationObjective, SeparableBatchLoss
from enfold.distill.losses.kd import KD
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.train import CrossEntropy, TrainConfig
from enfold.train.objective import StepContext

BATCH = Batch(torch.zeros(6, 2), torch.arange(6) % 3)
SMOOTHING = (0.0, 0.1, 0.4)


class Table(nn.Module):
    """Students whose logits are given, whatever the inputs."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits, self.num_members = logits, len(logits)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.logits


@pytest.mark.parametrize("fitted", ["members", "ensemble"])
def test_smoothing_a_student(fitted):
    source = torch.Generator().manual_seed(0)
    logits, target = torch.randn(3, 6, 3, generator=source), torch.randn(6, 3, generator=source).log_softmax(-1)
    subject = KD(alpha=0.3, fit=fitted, share=BatchEnsemble(3))
    lessons = DistillationObjective(subject, lambda batch: as_target(target), None, SMOOTHING)
    found = lessons(Table(logits), BATCH)
    soft = 0.3 * subject.loss(logits, as_target(target), 0.0)
    hard = torch.cat([CrossEntropy(each).of_logits(logits[k : k + 1], BATCH) for k, each in enumerate(SMOOTHING)])
    torch.testing.assert_close(found, soft + 0.7 * hard)
    lesson = lessons.for_batch(Table(logits), BATCH, StepContext())
    if isinstance(lesson, SeparableBatchLoss):
        alone = [lesson.member(k)(Table(logits[k : k + 1]), BATCH) for k in range(3)]
        torch.testing.assert_close(found, torch.cat(alone))


def test_there_are_as_many_as_students(pupils):
    members, data = pupils
    for share, count in ((None, 1), (BatchEnsemble(2), 2)):
        fold = KD(alpha=0.5, share=share, plan=TrainConfig(epochs=1, label_smoothing=SMOOTHING))
        with pytest.raises(EnfoldError, match=f"one label_smoothing a member must have {count} values, got 3"):
            fold(members, data)


@pytest.fixture
def pupils():
    from classroom import make_mlp, make_pictures

    return DeepEnsemble(make_mlp, 2, seed=0), make_pictures()


@pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")
def test_a_share_is_trained_with_one_each(pupils):
    """Members that start as one part where nothing but their smoothing differs."""
    members, data = pupils
    plan = TrainConfig(epochs=2, label_smoothing=(0.0, 0.5), select="last", lr=0.05)
    share = BatchEnsemble(2, init="ones", bias="member")
    parted, equal = (
        distill(members, data, loss=KD(alpha=0.0), config=each, student=SHARE(share))(data.prepare(data.test.inputs))
        for each in (plan, plan.replace(label_smoothing=0.5))
    )
    assert not torch.allclose(parted[0], parted[1], atol=1e-4)
    torch.testing.assert_close(equal[0], equal[1])
