"""SWAG: moments against their definitions, and the covariance of the samples."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import enfold
from clouds import three_clouds
from enfold import cost
from enfold.ensembles.snapshot_ensemble import SnapshotEnsemble
from enfold.ensembles.swa import SWA
from enfold.ensembles.swag import SWAG
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted

CONTRACT = {"copies": 22}  # a mean, a variance and 20 deviations

DATA = three_clouds(64, 32, 32)
PLAN = TrainConfig(epochs=8, batch_size=16, optimizer="sgd", lr=0.3)


class Interrupted(Exception):
    """Stands for a killed process."""


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def walked(build, path: torch.Tensor):
    """Members of a network with three weights that has gone through the rows of `path`."""
    model = build(nn.Linear(3, 1, bias=False))
    for row in path:
        with torch.no_grad():
            model.centre.get_parameter("weight").copy_(row[None])
        model.collect()
    model.ready.fill_(True)
    return model.eval()


def path(count: int, seed: int = 0) -> torch.Tensor:
    mixed = torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.5, 0.0], [0.0, 0.3, 0.2]])
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)) @ mixed + torch.tensor([5.0, -2.0, 0.0])


def columns(rows: torch.Tensor) -> torch.Tensor:
    """Each row minus the mean of all up to it."""
    return torch.stack([rows[i] - rows[: i + 1].mean(0) for i in range(len(rows))])


@settings(deadline=None)
@given(count=st.integers(1, 12), rank=st.integers(2, 5), seed=st.integers(0, 100))
def test_the_moments_are_their_definitions(count, rank, seed):
    rows = path(count, seed)
    model = walked(partial(SWAG, num_members=2, rank=rank), rows)
    exact = rows.double()
    torch.testing.assert_close(model.mean.state()["weight"][0].double(), exact.mean(0), rtol=1e-5, atol=1e-5)
    variance = (exact**2).mean(0) - exact.mean(0) ** 2
    torch.testing.assert_close(model.variance.state()["weight"][0].double(), variance, rtol=1e-4, atol=1e-6)
    found = model.deviations.state()["weight"][: min(count, rank), 0].double()
    kept = sorted(range(max(0, count - rank), count), key=lambda number: number % rank)  # a ring
    torch.testing.assert_close(found, columns(exact)[kept], rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=20))
def test_the_variance_is_never_negative(values):
    model = walked(partial(SWAG, num_members=2, rank=2), torch.tensor(values)[:, None].expand(-1, 3))
    assert (model.variance.state()["weight"] >= 0).all()
    assert all(torch.isfinite(tensor).all() for tensor in model.sample().values())


def test_a_small_variance_around_a_large_mean_is_not_lost():
    """The mean of squares minus the squared mean would be off by thousands of times the variance."""
    steps = torch.tensor([0.0, 1.0, 0.0, 1.0]) / 256
    model = walked(partial(SWAG, num_members=2, rank=2), (1000 + steps)[:, None].expand(-1, 3))
    torch.testing.assert_close(model.variance.state()["weight"], torch.full((1, 3), (0.5 / 256) ** 2))


@pytest.mark.parametrize(
    ("build", "count", "scale"),
    [
        (partial(SWAG, num_members=600, rank=3), 9, 0.5),
        (partial(SWAG, num_members=600, rank=20), 4, 0.5),  # fewer columns than the rank
        (partial(SWAG, num_members=600, rank=3, scale=2.0), 9, 2.0),
        (partial(SWAG, num_members=600, diagonal=True), 9, 1.0),
        (partial(SWAG, num_members=600, diagonal=True, scale=0.5), 9, 0.5),
    ],
)
def test_the_covariance_of_the_members(build, count, scale):
    rows = path(count)
    model = walked(build, rows)
    samples = model.sample()["weight"].squeeze(1)
    covariance = rows.var(0, correction=0).diag()
    if not model.diagonal:
        last = columns(rows)[-model.rank :]
        covariance = covariance + last.T @ last / (len(last) - 1)
    expected = scale * covariance
    error = 6 * (torch.outer(expected.diag(), expected.diag()) + expected**2).sqrt() / 600**0.5
    assert ((samples.T.cov() - expected).abs() < error).all()
    assert ((samples.mean(0) - rows.mean(0)).abs() < 6 * (expected.diag() / 600).sqrt()).all()


def test_scale_zero_is_swa():
    swag, swa = partial(SWAG, num_members=3, scale=0.0), partial(SWA)
    drawn = swag(normed())
    with pytest.warns(UserWarning, match="nearly identical"):
        fit(drawn, DATA, config=PLAN, quiet=True)
    mean = fitted(swa(normed()), DATA, PLAN)
    torch.testing.assert_close(drawn(DATA.test.inputs), mean(DATA.test.inputs).expand(3, -1, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("diagonal", [False, True])
def test_trained_members(diagonal, tmp_path):
    network = normed()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    build = partial(SWAG, num_members=4, diagonal=diagonal, scale=2.0)
    model = fitted(build(network), DATA, PLAN)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert int(model.count) == 4  # of 8 epochs, 4.3 before the start
    predictions = predict(model, DATA.test)
    assert predictions.log_probs.shape == (4, 32, 3)
    assert (predictions.log_probs.exp().mean(0).argmax(1) == predictions.labels).float().mean() > 0.7
    loop = torch.stack([member.eval()(DATA.test.inputs) for member in model])
    torch.testing.assert_close(model(DATA.test.inputs), loop, rtol=1e-4, atol=1e-5)
    enfold.save(model, tmp_path / "model.safetensors")
    loaded = enfold.load(tmp_path / "model.safetensors", normed())
    assert loaded.options() == model.options()
    assert build.keywords.items() <= loaded.options().items()
    torch.testing.assert_close(loaded(DATA.test.inputs), model(DATA.test.inputs), rtol=0, atol=0)
    assert bool(list(model.deviations.buffers())) != diagonal


def test_every_member_has_batch_norm_statistics_of_its_own():
    model = fitted(SWAG(normed(), 3, scale=2.0), DATA, PLAN)
    means = model.own.state()["1.running_mean"]
    for index in range(3):
        hidden = model.member(index)[0](DATA.train.inputs)
        torch.testing.assert_close(means[index], hidden.mean(0), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(means[0], means[1])


def test_members_are_stable_and_the_first_of_more():
    rows = path(6)
    few, more = walked(partial(SWAG, num_members=3, rank=4), rows), walked(partial(SWAG, num_members=4, rank=4), rows)
    first = few.sample()["weight"]
    torch.manual_seed(7)
    assert torch.equal(few.sample()["weight"], first)
    assert torch.equal(more.sample()["weight"][:3], first)
    assert torch.equal(copy.deepcopy(few).sample()["weight"], first)
    assert not torch.equal(walked(partial(SWAG, num_members=3, rank=4, seed=1), rows).sample()["weight"], first)


def test_members_are_drawn_once_and_again_when_the_moments_change(monkeypatch):
    model = walked(partial(SWAG, num_members=3, rank=4), path(6))
    with torch.inference_mode():
        first = model(torch.ones(2, 3))
    drawn = []
    plain = type(model).draw
    monkeypatch.setattr(type(model), "draw", lambda self, index: drawn.append(index) or plain(self, index))
    inputs = torch.ones(2, 3, requires_grad=True)
    outputs = model(inputs)
    outputs.sum().backward()  # what was drawn in inference mode can be used outside it
    torch.testing.assert_close(outputs, first)
    assert inputs.grad is not None
    assert drawn == []
    with torch.no_grad():
        model.mean.get_buffer("weight").add_(1)
    torch.testing.assert_close(model(inputs), outputs + 3)
    assert drawn == [0, 1, 2]


def test_resumed_to_the_same_bits(tmp_path):
    build, file = partial(SWAG, num_members=3, rank=3, start=0.2, scale=2.0), tmp_path / "training.safetensors"
    complete, cut, again = (build(normed()) for _ in range(3))
    plan = build(any_network()).configure(PLAN)
    fit(complete, DATA, config=plan, quiet=True)

    def stop(record) -> None:
        if record.epoch == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        fit(cut, DATA, config=plan, checkpoint=file, on_epoch=stop, quiet=True)
    fit(again, DATA, config=plan, checkpoint=file, quiet=True)
    assert all(torch.equal(tensor, complete.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert int(again.count) == 7
    assert torch.equal(again(DATA.test.inputs), complete(DATA.test.inputs))


def test_invalid_options_are_refused():
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        SWAG(any_network(), 0)
    with pytest.raises(EnfoldError, match=r"rank .*got 1"):
        SWAG(any_network(), rank=1)
    assert SWAG(any_network(), rank=1, diagonal=True).spread == 1
    with pytest.raises(EnfoldError, match=r"scale .*got -1"):
        SWAG(any_network(), scale=-1)
    with pytest.raises(EnfoldError, match=r"variance_floor .*got -0\.1"):
        SWAG(any_network(), variance_floor=-0.1)
    with pytest.raises(EnfoldError, match=r"start .*got 1\.5"):
        SWAG(any_network(), start=1.5)
    with pytest.raises(EnfoldError, match=r"epochs .*got 1"):
        fitted(SWAG(normed(), start=0.75), DATA, PLAN.replace(epochs=4))
    model = SWAG(normed(), start=0.75)
    seen = []
    with pytest.raises(EnfoldError, match=r"epochs .*got 1"):
        fit(model, DATA, config=PLAN.replace(epochs=4), on_epoch=seen.append, quiet=True)
    assert seen == []


def test_stored_parameters_are_the_statistics():
    network = nn.Linear(5, 3)
    assert cost.parameters(SWAG(network, 4, rank=6)) == (2 + 6) * 18
    assert cost.parameters(SWA(network)) == 18
    assert cost.parameters(SnapshotEnsemble(network, 4)) == 4 * 18
