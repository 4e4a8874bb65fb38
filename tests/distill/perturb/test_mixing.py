"""Mixup and CutMix: their equations, and labels that are mixed as the inputs are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from classroom import make_cnn, make_mlp, make_pictures, make_table, population, seeded
from enfold.data.batches import Batch, Order
from enfold.distill import distill
from enfold.distill.losses.kd import KD
from enfold.distill.objective import DistillationObjective
from enfold.distill.perturb.cutmix import CutMix
from enfold.distill.perturb.cutmix_mixup import CutMixMixup
from enfold.distill.perturb.mixup import Mixup
from enfold.distill.teacher import Teacher
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.train.objective import StepContext

KINDS = pytest.mark.parametrize("kind", [Mixup, CutMix, CutMixMixup])
DATA = make_pictures(count=12)
INPUTS = DATA.prepare(DATA.train.inputs)
BATCH = Batch(INPUTS, DATA.train.labels)


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def applied(perturb, seed: int, batch: Batch = BATCH):
    return perturb.apply(batch, DATA, None, None, source(seed))


@given(seed=st.integers(0, 10**6), alpha=st.floats(0.1, 5))
def test_mixup_is_a_convex_combination(seed, alpha):
    mixed, mixture = applied(Mixup(alpha=alpha), seed)
    assert 0 <= mixture.weight <= 1
    assert sorted(mixture.partners.tolist()) == list(range(12))
    expected = mixture.weight * INPUTS + (1 - mixture.weight) * INPUTS[mixture.partners]
    torch.testing.assert_close(mixed.inputs, expected)
    assert mixed.indices is None


@given(seed=st.integers(0, 10**6))
def test_cutmix_copies_a_rectangle_and_weights_by_its_area(seed):
    large = torch.rand(6, 1, 16, 12, generator=source(0))
    mixed, mixture = applied(CutMix(), seed, Batch(large, torch.arange(6) % 3))
    partners = large[mixture.partners]
    changed = (mixed.inputs != large)[mixture.partners != torch.arange(6)].any(0)[0]  # (H, W)
    rows, columns = changed.any(1), changed.any(0)
    assert torch.equal(changed, rows[:, None] & columns[None])  # one rectangle, the same for all examples
    for taken in (rows, columns):
        assert int(taken.int().diff().abs().sum()) <= 2  # without gaps
    if (mixture.partners != torch.arange(6)).any():
        assert mixture.weight == pytest.approx(1 - changed.float().mean().item())
    torch.testing.assert_close(mixed.inputs, torch.where(changed, partners, large))


def test_the_area_of_the_rectangle_is_that_of_the_weight():
    """Without the borders it is 1 - λ; cut off there it is smaller."""
    mixed, weight = CutMix().mix(torch.zeros(1, 1, 40, 40), torch.ones(1, 1, 40, 40), 0.75, source(3))
    area = float(mixed.mean())
    assert weight == pytest.approx(1 - area)
    assert area <= 0.25 + 1e-6


def test_the_weight_follows_the_beta_distribution():
    for alpha in (0.2, 1.0, 4.0):
        weights = torch.tensor([applied(Mixup(alpha=alpha), seed)[1].weight for seed in range(400)])
        assert float(weights.mean()) == pytest.approx(0.5, abs=0.06)
        assert float(weights.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.25)


@KINDS
def test_teachers_and_student_have_the_same_mixed_inputs_and_labels(kind):
    """L = (1 - α) (λ CE(y) + (1 - λ) CE(y_partner)) + α KL, all at the mixed inputs."""
    teachers, student = DeepEnsemble(population(make_cnn)).eval(), seeded(make_mlp, 7).eval()
    loss = KD(alpha=0.4)
    objective = DistillationObjective(loss, Teacher(teachers, DATA, loss.target), kind(), 0.1)
    batch = next(Order(12).batches(DATA, 0))
    found = objective.for_batch(student, batch, StepContext(seed=5))(student, batch)
    mixed, mixture = applied(kind(), 5, batch)
    logits, labels = student(mixed.inputs), batch.targets
    own = F.cross_entropy(logits, labels, label_smoothing=0.1)
    partner = F.cross_entropy(logits, labels[mixture.partners], label_smoothing=0.1)
    soft = loss.loss(logits[None], loss.target(teachers(mixed.inputs)), 0.0)
    hard = mixture.weight * own + (1 - mixture.weight) * partner
    torch.testing.assert_close(found, 0.6 * hard + 0.4 * soft)


@KINDS
def test_no_labels_are_needed_at_alpha_1(kind):
    """Wrong labels give the same student."""
    teachers = DeepEnsemble(population(make_cnn))
    options = {"perturb": kind(), "epochs": 2, "batch_size": 6, "select": "last"}
    wrong = DATA.replace(train=type(DATA.train)(DATA.train.inputs, (DATA.train.labels + 1) % 3))
    one, other = (distill(teachers, data, **options) for data in (DATA, wrong))
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)


@KINDS
def test_training_continues_to_the_same_bits(kind, tmp_path):
    teachers, file = DeepEnsemble(population(make_cnn)), tmp_path / "student.safetensors"
    options = {"perturb": kind(), "loss": KD(alpha=0.5), "epochs": 2, "batch_size": 6, "select": "last"}
    expected = distill(teachers, DATA, **options)

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(teachers, DATA, checkpoint=file, on_epoch=stop, **options)
    again = distill(teachers, DATA, checkpoint=file, **options)
    for first, second in zip(again.parameters(), expected.parameters(), strict=True):
        assert torch.equal(first, second)


@KINDS
@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), "1"])
def test_invalid_alpha(kind, alpha):
    with pytest.raises(EnfoldError, match=r"alpha .* got"):
        kind(alpha=alpha)


def test_half_of_the_batches_are_those_of_cutmix():
    """The others are those of mixup, with the same partners and weights."""
    kinds = []
    for seed in range(200):
        mixed, mixture = applied(CutMixMixup(), seed)
        mixup, expected = applied(Mixup(), seed)
        assert torch.equal(mixture.partners, expected.partners)
        kinds.append(torch.equal(mixed.inputs, mixup.inputs))
        if not kinds[-1]:
            partners = INPUTS[mixture.partners]
            assert bool(((mixed.inputs == INPUTS) | (mixed.inputs == partners)).all())
    assert sum(kinds) == pytest.approx(100, abs=25)


def test_tables_have_no_rectangles():
    table = make_table()
    batch = Batch(table.prepare(table.train.inputs), table.train.labels)
    with pytest.raises(EnfoldError, match="CutMix"):
        applied(CutMix(), 0, batch)
    own = Batch(batch.inputs[None], batch.targets[None], own=True)
    with pytest.raises(EnfoldError, match="CutMix"):
        applied(CutMix(), 0, own)
    assert applied(Mixup(), 0, own)[0].inputs.shape == own.inputs.shape
