"""FGE: the paper's triangle, members at its low points, a start that leaves enough epochs, and resuming."""

from functools import partial

import pytest
import torch

import enfold
from clouds import three_clouds
from enfold.ensembles.fge import FGE
from enfold.errors import EnfoldError
from enfold.networks import MLP
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted

CONTRACT = {"members_together": True}

DATA = three_clouds(64, 40, 30)

pytestmark = pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")


def network():
    torch.manual_seed(0)
    return MLP(4, [8], 3)


def published(epoch, iteration, cycle, high, low):
    """Equation (1) as the authors' schedule has it: `iteration` is the part of the epoch that is over."""
    t = (epoch % cycle + iteration) / cycle
    return high * (1 - 2 * t) + low * 2 * t if t < 0.5 else high * (2 * t - 1) + low * (2 - 2 * t)


@pytest.mark.parametrize("cycle", [2, 4])
def test_the_learning_rate_is_the_papers(cycle):
    build, steps = partial(FGE, num_members=3, start=0.8, cycle=cycle), 7
    plan = build(any_network()).configure(TrainConfig(epochs=100))
    ours = [plan.rate_factor(80 * steps + step, steps) for step in range(20 * steps)]
    theirs = [published(step // steps, step % steps / steps, cycle, 0.5, 0.1) for step in range(20 * steps)]
    assert ours == pytest.approx(theirs, abs=1e-9)
    assert plan.rate_factor(79 * steps, steps) == pytest.approx(0.5, abs=0.01), "the cosine has come down to the top"


@pytest.mark.parametrize("cycle", [2, 4])
def test_members_are_stored_at_the_lowest_learning_rate(cycle):
    build, steps = partial(FGE, num_members=3, cycle=cycle), 10
    plan = build(any_network()).configure(TrainConfig(epochs=40))
    moments = build(any_network()).snapshot_epochs(plan)
    assert len(moments) == 3
    assert moments == sorted(moments, reverse=True)
    for epoch in moments:
        low = plan.rate_factor(epoch * steps, steps)
        assert low == pytest.approx(0.1)
        assert low < plan.rate_factor(epoch * steps - 1, steps)
        assert low < plan.rate_factor(epoch * steps + 1, steps)


def test_the_published_run_has_twenty_members():
    build = partial(FGE, num_members=20)
    plan = build(any_network()).configure(TrainConfig(epochs=200))
    assert plan.tail_start == 0.8
    assert build(any_network()).snapshot_epochs(plan) == list(range(199, 160, -2))


def test_cycles_start_earlier_for_more_members():
    plan = FGE(any_network(), 4).configure(TrainConfig(epochs=20, warmup_epochs=15.0, patience=2))
    assert (plan.tail_start, plan.warmup_epochs, plan.select) == (13 / 20, 13.0, "last")
    assert FGE(any_network(), 4).snapshot_epochs(plan) == [20, 18, 16, 14]


def test_members_are_the_networks_at_the_ends_of_cycles():
    build, seen = partial(FGE, num_members=2), {}
    plan = build(any_network()).configure(TrainConfig(epochs=6, batch_size=16, lr=0.05))
    model = build(network())

    def keep(epoch):
        seen[epoch.epoch + 1] = {name: tensor.detach().clone() for name, tensor in model.centre.state().items()}

    fit(model, DATA, config=plan, on_epoch=keep, quiet=True)
    for member, epoch in enumerate(build(any_network()).snapshot_epochs(plan)):
        for name, tensor in model.expand().items():
            torch.testing.assert_close(tensor[member], seen[epoch][name], rtol=0, atol=0)


def test_training_resumes_with_the_members_and_what_is_saved_is_loaded(tmp_path):
    build, file = partial(FGE, num_members=3), tmp_path / "checkpoint.safetensors"
    plan = TrainConfig(epochs=8, batch_size=16, lr=0.05)

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.epoch == 5:
            raise Stop

    complete = fitted(build(network()), DATA, plan)
    with pytest.raises(Stop):
        fit(build(network()), DATA, config=plan, checkpoint=file, on_epoch=stop, quiet=True)
    resumed = fitted(build(network()), DATA, plan, checkpoint=file)
    torch.testing.assert_close(resumed.state_dict(), complete.state_dict(), rtol=0, atol=0)
    enfold.save(complete, tmp_path / "model.safetensors")
    loaded = enfold.load(tmp_path / "model.safetensors", network())
    torch.testing.assert_close(loaded(DATA.test.inputs), complete(DATA.test.inputs), rtol=0, atol=0)


def test_a_plan_without_cycles_gives_the_last_epochs():
    assert FGE(any_network(), 3).snapshot_epochs(TrainConfig(epochs=5)) == [5, 4, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cycle": 3}, r"cycle .*got 3"),
        ({"start": 1.0}, r"start .*got 1\.0"),
        ({"low": 0.6}, "got low=0.6 and high=0.5: exchange"),
        ({"num_members": 0}, r"num_members .*got 0"),
    ],
)
def test_invalid_options_are_refused(settings, message):
    with pytest.raises(EnfoldError, match=message):
        FGE(any_network(), **settings)


def test_too_few_epochs_are_refused():
    with pytest.raises(EnfoldError, match=r"epochs .*got 7"):
        FGE(any_network(), 4).configure(TrainConfig(epochs=7))
    with pytest.raises(EnfoldError, match=r"config .*got 3"):
        FGE(any_network(), 4).snapshot_epochs(TrainConfig(epochs=3))
