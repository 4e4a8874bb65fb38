"""A training that is asked to stop ends after its batch, stores its place and resumes to the same bits."""

import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

import enfold.train.checkpoint as module
from enfold import BatchEnsemble, DeepEnsemble, SnapshotEnsemble
from enfold.ensembles import SWA
from enfold.errors import EnvironmentWarning
from enfold.io.stopping import request_stop, stops_by_itself
from enfold.train import TrainConfig, fit
from enfold.train.loop import Fit

PLAN = TrainConfig(epochs=2, batch_size=16, lr=0.05)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


MODELS = {
    "network": (network, {}),
    "members": (lambda: DeepEnsemble(network(), 2), {}),
    "member by member": (lambda: DeepEnsemble(network(), 2, engine="loop"), {"optimizer": "sgd"}),
    "batch ensemble": (lambda: BatchEnsemble(network(), 2), {"clip_norm": 1.0}),
    "average": (network, {"ema": 0.9, "select": "last"}),
    "snapshots": (lambda: SnapshotEnsemble(network(), 2), {}),
    "weight average": (lambda: SWA(network()), {}),
}


def stopping_after(steps: int, monkeypatch) -> None:
    """Send the request in the step of that number."""
    step, left = Fit._step, [steps]

    def counted(self, *given):
        left[0] -= 1
        if not left[0]:
            assert request_stop()
        return step(self, *given)

    monkeypatch.setattr(Fit, "_step", counted)


def assert_same_bits(first: nn.Module, second: nn.Module) -> None:
    pairs = zip(first.state_dict().items(), second.state_dict().values(), strict=True)
    assert [name for (name, tensor), other in pairs if not torch.equal(tensor, other)] == []


def fit_stopped(model, data, config, file, monkeypatch, steps):
    with monkeypatch.context() as patched:
        stopping_after(steps, patched)
        with pytest.raises(KeyboardInterrupt):
            fit(model, data, config=config, checkpoint=file, quiet=True)


def stopped_and_resumed(make, data, config, file, monkeypatch, stops):
    for steps in stops:
        fit_stopped(make(), data, config, file, monkeypatch, steps)
        torch.manual_seed(99)
    model = make()
    return model, fit(model, data, config=config, checkpoint=file, quiet=True)


@pytest.mark.parametrize("kind", MODELS)
def test_stopped_within_an_epoch_and_resumed_to_the_same_bits(data, tmp_path, monkeypatch, kind):
    make, settings = MODELS[kind]
    config, whole = PLAN.update(settings), make()
    expected = fit(whole, data, config=config, quiet=True)
    steps = expected.epochs[0].steps
    assert steps > 3
    stops = (1, steps - 1, 2)  # in the first step, at the end of the first epoch, in the second
    found, history = stopped_and_resumed(make, data, config, tmp_path / "t.safetensors", monkeypatch, stops)
    assert_same_bits(found, whole)
    assert [each.train_loss for each in history.epochs] == [each.train_loss for each in expected.epochs]
    assert [each.validation_loss for each in history.epochs] == [each.validation_loss for each in expected.epochs]
    assert (history.chosen, history.start is None) == (expected.chosen, expected.start is None)


class Noisy(Dataset):
    """Examples with noise from torch's generator, as transforms of images draw it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index):
        return torch.full((8,), index / 64) + torch.rand(8), index % 4


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loader_that_draws_noise_gives_the_same_batches(tmp_path, monkeypatch, workers):
    loader = DataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=workers)
    config, whole = PLAN.replace(select="last"), network()
    fit(whole, loader, config=config, quiet=True)
    found, _ = stopped_and_resumed(network, loader, config, tmp_path / "t.safetensors", monkeypatch, (2, 3))
    assert_same_bits(found, whole)


def test_a_second_request_is_not_taken():
    taken = [request_stop()]
    with pytest.raises(KeyboardInterrupt), stops_by_itself():
        taken += [request_stop(), request_stop()]
    assert [*taken, request_stop()] == [False, True, False, False]


def test_without_a_checkpoint_no_request_is_taken(data, monkeypatch):
    stopping_after(1, monkeypatch)
    with pytest.raises(AssertionError):
        fit(network(), data, config=PLAN, quiet=True)


def stored_with(file, **changes):
    """Write the file as if under another environment."""
    with safe_open(file, "pt") as opened:
        progress = json.loads(opened.metadata()["progress"])
    progress["environment"] |= changes
    save_file(load_file(file), file, {"progress": json.dumps(progress)})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("threads", "OMP_NUM_THREADS=7"),
        ("torch", "install torch==7"),
        ("processor", "continue on the same machine"),
        ("engine", r"use set_engine\('7'\)"),
    ],
)
def test_another_environment_is_named(data, tmp_path, monkeypatch, name, says):
    file = tmp_path / "t.safetensors"
    fit_stopped(DeepEnsemble(network(), 2), data, PLAN, file, monkeypatch, 2)
    stored_with(file, **{name: "7"})
    with pytest.warns(EnvironmentWarning, match=rf"{name} \(7, now .*{says} for the same bits"):
        fit(DeepEnsemble(network(), 2), data, config=PLAN, checkpoint=file, quiet=True)


@pytest.mark.parametrize("stored", [None, [], {}, {"threads": None, "unknown": {}}])
def test_an_environment_of_another_form_changes_nothing(stored):
    found = module.changed_environment(stored, module.training_environment(network()))
    assert "None" in found if stored and "threads" in stored else not found


def test_the_same_environment_gives_no_warning(data, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stopped_and_resumed(network, data, PLAN, tmp_path / "t.safetensors", monkeypatch, (2,))
