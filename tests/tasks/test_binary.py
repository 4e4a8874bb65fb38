"""Binary classification: one logit is the difference of two."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics import DensePredictions, Predictions, nll
from enfold.tasks import Classification
from enfold.tasks.binary import Binary

SHAPES = [  # of outputs, of targets, of the mean, axis of the classes
    ((6,), (6,), (6, 2), -1),
    ((6, 1), (6,), (6, 2), -1),
    ((6,), (6, 1), (6, 2), -1),
    ((6, 1), (6, 1), (6, 2), -1),
    ((6, 1, 4, 5), (6, 4, 5), (6, 2, 4, 5), 1),
    ((6, 1, 4, 5), (6, 1, 4, 5), (6, 2, 4, 5), 1),
    ((6, 4, 5), (6, 4, 5), (6, 2, 4, 5), 1),
    ((6, 7, 1), (6, 7), (6, 7, 2), -1),
    ((6, 7), (6, 7), (6, 7, 2), -1),
]
KINDS = [torch.int64, torch.uint8, torch.bool, torch.float32, torch.float64]


def batch(out, wanted, M=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(M, *out, generator=rng), torch.randint(2, wanted, generator=rng)


@pytest.mark.parametrize(("out", "wanted", "mean", "axis"), SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_loss_is_the_binary_cross_entropy(out, wanted, mean, axis, kind):
    outputs, targets = batch(out, wanted)
    task = Binary().resolve(outputs, targets.to(kind))
    rows = task.flatten(outputs, targets.to(kind))
    expected = [F.binary_cross_entropy_with_logits(one.flatten(), targets.flatten().float()) for one in outputs]
    torch.testing.assert_close(task.loss(rows), torch.stack(expected))
    assert rows.targets.dtype == torch.int64


@pytest.mark.parametrize(("out", "wanted", "mean", "axis"), SHAPES)
def test_predictions_are_the_probabilities_of_both_classes(out, wanted, mean, axis):
    outputs, targets = batch(out, wanted)
    task = Binary().resolve(outputs, targets)
    found = task.predict(outputs)
    assert found.mean.shape == mean
    assert found.members.shape == (3, *mean)
    assert found.class_axis == axis
    positive = found.mean.select(axis, 1)
    torch.testing.assert_close(positive, torch.sigmoid(outputs).mean(0).view_as(positive))
    torch.testing.assert_close(found.mean.sum(axis), torch.ones_like(positive))
    assert torch.equal(found.classes, (positive > 0.5).long())
    assert found.total.shape == found.aleatoric.shape == found.epistemic.shape == positive.shape
    p = task.predictions(task.flatten(outputs, targets))
    assert type(p) is (Predictions if len(mean) == 2 else DensePredictions)
    expected = F.binary_cross_entropy(positive.flatten(), targets.flatten().float())
    assert nll(p) == pytest.approx(expected.item(), rel=1e-5)


@given(st.floats(-30, 30), st.integers(0, 1))
def test_one_logit_is_the_difference_of_two(logit, target):
    outputs, targets = torch.tensor([[logit]]), torch.tensor([target])
    two = Classification()
    shifted = torch.tensor([[[1.5, logit + 1.5]]])
    expected = two.loss(two.flatten(shifted, targets))
    torch.testing.assert_close(Binary().loss(Binary().flatten(outputs, targets)), expected, rtol=1e-4, atol=1e-5)


def test_class_weights_are_those_of_two_classes():
    outputs, targets = batch((50,), (50,))
    task = Binary(class_weights=(0.3, 2.0))
    two = torch.stack([torch.zeros_like(outputs), outputs], -1)
    expected = [F.cross_entropy(one, targets, weight=torch.tensor([0.3, 2.0])) for one in two]
    torch.testing.assert_close(task.loss(task.flatten(outputs, targets)), torch.stack(expected))
    with pytest.raises(EnfoldError, match="class_weights"):
        Binary(class_weights=(1.0, 2.0, 3.0)).flatten(outputs, targets)


def test_ignored_positions():
    outputs, targets = batch((2, 1, 3, 4), (2, 3, 4))
    targets[0, :2] = -100
    task = Binary().resolve(outputs, targets)
    rows = task.flatten(outputs, targets)
    assert rows.values.shape == (3, 16, 2)
    is_known = targets.flatten() >= 0
    expected = F.binary_cross_entropy_with_logits(outputs[0].flatten()[is_known], targets.flatten()[is_known].float())
    torch.testing.assert_close(task.loss(rows)[0], expected)
    own = Binary(ignore_index=7).resolve(outputs, targets)
    with pytest.raises(EnfoldError, match=r"targets must be 0 or 1.*-100"):
        own.flatten(outputs, targets)


def test_members_with_batches_of_their_own():
    outputs, targets = batch((6, 1), (3, 6))
    task = Binary().resolve(outputs, targets, own=True)
    expected = [F.binary_cross_entropy_with_logits(o[:, 0], t.float()) for o, t in zip(outputs, targets, strict=True)]
    torch.testing.assert_close(task.loss(task.flatten(outputs, targets, own=True)), torch.stack(expected))


@pytest.mark.parametrize("wrong", [2, -1, -100])
def test_other_targets_are_refused(wrong):
    outputs, targets = batch((6,), (6,))
    targets[3] = wrong
    with pytest.raises(EnfoldError, match=rf"targets must be 0 or 1 .*got {wrong}"):
        Binary().flatten(outputs, targets)
    with pytest.raises(EnfoldError, match=r"targets must be 0 or 1 .*got 0.5"):
        Binary().flatten(outputs, torch.full((6,), 0.5))
    with pytest.raises(EnfoldError, match=r"targets must be 0 or 1 .*got nan"):
        Binary().flatten(outputs, torch.full((6,), torch.nan))


def test_other_shapes_are_refused():
    with pytest.raises(UnsupportedOutput, match=r'one logit per target.*\(6, 2\).*task="classification"'):
        Binary().resolve(torch.zeros(1, 6, 2), torch.zeros(6).long())
    with pytest.raises(UnsupportedOutput, match="one logit per target"):
        Binary().flatten(torch.zeros(1, 6, 3), torch.zeros(6).long())
    with pytest.raises(EnfoldError, match="targets must be a tensor"):
        Binary().flatten(torch.zeros(1, 6), [0] * 6)
