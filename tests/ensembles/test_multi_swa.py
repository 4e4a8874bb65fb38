"""Averaged modes: the mean of the last epochs, a deep ensemble where there is one, statistics, and resuming."""

from functools import partial

import pytest
import torch
from torch import nn

import enfold
from clouds import three_clouds
from enfold.cost import parameters
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.multi_swa import MultiSWA
from enfold.errors import EnfoldError
from enfold.networks import MLP
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted

DATA = three_clouds(64, 40, 30)
PLAN = TrainConfig(epochs=6, batch_size=16, lr=0.02, select="last")


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("make", [normed, lambda: MLP(4, [8], 3)])
def test_one_checkpoint_a_run_is_a_deep_ensemble(make):
    network = make()
    averaged = fitted(MultiSWA(network, 3, start=1.0, seed=2), DATA, PLAN)
    plain = DeepEnsemble(network, 3, seed=2)
    fit(plain, DATA, config=PLAN, quiet=True)
    torch.testing.assert_close(averaged.expand(), plain.expand(), rtol=0, atol=0)
    assert parameters(averaged) == parameters(plain) == 3 * parameters(network)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_members_are_the_means_of_their_last_checkpoints(engine):
    build, seen = partial(MultiSWA, num_members=2, start=0.5, engine=engine), []
    model = build(normed())

    def keep(epoch):
        seen.append({name: tensor.detach().clone() for name, tensor in model.expand().items()})

    fit(model, DATA, config=PLAN, on_epoch=keep, quiet=True)
    final = model.expand()
    for name in model.skeleton.parameters:
        mean = torch.stack([state[name] for state in seen[3:]]).mean(0)
        torch.testing.assert_close(final[name].detach(), mean, rtol=1e-5, atol=1e-6)
    assert not torch.equal(final["0.weight"], seen[-1]["0.weight"])
    hidden = torch.stack([member[0](DATA.train.inputs) for member in model])
    torch.testing.assert_close(final["1.running_mean"], hidden.mean(1).detach(), rtol=1e-4, atol=1e-5)


def test_the_published_epochs():
    model = MultiSWA(any_network())
    averaged = [epoch for epoch in range(1, 41) if model.is_averaged(epoch, 40)]
    assert averaged == list(range(31, 41))
    assert [epoch for epoch in range(1, 11) if MultiSWA(any_network(), start=1.0).is_averaged(epoch, 10)] == [10]
    assert model.configure(TrainConfig(patience=3)).select == "last"


def test_averaging_equal_checkpoints_changes_nothing():
    model = MultiSWA(MLP(4, [8], 3), 2, start=0.0)
    before = {name: tensor.detach().clone() for name, tensor in model.expand().items()}
    for epoch in range(1, 4):
        model.on_epoch_end(epoch, TrainConfig(epochs=3))
    model.on_fit_end(DATA)
    torch.testing.assert_close(model.expand(), before)


def test_the_last_epochs_are_averaged_also_with_select_best():
    chosen, last = MultiSWA(MLP(4, [8], 3), 2, start=0.0), MultiSWA(MLP(4, [8], 3), 2, start=0.0)
    last.load_state_dict(chosen.state_dict())
    plan = PLAN.replace(lr=0.3, epochs=8)
    assert fit(chosen, DATA, config=plan.replace(select="best"), quiet=True).chosen == []
    fit(last, DATA, config=plan.replace(select="last"), quiet=True)
    torch.testing.assert_close(dict(chosen.state_dict()), dict(last.state_dict()), rtol=0, atol=0)


def test_training_resumes_with_the_means_and_what_is_saved_is_loaded(tmp_path):
    build, file = partial(MultiSWA, num_members=2, start=0.3), tmp_path / "checkpoint.safetensors"

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.epoch == 3:
            raise Stop

    complete = fitted(build(normed()), DATA, PLAN)
    with pytest.raises(Stop):
        fit(build(normed()), DATA, config=PLAN, checkpoint=file, on_epoch=stop, quiet=True)
    resumed = fitted(build(normed()), DATA, PLAN, checkpoint=file)
    torch.testing.assert_close(resumed.state_dict(), complete.state_dict(), rtol=0, atol=0)
    enfold.save(complete, tmp_path / "model.safetensors")
    loaded = enfold.load(tmp_path / "model.safetensors", normed())
    torch.testing.assert_close(loaded(DATA.test.inputs), complete(DATA.test.inputs), rtol=0, atol=0)
    assert loaded.options() == complete.options()
    assert build.keywords.items() <= loaded.options().items()


def test_invalid_options_are_refused():
    with pytest.raises(EnfoldError, match=r"start .*got 1\.5"):
        MultiSWA(any_network(), start=1.5)
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        MultiSWA(any_network(), 0)
