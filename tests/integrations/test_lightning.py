"""Ensembles and distillation in the Trainer of Lightning, and data modules as data."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import enfold
from enfold import BatchEnsemble, DeepEnsemble, EnfoldError, SnapshotEnsemble, fit
from enfold.errors import MissingExtra
from enfold.seeds import generator

pytest.importorskip("lightning")
import lightning.pytorch as pl

from enfold.integrations.lightning import CollectCallback, DistillModule, EnsembleModule

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::enfold.errors.DroppedOutputWarning"),
]
RNG = generator(0, "lightning")
INPUTS = torch.randn(96, 6, generator=RNG)
TARGETS = (INPUTS[:, :3] + 0.3 * torch.randn(96, 3, generator=RNG)).argmax(1)


def make_net():
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def loader(size=16, rows=slice(0, 64)):
    return DataLoader(TensorDataset(INPUTS[rows], TARGETS[rows]), batch_size=size)


def make_trainer(epochs=3, package=pl, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"enable_checkpointing": False, **options}
    return package.Trainer(max_epochs=epochs, accelerator="cpu", **quiet, **options)


def distance(first, second):
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


class Rows(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader(32, slice(64, 96))

    def test_dataloader(self):
        return [loader(32, slice(64, 96))]


class OnlyTrain(pl.LightningDataModule):
    def train_dataloader(self):
        return loader()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeepEnsemble(make_net, 3),
        lambda: BatchEnsemble(make_net(), 3),
        lambda: enfold.SWAG(make_net(), 3, start=0.3),
        lambda: SnapshotEnsemble(make_net(), 3),
        lambda: enfold.WASH(make_net, 3, probability=0.2, optimizer_state=True),
        lambda: enfold.TreeNet(make_net(), 3),
    ],
    ids=["DeepEnsemble", "BatchEnsemble", "SWAG", "SnapshotEnsemble", "WASH", "TreeNet"],
)
def test_an_ensemble_trains_as_by_fit(make):
    torch.manual_seed(0)
    ensemble = make()
    twin = copy.deepcopy(ensemble)
    settings = {"lr": 1e-2, "clip_norm": 0.5, "label_smoothing": 0.1}
    make_trainer().fit(EnsembleModule(ensemble, **settings), loader())
    fit(twin, loader(), epochs=3, quiet=True, **settings)
    assert distance(ensemble, twin) < 1e-5
    start = copy.deepcopy(make())
    assert distance(ensemble, start) > 1e-2
    assert not ensemble.training


def test_metrics_of_the_mean_prediction_are_logged():
    module = EnsembleModule(DeepEnsemble(make_net, 3), lr=1e-2)
    trainer = make_trainer()
    trainer.fit(module, Rows())
    row = enfold.evaluate(module.ensemble, loader(32, slice(64, 96)))
    logged = trainer.callback_metrics
    for name in ("accuracy", "nll", "brier"):
        assert float(logged[f"val_{name}"]) == pytest.approx(row.scores[name], abs=1e-6)
    assert "train_loss" in logged
    found = trainer.test(module, Rows(), verbose=False)[0]
    assert found["test_nll"] == pytest.approx(row.scores["nll"], abs=1e-6)
    predictions = trainer.predict(module, loader(32, slice(64, 96)))
    assert predictions[0]["members"].shape == (3, 32, 3)
    torch.testing.assert_close(predictions[0]["mean"], module.ensemble.predict(INPUTS[64:96]).mean)


def test_training_resumes_from_a_checkpoint_to_the_same_weights(tmp_path):
    start = enfold.SWAG(make_net(), 2, start=0.0)
    whole, first, second = (EnsembleModule(copy.deepcopy(start), lr=1e-2) for _ in range(3))
    make_trainer(4).fit(whole, loader())
    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    make_trainer(4, callbacks=[saver], enable_checkpointing=True).fit(first, loader())
    file = tmp_path / "epoch=1.ckpt"
    content = torch.load(file, weights_only=True)
    assert int(content["state_dict"]["ensemble.count"]) == 2
    make_trainer(4).fit(second, loader(), ckpt_path=file)
    assert distance(whole.ensemble, second.ensemble) < 1e-6
    assert int(second.ensemble.count) == 4


def test_a_checkpoint_restores_values_and_task(tmp_path):
    module = EnsembleModule(DeepEnsemble(lambda: nn.Linear(6, 1), 2), task="regression", lr=1e-2)
    rows = DataLoader(TensorDataset(INPUTS, INPUTS[:, :1]), batch_size=32)
    trainer = make_trainer(1)
    trainer.fit(module, rows)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    blank = DeepEnsemble(lambda: nn.Linear(6, 1), 2, seed=7)
    again = EnsembleModule.load_from_checkpoint(tmp_path / "last.ckpt", ensemble=blank)
    assert again.ensemble.task == module.ensemble.task
    torch.testing.assert_close(again.ensemble.predict(INPUTS).mean, module.ensemble.predict(INPUTS).mean)


def test_clipping_of_the_trainer_is_by_member():
    torch.manual_seed(0)
    ensemble = DeepEnsemble(make_net, 3)
    twin = copy.deepcopy(ensemble)
    make_trainer(gradient_clip_val=0.3).fit(EnsembleModule(ensemble, lr=1e-1, optimizer="sgd"), loader())
    fit(twin, loader(), epochs=3, quiet=True, lr=1e-1, optimizer="sgd", clip_norm=0.3)
    assert distance(ensemble, twin) < 1e-5


def test_accumulated_gradients_are_one_step():
    ensemble = DeepEnsemble(lambda: nn.Linear(6, 3), 2)
    twin = copy.deepcopy(ensemble)
    make_trainer(accumulate_grad_batches=2).fit(EnsembleModule(ensemble, lr=1e-2), loader(8))
    fit(twin, loader(16), epochs=3, lr=1e-2, quiet=True)
    assert distance(ensemble, twin) < 1e-5


@pytest.mark.parametrize("perturb", [None, enfold.Gaussian(0.1)], ids=["clean", "gaussian"])
def test_a_student_trains_as_by_distill(perturb):
    teacher = DeepEnsemble(make_net, 3)
    fit(teacher, loader(), epochs=3, lr=1e-2, quiet=True)
    init = make_net()
    options = {"loss": enfold.KD(temperature=2.0, alpha=0.8), "perturb": perturb, "lr": 1e-2}
    module = DistillModule(copy.deepcopy(init), teacher, **options)
    before = copy.deepcopy(teacher.state_dict())
    make_trainer().fit(module, Rows())
    expected = enfold.distill(teacher, loader(), init=init, epochs=3, quiet=True, **options)
    assert distance(module.network, expected) < 1e-5
    assert distance(module.network, init) > 1e-2
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    assert not any(name.startswith("teacher") or ".teacher" in name for name in module.state_dict())


def test_a_student_needs_no_targets():
    teacher = DeepEnsemble(make_net, 3)
    fit(teacher, loader(), epochs=1, lr=1e-2, quiet=True)
    init = make_net()
    inputs = [batch[0] for batch in loader()]
    batches = torch.utils.data.DataLoader(inputs, batch_size=None)
    modules = [DistillModule(copy.deepcopy(init), teacher, lr=1e-2) for _ in range(2)]
    for module, rows in zip(modules, (batches, loader()), strict=True):
        make_trainer(1).fit(module, rows)
    assert distance(modules[0].network, modules[1].network) == 0
    assert distance(modules[0].network, init) > 1e-3
    with pytest.raises(EnfoldError, match="target"):
        make_trainer(1).fit(DistillModule(make_net(), teacher, loss=enfold.KD(alpha=0.5), lr=1e-2), batches)


def test_a_student_may_be_an_ensemble_and_the_loss_may_make_a_network_of_it():
    teacher = DeepEnsemble(make_net, 3)
    module = DistillModule(BatchEnsemble(make_net(), 3), teacher, loss=enfold.OneToOne(), lr=1e-2)
    make_trainer(1).fit(module, Rows())
    assert module.network is module.student


class Own(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.05)


def test_members_are_collected_from_a_module_of_the_user():
    torch.manual_seed(0)
    module = Own()
    ensemble = enfold.SWA(module.net, start=0.5)
    weights = []

    class Record(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            weights.append(copy.deepcopy(pl_module.net[0].weight.detach()))

    collect = CollectCallback(ensemble)
    make_trainer(4, callbacks=[collect, Record()]).fit(module, loader())
    torch.testing.assert_close(ensemble.member(0)[0].weight.detach(), torch.stack(weights[2:]).mean(0))
    network = copy.deepcopy(ensemble.member(0))  # batch-norm statistics are those of the mean weights
    with torch.no_grad():
        hidden = network[0](INPUTS[:64])
    torch.testing.assert_close(network[1].running_mean, hidden.mean(0), atol=1e-5, rtol=1e-5)


def test_collecting_resumes_from_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    start = Own()
    found = []
    for stop in (None, 2):
        module = copy.deepcopy(start)
        ensemble = enfold.SWAG(module.net, 2, start=0.0)
        saver = pl.callbacks.ModelCheckpoint(tmp_path, filename=f"{stop}-{{epoch}}", save_top_k=-1)
        options = {"callbacks": [CollectCallback(ensemble), saver], "enable_checkpointing": True}
        make_trainer(4, **options).fit(module, loader())
        if stop:
            module, ensemble = copy.deepcopy(start), enfold.SWAG(start.net, 2, start=0.0)
            trainer = make_trainer(4, callbacks=[CollectCallback(ensemble)])
            trainer.fit(module, loader(), ckpt_path=tmp_path / "2-epoch=1.ckpt")
        found.append(ensemble)
    assert distance(*found) < 1e-6


def test_a_data_module_is_data():
    module = Rows()
    ensemble = DeepEnsemble(make_net, 2)
    history = fit(ensemble, module, epochs=2, lr=1e-2, quiet=True)
    assert module.calls == ["prepare", "fit"]
    assert len(history.epochs[0].validation_loss) == 2
    twin = DeepEnsemble(make_net, 2)
    fit(twin, module.train_dataloader(), module.val_dataloader(), epochs=2, lr=1e-2, quiet=True)
    assert distance(ensemble, twin) == 0
    student = enfold.distill(ensemble, module, epochs=1, quiet=True)
    row = enfold.evaluate(student, module, reference=ensemble)
    assert row.scores == enfold.evaluate(student, module.test_dataloader()[0], reference=ensemble).scores


def test_a_data_module_from_datasets_is_data():
    rows = TensorDataset(INPUTS, TARGETS)
    module = pl.LightningDataModule.from_datasets(rows, rows, batch_size=32)
    history = fit(DeepEnsemble(make_net, 2), module, epochs=1, quiet=True)
    assert history.epochs[0].steps == 3
    assert history.epochs[0].validation_loss


def test_a_data_module_without_validation_or_test_loader():
    ensemble = DeepEnsemble(make_net, 2)
    assert fit(ensemble, OnlyTrain(), epochs=1, quiet=True).epochs[0].validation_loss == []
    make_trainer(1).fit(EnsembleModule(ensemble), OnlyTrain())
    for call, name in (
        (lambda: fit(ensemble, OnlyTrain(), epochs=1, patience=2, quiet=True), "patience"),
        (lambda: fit(ensemble, loader(), OnlyTrain(), epochs=1, quiet=True), "val_dataloader"),
        (lambda: enfold.evaluate(ensemble, OnlyTrain()), "test_dataloader"),
        (lambda: enfold.compress(ensemble, OnlyTrain(), quiet=True), "val"),
    ):
        with pytest.raises(EnfoldError, match=name):
            call()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: EnsembleModule(make_net()), "ensemble"),
        (lambda: EnsembleModule(DeepEnsemble(make_net, 2), epochs=3), "epochs"),
        (lambda: EnsembleModule(DeepEnsemble(make_net, 2), precision="bfloat16"), "precision"),
        (lambda: EnsembleModule(DeepEnsemble(make_net, 2), order="split"), "order"),
        (lambda: EnsembleModule(DeepEnsemble(make_net, 2), ema=0.9), "ema"),
        (lambda: EnsembleModule(DeepEnsemble(make_net, 2), learning_rate=0.1), "learning_rate"),
        (lambda: DistillModule(make_net, DeepEnsemble(make_net, 2)), "student"),
        (lambda: DistillModule(make_net(), "teacher"), "teacher"),
        (lambda: DistillModule(make_net(), make_net(), loss="KD"), "loss"),
        (lambda: DistillModule(make_net(), make_net(), perturb="mixup"), "perturb"),
        (lambda: DistillModule(make_net(), make_net(), batch_size=3), "batch_size"),
        (lambda: CollectCallback(DeepEnsemble(make_net, 2)), "ensemble"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make, name):
    with pytest.raises(EnfoldError, match=name):
        make()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: make_trainer(-1, max_steps=2).fit(EnsembleModule(DeepEnsemble(make_net, 2)), loader()), "max_epochs"),
        (lambda: make_trainer().fit(EnsembleModule(enfold.Bagging(make_net, 2)), loader()), "fit"),
        (lambda: make_trainer().fit(EnsembleModule(DeepEnsemble(make_net, 2), lr=(0.1, 0.2)), loader()), "lr"),
        (lambda: make_trainer(4).fit(EnsembleModule(SnapshotEnsemble(make_net(), 3)), loader()), "epochs"),
        (
            lambda: make_trainer(callbacks=[CollectCallback(enfold.SWA(nn.Linear(2, 2)))]).fit(Own(), loader()),
            "network",
        ),
    ],
)
def test_trainings_that_cannot_work_are_refused_at_the_start(call, name):
    with pytest.raises(EnfoldError, match=name):
        call()


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_missing_package_is_named_with_its_install_line(package, monkeypatch):
    module = f"enfold.integrations.{package}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"enfold\[lightning\]"):
        __import__(module)


def test_the_package_pytorch_lightning_has_the_same_classes():
    package = pytest.importorskip("pytorch_lightning")
    from enfold.integrations import pytorch_lightning as adapter

    module = adapter.EnsembleModule(DeepEnsemble(make_net, 2), lr=1e-2)
    make_trainer(1, package=package).fit(module, loader())
    assert not module.ensemble.training
