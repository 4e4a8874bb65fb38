"""Classification against torch.nn.functional.cross_entropy, with and without positions."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics import DensePredictions, Predictions, metrics_for
from enfold.tasks import Classification

SHAPES = [  # outputs (B, ...) of 3 classes, targets, axis of the classes
    ((6, 3), (6,), None),
    ((2, 3, 4, 5), (2, 4, 5), 1),
    ((2, 3, 4, 5, 6), (2, 4, 5, 6), 1),
    ((4, 7, 3), (4, 7), -1),
    ((4, 3, 7), (4, 7), 1),
]


def batch(out, wanted, M=2, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(M, *out, generator=rng), torch.randint(3, wanted, generator=rng)


def cross_entropy(outputs, targets, axis, **options):
    """One call of torch per member, which wants the classes at axis 1."""
    last = [one if axis is None else one.movedim(axis, 1) for one in outputs]
    return torch.stack([F.cross_entropy(one, targets, **options) for one in last])


@pytest.mark.parametrize(("out", "wanted", "axis"), SHAPES)
def test_the_loss_is_the_cross_entropy(out, wanted, axis):
    outputs, targets = batch(out, wanted)
    task = Classification().resolve(outputs, targets)
    assert task.class_axis == axis
    torch.testing.assert_close(task.loss(task.flatten(outputs, targets)), cross_entropy(outputs, targets, axis))
    smooth = task.loss(task.flatten(outputs, targets), 0.1)
    torch.testing.assert_close(smooth, cross_entropy(outputs, targets, axis, label_smoothing=0.1))
    each = task.loss(task.flatten(outputs, targets), (0.0, 0.3))
    torch.testing.assert_close(each[0], cross_entropy(outputs, targets, axis)[0])
    torch.testing.assert_close(each[1], cross_entropy(outputs, targets, axis, label_smoothing=0.3)[1])


@pytest.mark.parametrize(("out", "wanted", "axis"), SHAPES)
def test_class_weights(out, wanted, axis):
    outputs, targets = batch(out, wanted)
    weights = (0.5, 1.0, 3.0)
    task = Classification(class_weights=weights).resolve(outputs, targets)
    expected = cross_entropy(outputs, targets, axis, weight=torch.tensor(weights))
    torch.testing.assert_close(task.loss(task.flatten(outputs, targets)), expected)
    with pytest.raises(EnfoldError, match="class_weights must have one weight for each of the 3 classes"):
        Classification(class_weights=(1.0, 1.0)).resolve(outputs, targets).flatten(outputs, targets)


@pytest.mark.parametrize("ignored", [None, -1, 255])
@pytest.mark.parametrize(("out", "wanted", "axis"), SHAPES[1:])
def test_ignored_positions(out, wanted, axis, ignored):
    outputs, targets = batch(out, wanted)
    index = -100 if ignored is None else ignored
    targets = targets.masked_fill(torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) < 0.4, index)
    task = Classification(ignore_index=ignored, class_weights=(0.5, 1.0, 3.0)).resolve(outputs, targets)
    expected = cross_entropy(outputs, targets, axis, ignore_index=index, weight=torch.tensor((0.5, 1.0, 3.0)))
    rows = task.flatten(outputs, targets)
    torch.testing.assert_close(task.loss(rows), expected)
    assert rows.values.shape[1] == int((targets != index).sum())
    with pytest.raises(EnfoldError, match="a target that is not ignored"):
        task.flatten(outputs, torch.full_like(targets, index))
    if ignored is not None:
        with pytest.raises(EnfoldError, match="-100"):
            task.flatten(outputs, targets.masked_fill(targets == index, -100))


def test_no_target_of_one_label_per_example_is_ignored_by_default():
    outputs, targets = batch((6, 3), (6,))
    targets[2] = -100
    with pytest.raises(EnfoldError, match="got -100"):
        Classification().flatten(outputs, targets)
    with pytest.raises(EnfoldError, match="got -100"):
        Classification(class_axis=1).resolve(outputs, targets).flatten(outputs, targets)
    task = Classification(ignore_index=-100)
    assert task.flatten(outputs, targets).values.shape == (2, 5, 3)


@pytest.mark.parametrize(("out", "wanted", "axis"), SHAPES)
def test_members_with_batches_of_their_own(out, wanted, axis):
    outputs, targets = batch(out, (2, *wanted))
    ignored = -100
    if axis is not None:
        targets[1, :1] = ignored
    task = Classification().resolve(outputs, targets, own=True)
    found = task.loss(task.flatten(outputs, targets, own=True))
    expected = [cross_entropy(o[None], t, axis)[0] for o, t in zip(outputs, targets, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))


def test_weights_of_examples_are_those_of_their_positions():
    outputs, targets = batch((4, 7, 3), (4, 7))
    weights = torch.rand(4, generator=torch.Generator().manual_seed(3))
    task = Classification().resolve(outputs, targets)
    each = F.cross_entropy(outputs[1].movedim(-1, 1), targets, reduction="none")
    expected = (each.mean(1) * weights).sum() / weights.sum()
    torch.testing.assert_close(task.loss(task.flatten(outputs, targets, weights))[1], expected)


@pytest.mark.parametrize(("out", "wanted", "axis"), SHAPES)
def test_predictions_and_their_uncertainty(out, wanted, axis):
    outputs, targets = batch(out, wanted, M=3)
    task = Classification().resolve(outputs, targets)
    found = task.predict(outputs)
    place = -1 if axis is None else axis
    probs = outputs.double().softmax(place if place < 0 else place + 1)
    mean = probs.mean(0)

    def entropy(p, at):
        return -(p * p.log()).sum(at).float()

    torch.testing.assert_close(found.mean, mean.float())
    torch.testing.assert_close(found.members, probs.float())
    torch.testing.assert_close(found.total, entropy(mean, place))
    torch.testing.assert_close(found.aleatoric, entropy(probs, place if place < 0 else place + 1).mean(0))
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic)
    assert torch.equal(found.classes, mean.argmax(place))
    assert found.classes.shape == found.total.shape == torch.Size(wanted)
    assert found.entropy is found.total
    assert found.mutual_information is found.epistemic


@pytest.mark.parametrize(("out", "wanted", "axis"), SHAPES)
def test_predictions_for_the_metrics(out, wanted, axis):
    outputs, targets = batch(out, wanted)
    task = Classification().resolve(outputs, targets)
    p = task.predictions(task.flatten(outputs, targets))
    assert type(p) is (Predictions if axis is None else DensePredictions)
    assert ("miou" in metrics_for(p)) == (axis is not None)
    assert torch.equal(p.labels, targets.flatten())
    last = outputs if axis is None else outputs.movedim(axis if axis < 0 else axis + 1, -1)
    torch.testing.assert_close(p.log_probs, last.log_softmax(-1).reshape(2, -1, 3))
    assert type(p.mean()) is type(p.member(0)) is type(p.subset([1])) is type(p)


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4), st.integers(2, 5), st.integers(1, 4))
def test_rows_are_the_logits_of_every_target(seed, M, B, C, T):
    """Row n belongs to target n, wherever the axis of the classes is."""
    rng = torch.Generator().manual_seed(seed)
    logits, targets = torch.randn(M, B, T, C, generator=rng), torch.randint(C, (B, T), generator=rng)
    for axis in (-1, 1):
        task = Classification(class_axis=axis)
        outputs = logits.movedim(-1, axis if axis < 0 else axis + 1)
        rows = task.flatten(outputs, targets)
        assert torch.equal(rows.values, logits.flatten(1, 2))
        assert torch.equal(rows.targets, targets.flatten())


def test_ambiguous_and_wrong_shapes():
    with pytest.raises(EnfoldError, match=r"class_axis must be given.*\(4, 5, 5\).*\(4, 5\)"):
        Classification().resolve(torch.zeros(2, 4, 5, 5), torch.zeros(4, 5).long())
    task = Classification(class_axis=1).resolve(torch.zeros(2, 4, 5, 5), torch.zeros(4, 5).long())
    assert task.flatten(torch.zeros(2, 4, 5, 5), torch.zeros(4, 5).long()).values.shape == (2, 20, 5)
    with pytest.raises(UnsupportedOutput, match=r"\(4, 3, 7, 7\).*\(4, 7\)"):
        Classification().resolve(torch.zeros(2, 4, 3, 7, 7), torch.zeros(4, 7).long())
    with pytest.raises(EnfoldError, match=r"targets of shape \(6, 1\).*class indices of shape \(6,\)"):
        Classification().flatten(torch.zeros(2, 6, 3), torch.zeros(6, 1).long())
    with pytest.raises(UnsupportedOutput, match=r'at least 2 classes.*task="binary"'):
        Classification().flatten(torch.zeros(2, 6, 1), torch.zeros(6).long())
    with pytest.raises(UnsupportedOutput, match="class_axis must be given"):
        Classification().predict(torch.zeros(2, 6, 3, 4, 4))
    with pytest.raises(EnfoldError, match="labels must be between"):
        Classification().flatten(torch.zeros(2, 6, 3), torch.full((6,), 3))
    with pytest.raises(EnfoldError, match="labels must be integer"):
        Classification().flatten(torch.zeros(2, 6, 3), torch.zeros(6))
    with pytest.raises(EnfoldError, match=r"targets must be a tensor.*list"):
        Classification().flatten(torch.zeros(2, 6, 3), [0] * 6)


def test_a_constant_network_has_no_epistemic_uncertainty():
    found = Classification().predict(torch.zeros(4, 5, 3))
    torch.testing.assert_close(found.total, torch.full((5,), math.log(3)))
    assert not found.epistemic.any()
    shown = repr(found)
    assert f"probabilities {tuple(found.mean.shape)}" in shown
    assert f"total {found.total.mean():.4g}" in shown
    assert len(shown) < 160
