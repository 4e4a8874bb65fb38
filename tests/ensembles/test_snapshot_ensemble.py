"""Snapshot ensembles: the paper's learning rate, which epochs are stored, and resuming."""

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import enfold
from clouds import three_clouds
from enfold.ensembles.snapshot_ensemble import SnapshotEnsemble
from enfold.errors import EnfoldError
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted

CONTRACT = {"members_together": True}

DATA = three_clouds(64, 40, 30)
PLAN = TrainConfig(epochs=6, batch_size=16, lr=0.05)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def published(t, total, cycles, rate):
    length = math.ceil(total / cycles)
    return rate / 2 * (math.cos(math.pi * ((t - 1) % length) / length) + 1)


@given(cycles=st.integers(1, 40), length=st.integers(1, 6), steps=st.integers(1, 8))
@example(cycles=22, length=1, steps=1)  # 15 / 22 * 22 is less than 15
def test_the_learning_rate_is_the_papers(cycles, length, steps):
    given_plan = TrainConfig(
        epochs=cycles * length, schedule="step", warmup_epochs=1.0, final_factor=0.2, tail="constant"
    )
    plan = SnapshotEnsemble(any_network(), 1, cycles=cycles).configure(given_plan)
    total = plan.epochs * steps
    ours = [plan.rate_factor(step, steps) for step in range(total)]
    assert ours == pytest.approx([published(t, total, cycles, 1.0) for t in range(1, total + 1)], abs=1e-9)


def test_members_are_the_networks_at_the_ends_of_cycles_newest_first():
    build, seen = partial(SnapshotEnsemble, num_members=2, cycles=3), {}
    model = build(network())

    def keep(epoch):
        seen[epoch.epoch + 1] = {name: tensor.detach().clone() for name, tensor in model.centre.state().items()}

    fit(model, DATA, config=PLAN, on_epoch=keep, quiet=True)
    state = model.expand()
    for member, epoch in enumerate((6, 4)):
        for name, tensor in seen[epoch].items():
            torch.testing.assert_close(state[name][member], tensor, rtol=0, atol=0)
    assert model(DATA.test.inputs).shape == (2, 30, 3)
    assert not torch.equal(state["1.running_mean"][0], state["1.running_mean"][1])


def test_few_members_are_the_first_of_more_of_the_same_cycles():
    few, more = (fitted(SnapshotEnsemble(network(), M, cycles=3), DATA, PLAN) for M in (2, 3))
    torch.testing.assert_close(more(DATA.test.inputs)[:2], few(DATA.test.inputs))


def test_training_resumes_with_the_snapshots_and_what_is_saved_is_loaded(tmp_path):
    build, file = partial(SnapshotEnsemble, num_members=3), tmp_path / "checkpoint.safetensors"

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.epoch == 2:
            raise Stop

    complete = fitted(build(network()), DATA, PLAN)
    with pytest.raises(Stop):
        fit(build(network()), DATA, config=PLAN, checkpoint=file, on_epoch=stop, quiet=True)
    resumed = fitted(build(network()), DATA, PLAN, checkpoint=file)
    torch.testing.assert_close(resumed.state_dict(), complete.state_dict(), rtol=0, atol=0)
    enfold.save(complete, tmp_path / "model.safetensors")
    loaded = enfold.load(tmp_path / "model.safetensors", network())
    torch.testing.assert_close(loaded(DATA.test.inputs), complete(DATA.test.inputs), rtol=0, atol=0)
    assert sum(t.numel() for t in complete.snapshots.parameters()) == 0, "members that are stored are not trained"


def test_the_configuration_is_adapted():
    plan = SnapshotEnsemble(any_network(), 4).configure(TrainConfig(epochs=8, warmup_epochs=2.0, patience=3, lr=0.2))
    assert (plan.cycles, plan.schedule, plan.select, plan.patience) == (4, "cosine", "last", None)
    assert (plan.epochs, plan.lr) == (8, 0.2)
    assert SnapshotEnsemble(any_network(), 4).snapshot_epochs(plan) == [8, 6, 4, 2]


@pytest.mark.parametrize(("epochs", "more"), [(10, 12), (3, 4)])
def test_epochs_that_cycles_do_not_divide_are_refused(epochs, more):
    with pytest.raises(EnfoldError, match=rf"4 cycles, got {epochs}: .*epochs={more}"):
        SnapshotEnsemble(any_network(), 4).configure(TrainConfig(epochs=epochs))


def test_invalid_options_are_refused():
    with pytest.raises(EnfoldError, match=r"cycles .*got 3"):
        SnapshotEnsemble(any_network(), 4, cycles=3)
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        SnapshotEnsemble(any_network(), 0)
    with pytest.raises(EnfoldError, match=r"epochs .*got 2"):
        SnapshotEnsemble(any_network(), 5).snapshot_epochs(TrainConfig(epochs=2))
