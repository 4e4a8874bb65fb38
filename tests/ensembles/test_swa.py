"""SWA: the mean of the last epochs' weights, with batch-norm statistics of its own."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import enfold
from clouds import three_clouds
from enfold.ensembles.swa import SWA, epochs_before
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted

CONTRACT = {"options": {"num_members": 1}, "members_together": True}

DATA = three_clouds(64, 32, 32)
PLAN = TrainConfig(epochs=6, batch_size=16, optimizer="sgd", lr=0.1)


class Interrupted(Exception):
    """Stands for a killed process."""


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.centre.state().items() if "weight" in name}


def trained(build, plan=PLAN, **settings):
    """A model trained by `fit`, and the weights after each epoch."""
    model = build(normed())
    seen = []
    fit(
        model,
        DATA,
        config=plan,
        on_epoch=lambda record: seen.append(weights(model)),
        quiet=True,
        **settings,
    )
    return model, seen


def test_the_mean_of_the_epochs_after_the_start():
    model, seen = trained(partial(SWA, start=0.5))
    assert int(model.count) == 3
    for name, mean in model.mean.state().items():
        if name in seen[0]:
            torch.testing.assert_close(mean, torch.stack([state[name] for state in seen[3:]]).mean(0))
            assert not torch.equal(seen[4][name], seen[5][name])


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30))
def test_a_running_mean_is_the_arithmetic_mean(values):
    model = SWA(nn.Linear(1, 1))
    for value in values:
        nn.init.constant_(model.centre.get_parameter("weight"), value)
        model.collect()
    expected = torch.tensor(values, dtype=torch.float64).mean().float()
    torch.testing.assert_close(model.sample()["weight"].squeeze(), expected, rtol=1e-4, atol=1e-3)


def test_the_mean_of_equal_weights_is_bitwise_equal():
    model = SWA(normed())
    for _ in range(7):
        model.collect()
    for name, mean in model.mean.state().items():
        assert torch.equal(mean, model.centre.state()[name])


def test_half_precision_is_averaged_in_single():
    model = SWA(nn.Linear(4, 4).to(torch.bfloat16))
    for _ in range(300):
        model.collect()
    nn.init.constant_(model.centre.get_parameter("bias"), 4.0)
    before = model.mean.get_buffer("bias").clone()
    model.collect()
    assert model.mean.get_buffer("bias").dtype == torch.float32
    torch.testing.assert_close(model.mean.get_buffer("bias"), before + (4 - before) / 301)
    assert model.sample()["bias"].dtype == torch.bfloat16


def test_batch_norm_statistics_are_those_of_the_mean():
    model, _ = trained(partial(SWA))
    network = model.member(0).eval()
    outputs = network[1](network[0](DATA.train.inputs))
    torch.testing.assert_close(outputs.mean(0), torch.zeros(8), rtol=0, atol=1e-4)
    torch.testing.assert_close(outputs.var(0, correction=0), torch.ones(8), rtol=0.02, atol=0.0)
    centre = model.centre.state()["1.running_mean"]
    assert not torch.allclose(network[1].running_mean, centre)


def test_other_buffers_are_the_trained_ones():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.calls += 1
            return self.layer(inputs)

    model = fitted(SWA(Counting()), DATA, PLAN)
    assert int(model.member(0).calls) == 6 * 4


def test_it_is_one_plain_network_that_predicts():
    network = normed()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    model = fitted(SWA(network), DATA, PLAN)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not model.training
    inputs = DATA.test.inputs
    one = model.member(0)
    assert type(one) is nn.Sequential
    assert one.state_dict().keys() == network.state_dict().keys()
    torch.testing.assert_close(model(inputs), one(inputs)[None])
    predictions = predict(model, DATA.test)
    assert predictions.num_members == 1
    assert (predictions.log_probs[0].argmax(1) == predictions.labels).float().mean() > 0.7


def test_the_network_runs_until_the_end_of_training():
    network, inputs = normed().eval(), DATA.test.inputs
    model = SWA(network)
    assert not model.training
    torch.testing.assert_close(model(inputs), network(inputs)[None])
    model.train()
    assert model(inputs).shape == (1, 32, 3)


def test_the_plan():
    plan = SWA(any_network(), rate=0.1).configure(TrainConfig(epochs=300, patience=5))
    assert (plan.tail, plan.tail_start, plan.tail_factor) == ("constant", 161 / 300, 0.1)
    assert (plan.select, plan.patience) == ("last", None)
    assert plan.rate_factor(250 * 7, 7) == plan.rate_factor(299 * 7, 7) == 0.1
    assert epochs_before(161 / 300, 300) == 161
    assert [epochs_before(0.75, epochs) for epochs in (4, 5, 8)] == [3, 3, 6]


def test_resumed_to_the_same_bits(tmp_path):
    build, file = partial(SWA, start=0.3), tmp_path / "training.safetensors"
    complete, _ = trained(build)

    def stop(record) -> None:
        if record.epoch == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        fit(build(normed()), DATA, config=PLAN, checkpoint=file, on_epoch=stop, quiet=True)
    again, seen = trained(build, checkpoint=file)
    assert len(seen) == 2
    assert all(torch.equal(tensor, complete.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_saved_and_loaded(tmp_path):
    model, _ = trained(partial(SWA))
    enfold.save(model, tmp_path / "model.safetensors")
    loaded = enfold.load(tmp_path / "model.safetensors", normed())
    inputs = DATA.test.inputs
    torch.testing.assert_close(loaded(inputs), model(inputs), rtol=0, atol=0)
    assert loaded.options() == model.options()


def test_training_again_starts_a_new_mean():
    build = partial(SWA, start=0.5)
    model, _ = trained(build)
    fit(model, DATA, config=PLAN.replace(epochs=2), quiet=True)
    assert int(model.count) == 1
    torch.testing.assert_close(model.mean.state()["0.weight"], model.centre.state()["0.weight"].detach())


def test_invalid_options_are_refused():
    with pytest.raises(EnfoldError, match=r"num_members .*got 3"):
        SWA(any_network(), 3)
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        SWA(any_network(), 0)
    with pytest.raises(EnfoldError, match=r"start .*got 1"):
        SWA(any_network(), start=1)
    with pytest.raises(EnfoldError, match=r"rate .*got 0"):
        SWA(any_network(), rate=0)
    with pytest.raises(EnfoldError, match=r"epochs .*got 0"):
        SWA(any_network()).configure(TrainConfig(epochs=0))
    model = SWA(normed())
    with pytest.raises(EnfoldError, match=r"1 or more epochs, got 0"):
        model.on_fit_end(DATA)
    assert not bool(model.ready)
