"""Perturbations of inputs that are tuples and dictionaries of tensors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import enfold
from enfold.data import Data, Split
from enfold.data.batches import Batch
from enfold.distill.perturb import ODS, ConfODS, CutMix, CutMixMixup, Gaussian, Mixup, TDivSDiv
from enfold.errors import EnfoldError
from enfold.tasks import Regression

GRADIENTS = [ODS(step=20.0), ConfODS(step=20.0), TDivSDiv(step=20.0)]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Joined(nn.Module):
    """A network of a table, an image and token indices."""

    def __init__(self):
        super().__init__()
        self.table, self.image, self.tokens = nn.Linear(3, 4), nn.Linear(16, 4), nn.Embedding(5, 4)

    def forward(self, table, image, ids=None, mask=None):
        hidden = self.table(table) + self.image(image.flatten(1))
        return (hidden if ids is None else hidden + self.tokens(ids).mean(1))[:, :3]


class Single(nn.Module):
    """The same network of the tensors in one."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, rows):
        return self.network(rows[:, :3], rows[:, 3:].view(-1, 1, 4, 4))


TABLE, IMAGE, IDS = draw(12, 3), draw(12, 1, 4, 4, seed=1), torch.arange(36).view(12, 3) % 5
MASK = torch.ones(12, 3, dtype=torch.bool)
REAL = {"table": TABLE, "image": IMAGE}
MIXED = {**REAL, "ids": IDS, "mask": MASK}
NO_DATA = Data(Split(TABLE, torch.zeros(12)), [], [], None, (3,))


def ensemble(make, seed=0):
    torch.manual_seed(seed)
    return enfold.DeepEnsemble(make, 2).eval()


def perturbed(perturb, inputs, teachers=None, student=None, seed=5):
    batch = Batch(inputs, torch.arange(12) % 3)
    generator = torch.Generator().manual_seed(seed)
    return perturb.apply(batch, NO_DATA, teachers, student, generator)


def test_noise_is_added_to_floating_point_tensors_only():
    found = perturbed(Gaussian(step=255.0), MIXED, *(ensemble(Joined, seed) for seed in (0, 1)))[0].inputs
    assert torch.equal(found["ids"], IDS)
    assert torch.equal(found["mask"], MASK)
    moved = torch.cat([(found[name] - REAL[name]).flatten() for name in REAL])
    assert bool((moved != 0).all())
    assert 0.8 < float(moved.std()) < 1.2
    assert bool((MIXED["table"] == TABLE).all())


@pytest.mark.parametrize("perturb", [Gaussian(), *GRADIENTS], ids=lambda each: type(each).__name__)
def test_several_tensors_move_as_one_tensor_of_the_same_numbers(perturb):
    teachers, student = ensemble(Joined, 0), ensemble(Joined, 1)
    rows = torch.cat([TABLE, IMAGE.flatten(1)], dim=1)
    single = [enfold.DeepEnsemble([Single(each) for each in model.networks()]).eval() for model in (teachers, student)]
    expected = perturbed(perturb, rows, *single)[0].inputs
    for inputs in (REAL, (TABLE, IMAGE)):
        found = perturbed(perturb, inputs, teachers, student)[0].inputs
        assert type(found) is type(inputs)
        values = list(found.values()) if isinstance(found, dict) else found
        torch.testing.assert_close(torch.cat([each.flatten(1) for each in values], dim=1), expected)
        assert [each.shape for each in values] == [TABLE.shape, IMAGE.shape]


@pytest.mark.parametrize("kind", [Mixup, CutMix, CutMixMixup])
def test_all_tensors_are_mixed_with_the_same_partners(kind):
    images = {"first": IMAGE, "second": 2 * IMAGE + 1}
    mixed, mixture = perturbed(kind(), images)
    single, expected = perturbed(kind(), IMAGE)
    assert torch.equal(mixture.partners, expected.partners)
    assert mixture.weight == expected.weight
    torch.testing.assert_close(mixed.inputs["first"], single.inputs)
    torch.testing.assert_close(mixed.inputs["second"], 2 * single.inputs + 1)


