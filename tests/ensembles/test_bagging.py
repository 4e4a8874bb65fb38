"""Bagging: own starts, own draws that miss a third of the examples, and the same members as a deep ensemble without."""

from functools import partial

import pytest
import torch

import enfold
from clouds import three_clouds
from enfold.data import Data, Split
from enfold.data.batches import Order
from enfold.ensembles.bagging import Bagging
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.metrics import left_out_fraction
from enfold.networks import MLP
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted


def network():
    torch.manual_seed(0)
    return MLP(4, [8], 3)


def seen(plan: TrainConfig, data: Data, epoch: int) -> torch.Tensor:
    order = Order(plan.batch_size, [0, 1, 2], plan.bootstrap, seed=plan.seed)
    return torch.cat([batch.indices for batch in order.batches(data, epoch)], dim=1)  # (M, N)


def test_a_member_is_trained_on_632_of_1000_examples():
    size = 10_000
    part = Split(torch.zeros(size, 1), torch.zeros(size, dtype=torch.long))
    data = Data(part, part, part, 2, (1,))
    plan = Bagging(any_network(), 3).configure(TrainConfig(batch_size=1000, order="shared"))
    assert (plan.bootstrap, plan.order) == (True, "own")
    drawn = seen(plan, data, 0)
    for member in drawn:
        assert len(member.unique()) / size == pytest.approx(0.632, abs=0.01)
        assert len(member.unique()) / size == pytest.approx(1 - left_out_fraction(size), abs=0.01)
    assert set(drawn[0].tolist()) != set(drawn[1].tolist())
    later = seen(plan, data, 1)
    torch.testing.assert_close(later.sort(1).values, drawn.sort(1).values, rtol=0, atol=0)
    assert not torch.equal(later, drawn), "one sample for all epochs, in another order"


def test_members_start_as_a_deep_ensemble_and_are_trained_on_their_draws(tmp_path):
    data, plan = three_clouds(64, 40, 30), TrainConfig(epochs=3, batch_size=16, lr=0.02)
    build = partial(Bagging, num_members=3, seed=5)
    start = DeepEnsemble(network(), 3, seed=5)
    torch.testing.assert_close(build(network()).expand(), start.expand(), rtol=0, atol=0)
    members = fitted(build(network()), data, plan)
    assert members.seeds == start.seeds
    fit(start, data, config=plan.replace(bootstrap=True), quiet=True)
    torch.testing.assert_close(members(data.test.inputs), start.eval()(data.test.inputs))
    enfold.save(members, tmp_path / "members.safetensors")
    loaded = enfold.load(tmp_path / "members.safetensors", network())
    assert loaded.options() == members.options()
    assert build.keywords.items() <= loaded.options().items()
    torch.testing.assert_close(loaded(data.test.inputs), members(data.test.inputs), rtol=0, atol=0)


def test_invalid_inputs_are_refused():
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        Bagging(any_network(), 0)
    part = three_clouds(8, 8, 8)
    loader = part.replace(train=[(part.train.inputs, part.train.labels)])
    with pytest.raises(EnfoldError, match="bootstrap"):
        fitted(Bagging(network(), 2), loader, TrainConfig(epochs=1))
