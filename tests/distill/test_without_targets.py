"""Distillation from inputs only."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import enfold
from enfold.distill import CachedTeacher
from enfold.distill.losses import AEKD, KD, EnD2, Hydra, LatentBE, OneToOne, ProxyEnD2
from enfold.distill.perturb import ODS, CutMix, Gaussian, Mixup
from enfold.errors import EnfoldError
from enfold.tasks import Regression

SETTINGS = {"epochs": 2, "batch_size": 16, "quiet": True}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, MORE = draw(48, 3), draw(20, 3, seed=1)
LABELS = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, left, right):
        return self.layer(torch.cat([left, right], 1))


class Items(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return self.make(X[index])


@dataclass
class Record:
    left: torch.Tensor
    right: torch.Tensor


def trained(make, examples, **settings):
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(make, 3)
    enfold.fit(ensemble, examples, epochs=2, batch_size=16, lr=0.02, quiet=True, **settings)
    return ensemble


@pytest.fixture(scope="module")
def teacher():
    return trained(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)), (X, LABELS))


@pytest.fixture(scope="module")
def two_inputs():
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(Two, 2)
    enfold.fit(ensemble, ((X, X), LABELS), epochs=1, quiet=True)
    return ensemble


def weights(network):
    return torch.cat([tensor.flatten() for tensor in network.parameters()])


ONE_INPUT = {
    "tensor": X,
    "array": X.numpy(),
    "pair with None": (X, None),
    "tuple of one": (X,),
    "tensor dataset": TensorDataset(X),
    "dataset of tensors": Items(lambda x: x),
    "dataset of tuples": Items(lambda x: (x,)),
    "loader of tensors": DataLoader(X, batch_size=16),
    "loader of tuples": DataLoader(TensorDataset(X), batch_size=16),
    "dictionaries": [{"input": each} for each in X.split(16)],
}


@pytest.mark.parametrize("name", ONE_INPUT)
def test_inputs_alone_teach_what_inputs_with_targets_teach(teacher, name):
    settings = {**SETTINGS, "seed": 3, "order": "shared"}
    network = enfold.distill(teacher, ONE_INPUT[name], **settings)
    assert not torch.equal(weights(network), weights(teacher.member(0)))
    if name in ("tensor", "array", "pair with None", "tuple of one", "tensor dataset"):
        expected = enfold.distill(teacher, (X, LABELS), **settings)
        torch.testing.assert_close(weights(network), weights(expected), rtol=0, atol=0)


SEVERAL_INPUTS = {
    "pair": (X, X),
    "nested pair": ((X, X), None),
    "dictionary": {"left": X, "right": X},
    "dictionary and None": ({"left": X, "right": X}, None),
    "loader of pairs": DataLoader(TensorDataset(X, X), batch_size=16),
    "loader of dictionaries": DataLoader(Items(lambda x: {"left": x, "right": x}), batch_size=16),
    "dataclasses": [Record(each, each) for each in X.split(16)],
}


@pytest.mark.parametrize("name", SEVERAL_INPUTS)
def test_several_inputs_without_targets(two_inputs, name):
    network = enfold.distill(two_inputs, SEVERAL_INPUTS[name], **SETTINGS)
    assert bool(torch.isfinite(weights(network)).all())
    assert not torch.equal(weights(network), weights(two_inputs.member(0)))


def test_unpack_may_return_no_target(teacher):
    batches = [{"table": each, "id": "a"} for each in X.split(16)]
    network = enfold.distill(teacher, batches, unpack=lambda batch: (batch["table"], None), **SETTINGS)
    assert isinstance(network, nn.Sequential)


@pytest.mark.parametrize(
    "loss", [KD(temperature=2.0), AEKD(hard=0.0), OneToOne(), Hydra(), LatentBE(), EnD2(), ProxyEnD2()], ids=repr
)
def test_every_loss_learns_without_targets(teacher, loss):
    result = enfold.distill(teacher, X, MORE, loss=loss, **SETTINGS)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.parameters())


@pytest.mark.parametrize(
    "loss",
    [KD(alpha=0.5), AEKD(), OneToOne(alpha=0.9), Hydra(alpha=0.5), LatentBE(alpha=0.5), EnD2(alpha=0.5)],
    ids=repr,
)
def test_losses_that_use_targets_are_refused(teacher, loss):
    with pytest.raises(EnfoldError, match=rf"loss must not use targets.*{type(loss).__name__}"):
        enfold.distill(teacher, X, loss=loss, **SETTINGS)


@pytest.mark.parametrize("perturb", [Gaussian(), Mixup(), ODS()], ids=repr)
def test_perturbations(teacher, perturb):
    network = enfold.distill(teacher, X, perturb=perturb, **SETTINGS)
    assert not torch.equal(weights(network), weights(enfold.distill(teacher, X, **SETTINGS)))


def test_images_are_cut():
    images = draw(12, 1, 4, 4)
    teacher = trained(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), (images, LABELS[:12]))
    assert isinstance(enfold.distill(teacher, images, perturb=CutMix(), **SETTINGS), nn.Module)


def test_validation_by_the_divergence_from_the_teacher(teacher):
    records = []
    network = enfold.distill(
        teacher, X, MORE, init="random", epochs=6, lr=0.05, batch_size=16, quiet=True, on_epoch=records.append
    )
    with torch.no_grad():
        soft = teacher.predict(MORE).mean
        found = (soft * (soft.log() - network(MORE).log_softmax(-1))).sum(-1).mean()
    lowest = min(record.validation_loss[0] for record in records)
    torch.testing.assert_close(float(found), lowest, rtol=1e-4, atol=1e-6)


def test_the_history_names_the_criterion(teacher, tmp_path):
    from enfold.train.checkpoint import stored_history

    enfold.distill(teacher, X, MORE, checkpoint=tmp_path / "c.pt", **SETTINGS)
    history = stored_history(tmp_path / "c.pt")
    assert history.criterion == "divergence"
    assert len(history.epochs[0].validation_loss) == 1


def test_targets_of_validation_select_by_them(teacher, tmp_path):
    from enfold.train.checkpoint import stored_history

    enfold.distill(teacher, X, (X[:20], LABELS[:20]), checkpoint=tmp_path / "c.pt", select="last", **SETTINGS)
    assert stored_history(tmp_path / "c.pt").criterion == "nll"
    enfold.distill(teacher, (X, LABELS), MORE, checkpoint=tmp_path / "d.pt", select="last", **SETTINGS)
    assert stored_history(tmp_path / "d.pt").criterion == "divergence"


def test_resumed_to_the_same_bits(teacher, tmp_path):
    class Stop(Exception):
        pass

    def stop(record):
        if record.epoch == 1:
            raise Stop

    settings = {"epochs": 4, "batch_size": 16, "quiet": True, "perturb": Mixup()}
    with pytest.raises(Stop):
        enfold.distill(teacher, X, MORE, checkpoint=tmp_path / "c.pt", on_epoch=stop, **settings)
    resumed = enfold.distill(teacher, X, MORE, checkpoint=tmp_path / "c.pt", **settings)
    assert torch.equal(weights(resumed), weights(enfold.distill(teacher, X, MORE, **settings)))


def test_a_cached_teacher(teacher):
    cached = CachedTeacher(teacher(X).detach())
    settings = {**SETTINGS, "init": teacher.member(0), "task": "classification"}
    expected = enfold.distill(teacher, X, **settings)
    torch.testing.assert_close(weights(enfold.distill(cached, X, **settings)), weights(expected))
    with pytest.raises(EnfoldError, match="val must have targets for a CachedTeacher"):
        enfold.distill(cached, X, MORE, **settings)


def test_logits_are_stored(teacher, tmp_path):
    first = enfold.distill(teacher, X, cache=tmp_path, **SETTINGS)
    assert list(tmp_path.glob("*.safetensors"))
    assert torch.equal(weights(first), weights(enfold.distill(teacher, X, cache=tmp_path, **SETTINGS)))


def test_a_weight_penalty(teacher):
    student = enfold.DeepEnsemble(teacher.networks())
    result = enfold.distill(teacher, X, MORE, student=student, weight_penalty=0.1, **SETTINGS)
    assert result.num_members == 3


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("as_loader", [False, True])
def test_regression_students_with_other_heads(width, as_loader):
    task = Regression(head="gaussian", variance="softplus")
    ensemble = trained(lambda: nn.Linear(3, 2), (X, X[:, 0]), task=task)
    train = DataLoader(X, batch_size=16) if as_loader else X
    network = enfold.distill(ensemble, train, MORE, student=lambda: nn.Linear(3, width), **SETTINGS)
    head = {1: "point", 2: "gaussian", 3: "uncertainty"}[width]
    assert enfold.tasks.task_of(network).head == head
    assert set(enfold.evaluate(network, (X, X[:, 0])).scores) >= {"rmse"}


def test_dense_outputs_with_a_subset_of_positions():
    images = draw(16, 1, 5, 5)
    targets = (images[:, 0] > 0).long()
    task = enfold.tasks.Classification(class_axis=1, positions=30)
    ensemble = trained(lambda: nn.Conv2d(1, 2, 3, padding=1), (images, targets), task=task)
    network = enfold.distill(ensemble, images, images[:4], **SETTINGS)
    assert enfold.tasks.task_of(network).class_axis == 1


def test_an_unknown_task_must_be_named():
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(lambda: nn.Linear(3, 2), 2)
    with pytest.raises(EnfoldError, match="task must be given"):
        enfold.distill(ensemble, X, **SETTINGS)
    enfold.distill(ensemble, X, task="classification", **SETTINGS)
    network = enfold.distill(
        ensemble, X, (X, (X[:, 0] > 0).long()), select="last", **SETTINGS
    )  # from the targets of val
    assert enfold.tasks.task_of(network).name == "classification"


def test_training_and_evaluation_refuse_inputs_alone(teacher):
    for call in (
        lambda: enfold.fit(nn.Linear(3, 3), X, quiet=True),
        lambda: enfold.fit(nn.Linear(3, 3), (X, None), quiet=True),
        lambda: enfold.fit(nn.Linear(3, 3), DataLoader(X), quiet=True),
        lambda: enfold.evaluate(teacher, X),
        lambda: enfold.evaluate(teacher, [X]),
        lambda: enfold.calibrate(teacher, {"input": X}),
        lambda: enfold.compress(teacher, X, X),
        lambda: enfold.distill(teacher, (X, LABELS), "text"),
    ):
        with pytest.raises(EnfoldError):
            call()
