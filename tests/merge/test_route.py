"""Routes: a fold and what follows it, as one fold."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from enfold.distill.losses.hydra import HydraDistillation
from enfold.distill.losses.kd import KD
from enfold.distill.losses.latent_be import LatentBE
from enfold.ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.merge.average import Average
from enfold.merge.common.folding import Route
from enfold.merge.perm_avg import PermAVG
from enfold.merge.repair import Repair
from enfold.merge.soup import Soup
from enfold.merge.straight_through import StraightThrough
from enfold.merge.weight_matching import WeightMatching
from enfold.train import TrainConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore::enfold.train.diversity.LowDiversityWarning", "ignore:the teachers:UserWarning"
)
PLAN = TrainConfig(epochs=2, batch_size=16, lr=0.01, select="last")
NOTHING = TrainConfig(epochs=0)


def same(one, other) -> bool:
    return all(torch.equal(one.state_dict()[name], tensor) for name, tensor in other.state_dict().items())


def test_steps_are_joined_in_their_order():
    merge, repair, distill = WeightMatching(), Repair(), KD()
    assert (merge >> repair >> distill).steps == (merge, repair, distill)
    assert (merge >> (repair >> distill)).steps == (merge, repair, distill)


def test_a_route_is_its_steps_one_after_the_other(members, data):
    merge, distill = WeightMatching(), KD(plan=PLAN)
    route = merge >> Repair() >> distill
    network = Repair().after(merge(members, data), members, data)
    assert same(route(members, data), distill.after(network, members, data))
    assert not same(route(members, data), network)
    assert type(route(members, data)) is type(members.member(0))
    assert not route(members, data).training


@pytest.mark.parametrize("distill", [KD(plan=NOTHING), LatentBE(plan=NOTHING)])
def test_a_distillation_starts_from_the_network_before_it(members, data, distill):
    """Also if its own start is another."""
    averaged = Average()(members, data)
    student = (Average() >> distill)(members, data)
    for name, parameter in averaged.named_parameters():
        torch.testing.assert_close(dict(student.named_parameters())[name], parameter)


def test_a_share_and_heads_start_from_it_too(members, data):
    averaged = Average()(members, data)
    heads = (Average() >> HydraDistillation(plan=NOTHING, noise=0.0))(members, data)
    assert heads.num_members == 4
    torch.testing.assert_close(heads.member(2).inner.weight, averaged.inner.weight)


def test_members_and_what_came_before_are_left_untouched(members, data, snapshot):
    network = Average()(members, data)
    unchanged, kept = snapshot(members), snapshot(network)
    KD(plan=PLAN).after(network, members, data)
    (WeightMatching() >> Repair() >> KD(plan=PLAN))(members, data)
    assert unchanged()
    assert kept()


def test_each_step_that_trains_has_its_own_file(members, data, tmp_path):
    file = tmp_path / "route.safetensors"
    route = KD(plan=PLAN) >> Repair("reset") >> KD(plan=PLAN, temperature=2.0)
    expected = route(members, data)
    assert same(route(members, data, checkpoint=file), expected)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["route-0.safetensors", "route.safetensors"]
    assert same(route(members, data, checkpoint=file), expected)


def test_what_a_route_gives_is_what_its_last_step_gives():
    assert (WeightMatching() >> KD()).one_network
    assert not (WeightMatching() >> HydraDistillation()).one_network
    network = torch.nn.Linear(4, 3)
    assert (WeightMatching() >> Repair()).answering(network) is network


def test_routes_that_cannot_be(members, data):
    for wrong in (KD, 3):
        with pytest.raises(EnfoldError, match=r"made of folds and steps, got .*: write KD\(\)"):
            _ = WeightMatching() >> wrong
    with pytest.raises(EnfoldError, match="but Average starts from members alone: put it first"):
        KD() >> Average()
    with pytest.raises(EnfoldError, match="must begin with a fold, got Repair"):
        (Repair() >> KD())(members, data)
    with pytest.raises(
        EnfoldError, match=r"which needs a network before it: write WeightMatching\(\) >> Repair\(\), or"
    ):
        Repair()(members, data)
    with pytest.raises(EnfoldError, match="at least one step"):
        Route(())
    with pytest.raises(EnfoldError, match="has a student of its own: leave student out"):
        (Average() >> KD(student=lambda: torch.nn.Linear(4, 3)))(members, data)
    with pytest.raises(EnfoldError, match="needs members of one architecture, got MixedEnsemble"):
        (WeightMatching() >> Repair())(MixedEnsemble([torch.nn.Linear(4, 3)]), data)
    with pytest.raises(EnfoldError, match="must begin with a step, got Average"):
        (Average() >> Repair()).after(torch.nn.Linear(4, 3), members, data)


@pytest.mark.parametrize(
    "fold", [WeightMatching(), PermAVG(), Soup(), KD(), WeightMatching() >> Repair(), WeightMatching().matched]
)
def test_a_loader_alone_is_no_data(members, data, fold):
    loader = DataLoader(TensorDataset(data.train.inputs, data.train.labels), 8)
    with pytest.raises(EnfoldError, match=r"needs data with its parts, got DataLoader: pass enfold.Data\(train, "):
        fold(members, loader)


@pytest.mark.parametrize("fold", [PermAVG(plan=PLAN), StraightThrough(epochs=1), KD(plan=PLAN) >> Repair()])
def test_a_checkpoint_may_be_given_as_text(members, data, tmp_path, fold):
    expected = fold(members[:3], data)
    assert same(fold(members[:3], data, checkpoint=str(tmp_path / "fold.safetensors")), expected)
    assert list(tmp_path.iterdir())