def test_a_table_and_an_image_are_mixed():
    mixed, mixture = perturbed(Mixup(), REAL)
    for name, values in REAL.items():
        expected = mixture.weight * values + (1 - mixture.weight) * values[mixture.partners]
        torch.testing.assert_close(mixed.inputs[name], expected)


@pytest.mark.parametrize(
    ("perturb", "inputs", "named"),
    [
        (Mixup(), MIXED, "'ids'"),
        (Mixup(), (TABLE, IDS), "'1'"),
        (Mixup(), {"table": TABLE, "mask": MASK}, "'mask'"),
        (CutMix(), REAL, "images"),
        (CutMix(), {"first": IMAGE, "second": IMAGE[..., :2]}, "one size"),
        (Gaussian(), {"ids": IDS}, "'ids'"),
        (Gaussian(), IDS, "int64"),
        (Gaussian(), {"table": TABLE, "scale": torch.ones(())}, "'scale'"),
        (Mixup(), {"table": TABLE, "other": TABLE[:5]}, "'other'"),
        (Gaussian(), SimpleNamespace(x=TABLE, edges=IDS), "SimpleNamespace"),
        (Mixup(), SimpleNamespace(x=TABLE, edges=IDS), "SimpleNamespace"),
        (ODS(), {"ids": IDS}, "'ids'"),
    ],
)
def test_what_cannot_be_perturbed_is_named(perturb, inputs, named):
    with pytest.raises(EnfoldError, match=f"perturb.*{named}"):
        perturbed(perturb, inputs, ensemble(Joined), ensemble(Joined))


@pytest.mark.parametrize("perturb", [Gaussian(step=100.0), ODS(step=100.0)], ids=lambda each: type(each).__name__)
def test_a_student_of_dictionaries(perturb):
    labels = torch.arange(12) % 3
    teachers = ensemble(Joined)
    settings = {"epochs": 2, "batch_size": 6, "quiet": True, "select": "last"}
    moved = enfold.distill(teachers, (MIXED, labels), perturb=perturb, init=teachers.member(0), **settings)
    still = enfold.distill(teachers, (MIXED, labels), init=teachers.member(0), **settings)
    assert not torch.equal(moved.table.weight, still.table.weight)


def test_mixed_labels_of_dictionaries():
    loss = enfold.KD(alpha=0.5)
    network = enfold.distill(
        ensemble(Joined), (REAL, torch.arange(12) % 3), loss=loss, perturb=Mixup(), epochs=1, quiet=True
    )
    assert isinstance(network, Joined)


@pytest.mark.parametrize("perturb", GRADIENTS, ids=lambda each: type(each).__name__)
def test_steps_by_classes_are_refused_for_other_tasks(perturb):
    teachers = ensemble(lambda: nn.Linear(3, 2))
    settings = {
        "perturb": perturb,
        "student": enfold.DeepEnsemble(lambda: nn.Linear(3, 2), 2),
        "epochs": 1,
        "quiet": True,
    }
    for targets, task in (
        (TABLE[:, :1], Regression(head="gaussian", variance="softplus")),
        (TABLE[:, :2] > 0, "multilabel"),
    ):
        for train in ((TABLE, targets), [(TABLE, targets)]):
            with pytest.raises(EnfoldError, match=f"perturb={type(perturb).__name__}"):
                enfold.distill(teachers, train, task=task, **settings)
    dense = ensemble(lambda: nn.Conv2d(1, 3, 1))
    settings["student"] = enfold.DeepEnsemble(lambda: nn.Conv2d(1, 3, 1), 2)
    with pytest.raises(EnfoldError, match="perturb needs the logits"):
        enfold.distill(dense, (IMAGE, (IMAGE[:, 0] > 0).long()), **settings)
