"""Routes: a fold and what follows it, as one fold."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from enfold.errors import EnfoldError
from enfold.fold import Average, Distill
from enfold.fold.hydra_distillation import HydraDistillation
from enfold.fold.latent_be import LatentBE
from enfold.fold.perm_avg import PermAVG
from enfold.fold.soup import Soup
from enfold.fold.straight_through import StraightThrough
from enfold.fold.weight_matching import WeightMatching
from enfold.folding import Route
from enfold.members import Mixed
from enfold.merging.repair import Repair
from enfold.train import Plan

pytestmark = pytest.mark.filterwarnings("ignore::enfold.train.diversity.Alike", "ignore:the teachers:UserWarning")
PLAN = Plan(epochs=2, batch_size=16, learning_rate=0.01, select="last")
NOTHING = Plan(epochs=0)


def same(one, other) -> bool:
    return all(torch.equal(one.state_dict()[name], tensor) for name, tensor in other.state_dict().items())


def test_steps_are_joined_in_their_order():
    merge, repair, distill = WeightMatching(), Repair(), Distill()
    assert (merge >> repair >> distill).steps == (merge, repair, distill)
    assert (merge >> (repair >> distill)).steps == (merge, repair, distill)


def test_a_route_is_its_steps_one_after_the_other(members, data):
    merge, distill = WeightMatching(), Distill(plan=PLAN)
    route = merge >> Repair() >> distill
    network = Repair().after(merge(members, data), members, data)
    assert same(route(members, data), distill.after(network, members, data))
    assert not same(route(members, data), network)
    assert type(route(members, data)) is type(members.member(0))
    assert not route(members, data).training


@pytest.mark.parametrize("distill", [Distill(plan=NOTHING), LatentBE(plan=NOTHING)])
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
    Distill(plan=PLAN).after(network, members, data)
    (WeightMatching() >> Repair() >> Distill(plan=PLAN))(members, data)
    assert unchanged()
    assert kept()


def test_each_step_that_trains_has_its_own_file(members, data, tmp_path):
    file = tmp_path / "route.safetensors"
    route = Distill(plan=PLAN) >> Repair("reset") >> Distill(plan=PLAN, temperature=2.0)
    expected = route(members, data)
    assert same(route(members, data, checkpoint=file), expected)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["route-0.safetensors", "route.safetensors"]
    assert same(route(members, data, checkpoint=file), expected)


def test_what_a_route_gives_is_what_its_last_step_gives():
    assert (WeightMatching() >> Distill()).one_network
    assert not (WeightMatching() >> HydraDistillation()).one_network
    network = torch.nn.Linear(4, 3)
    assert (WeightMatching() >> Repair()).answering(network) is network


def test_routes_that_cannot_be(members, data):
    for wrong in (Distill, 3):
        with pytest.raises(EnfoldError, match=r"made of folds and steps, got .*: write Distill\(\)"):
            _ = WeightMatching() >> wrong
    with pytest.raises(EnfoldError, match="but Average starts from members alone: put it first"):
        Distill() >> Average()
    with pytest.raises(EnfoldError, match="must begin with a fold, got Repair"):
        (Repair() >> Distill())(members, data)
    with pytest.raises(
        EnfoldError, match=r"which needs a network before it: write WeightMatching\(\) >> Repair\(\), or"
    ):
        Repair()(members, data)
    with pytest.raises(EnfoldError, match="at least one step"):
        Route(())
    with pytest.raises(EnfoldError, match="has a student of its own: leave student out"):
        (Average() >> Distill(student=lambda: torch.nn.Linear(4, 3)))(members, data)
    with pytest.raises(EnfoldError, match="needs members of one architecture, got Mixed"):
        (WeightMatching() >> Repair())(Mixed([torch.nn.Linear(4, 3)]), data)
    with pytest.raises(EnfoldError, match="must begin with a step, got Average"):
        (Average() >> Repair()).after(torch.nn.Linear(4, 3), members, data)


@pytest.mark.parametrize(
    "fold", [WeightMatching(), PermAVG(), Soup(), Distill(), WeightMatching() >> Repair(), WeightMatching().matched]
)
def test_a_loader_alone_is_no_data(members, data, fold):
    loader = DataLoader(TensorDataset(data.train.inputs, data.train.labels), 8)
    with pytest.raises(EnfoldError, match=r"needs data with its parts, got DataLoader: pass enfold.Data\(train, "):
        fold(members, loader)


@pytest.mark.parametrize("fold", [PermAVG(plan=PLAN), StraightThrough(epochs=1), Distill(plan=PLAN) >> Repair()])
def test_a_checkpoint_may_be_given_as_text(members, data, tmp_path, fold):
    expected = fold(members[:3], data)
    assert same(fold(members[:3], data, checkpoint=str(tmp_path / "fold.safetensors")), expected)
    assert list(tmp_path.iterdir())
