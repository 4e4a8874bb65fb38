"""A network remembers the task that it was trained for."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import enfold
from enfold.errors import EnfoldError
from enfold.tasks import Classification, Multilabel, Regression, remember_task, task_of

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * X[:, 0] * X[:, 1]
GAUSSIAN = Regression(head="gaussian", variance="softplus", axis=-1)
SETTINGS = {"epochs": 2, "batch_size": 16, "lr": 0.01, "quiet": True}


def make(width=2):
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, width))


@pytest.fixture(scope="module")
def ensemble():
    torch.manual_seed(0)
    found = enfold.DeepEnsemble(make, 3)
    enfold.fit(found, (X, Y), (X, Y), task=GAUSSIAN, **SETTINGS)
    return found


@pytest.fixture
def network(ensemble):
    return ensemble.member(1)


def test_fit_records_the_task_beside_the_weights():
    network = make()
    keys = list(network.state_dict())
    enfold.fit(network, (X, Y), task=GAUSSIAN, **SETTINGS)
    assert task_of(network) == GAUSSIAN
    assert list(network.state_dict()) == keys
    assert [name for name, _ in network.named_modules()] == ["", "0", "1", "2"]
    assert enfold.evaluate(network, (X, Y)).scores == enfold.evaluate(network, (X, Y), task=GAUSSIAN).scores


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),  # noqa: S301 - made here
    "torch.save": lambda network: _saved(network),
}


def _saved(network):
    buffer = io.BytesIO()
    torch.save(network, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("name", COPIES)
def test_copies_remember(network, name):
    twin = COPIES[name](network)
    assert task_of(twin) == GAUSSIAN
    assert "nll" in enfold.evaluate(twin, (X, Y)).scores


def test_a_pickled_network_does_not_refer_to_this_package(network):
    assert b"enfold." not in pickle.dumps(network)


def test_saved_and_loaded_networks_remember(network, tmp_path):
    enfold.save(network, tmp_path / "n.safetensors")
    loaded = enfold.load(tmp_path / "n.safetensors", make)
    assert task_of(loaded) == GAUSSIAN
    assert enfold.evaluate(loaded, (X, Y)).scores == enfold.evaluate(network, (X, Y)).scores


RESULTS = {
    "distilled": lambda ensemble: enfold.distill(ensemble, (X, Y), **SETTINGS),
    "three outputs": lambda ensemble: enfold.distill(ensemble, (X, Y), student=lambda: make(3), **SETTINGS),
    "one output": lambda ensemble: enfold.distill(ensemble, (X, Y), student=lambda: make(1), **SETTINGS),
    "latent": lambda ensemble: enfold.distill(ensemble, (X, Y), loss=enfold.LatentBE(), **SETTINGS),
    "one to one": lambda ensemble: enfold.distill(ensemble, (X, Y), loss=enfold.OneToOne(), **SETTINGS),
    "control": lambda ensemble: enfold.train_control(ensemble, (X, Y), **SETTINGS),
    "average": lambda ensemble: enfold.merge.average(ensemble),
    "average of a list": lambda ensemble: enfold.merge.average(ensemble.networks()),
    "soup": lambda ensemble: enfold.merge.soup(ensemble.networks(), (X, Y)),
    "weight matching": lambda ensemble: enfold.merge.weight_matching(ensemble, example=X[:2]),
    "permAVG": lambda ensemble: enfold.merge.perm_avg(ensemble, (X, Y), (X, Y), epochs=1, quiet=True),
    "repair": lambda ensemble: enfold.merge.repair(enfold.merge.average(ensemble), ensemble, (X, Y)),
    "fisher": lambda ensemble: enfold.merge.fisher(ensemble, (X, Y)),
    "ensemble of members": lambda ensemble: enfold.DeepEnsemble(ensemble.networks()),
    "slice": lambda ensemble: ensemble[:2],
    "mixed": lambda ensemble: enfold.MixedEnsemble(ensemble.networks()),
    "batch ensemble": lambda ensemble: enfold.BatchEnsemble(ensemble.member(0), num_members=2),
    "calibrated": lambda ensemble: enfold.calibrate(ensemble.member(0), (X, Y)),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_result_is_used_without_naming_the_task(ensemble, name, tmp_path):
    model = RESULTS[name](ensemble)
    head = {"three outputs": "uncertainty", "one output": "point", "calibrated": "uncertainty"}.get(name, "gaussian")
    assert task_of(model).head == head
    row = enfold.evaluate(model, (X[:30], Y[:30]), (X[30:], Y[30:]), reference=ensemble)
    assert row.gain_recovered is not None
    calibrated = enfold.calibrate(model, (X, Y))
    assert calibrated.predict(X[:4]).mean.shape == (4, 1)
    enfold.predict(model, (X, Y))


def test_an_ensemble_of_networks_for_different_tasks_has_none():
    first, second = make(), make()
    remember_task(first, GAUSSIAN)
    remember_task(second, Classification())
    assert enfold.DeepEnsemble([first, second]).task is None
    assert task_of(first) == GAUSSIAN  # the networks themselves are unchanged


def test_an_explicit_task_wins(network):
    assert "nll" not in enfold.evaluate(network, (X, torch.stack([Y, Y], 1)), task="regression").scores
    enfold.fit(network, (X, (Y > 0).long()), task="classification", **SETTINGS)
    assert task_of(network) == Classification()


def test_a_further_training_continues_with_the_task(network):
    enfold.fit(network, (X, Y), **SETTINGS)
    assert task_of(network) == GAUSSIAN


def test_a_batch_of_another_task_is_refused(network):
    with pytest.raises(EnfoldError, match=r"task must be given.*regression.*classification"):
        enfold.fit(network, (X, (Y > 0).long()), **SETTINGS)
    assert task_of(network) == GAUSSIAN


def test_a_checkpoint_is_continued_by_a_network_that_remembers(tmp_path):
    torch.manual_seed(0)
    network = make(1)
    enfold.fit(network, (X, Y[:, None]), checkpoint=tmp_path / "c.pt", **SETTINGS)
    weight = network[0].weight.clone()
    enfold.fit(network, (X, Y[:, None]), checkpoint=tmp_path / "c.pt", **SETTINGS)
    assert torch.equal(network[0].weight, weight)


def test_networks_with_an_attribute_called_task():
    class Tagged(nn.Linear):
        task = "pretraining"

    network = Tagged(3, 3)
    assert task_of(network) is None
    enfold.fit(network, (X, (Y > 0).long()), **SETTINGS)
    assert enfold.evaluate(network, (X, (Y > 0).long())).scores["nll"] > 0


def test_a_task_of_your_own(tmp_path):
    class Counts(Multilabel):
        name = "counts"

    network = make()
    enfold.fit(network, (X, (X[:, :2] > 0).float()), task=Counts(), **SETTINGS)
    assert type(task_of(copy.deepcopy(network))) is Counts
    enfold.save(network, tmp_path / "n.safetensors")
    assert type(task_of(enfold.load(tmp_path / "n.safetensors", make))) is Counts
