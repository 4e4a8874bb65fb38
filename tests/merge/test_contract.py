"""What every fold keeps to, over the registry: a new file in merge/ or distill/losses/ is tested here with no edit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from enfold.ensemble import MixedEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.registry import Method, method, methods
from enfold.train import TrainConfig

FOLDS = methods("fold")
PLAN = TrainConfig(epochs=2, batch_size=16, lr=0.01, select="last")


def trains(fold: Method) -> bool:
    return "plan" in fold.fields


def made(fold: Method, *, settings: dict[str, object] | None = None, **plan: object):
    """The fold with its defaults, and a short training if it trains."""
    known = {name: value for name, value in (settings or {}).items() if name in fold.fields}
    return fold.make(plan=PLAN.replace(**plan), **known) if trains(fold) else fold.make(**known)


def gives_one_network(fold: Method) -> bool:
    """Whether it returns the user's own class, and not a share of it."""
    return getattr(fold.kind, "one_network", True)


def states_equal(first: nn.Module, second: nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


both = pytest.mark.parametrize("members", ["plain", "normed"], indirect=True)
every_fold = pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
to_one_network = [fold for fold in FOLDS.values() if gives_one_network(fold)]
every_fold_to_one_network = pytest.mark.parametrize("fold", to_one_network, ids=[fold.name for fold in to_one_network])
pytestmark = pytest.mark.filterwarnings(  # two epochs on forty points, and members that are equal on purpose
    "ignore::enfold.merge.soup.SingleModelWarning",
    "ignore::enfold.train.diversity.LowDiversityWarning",
    "ignore::enfold.distill.losses.latent_be.SameTargetsWarning",
)


def test_the_known_folds_are_found():
    assert {"average", "kd", "one_to_one", "hydra", "ae_kd", "end2", "latent_be"} <= FOLDS.keys()
    assert method("fold", "average").kind.__name__ == "Average"


@every_fold
def test_a_fold_is_a_frozen_dataclass_that_tells_its_idea(fold):
    assert fold.kind.__dataclass_params__.frozen
    assert all(
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        for field in fold.fields.values()
    )
    assert fold.idea.endswith(".")
    with pytest.raises(EnfoldError, match="has no setting 'nonsense'"):
        fold.make(nonsense=1)


@both
@every_fold_to_one_network
def test_the_users_own_class_and_keys(fold, members, data):
    network = made(fold)(members, data)
    original = members.member(0)
    assert type(network) is type(original)
    assert {n: t.shape for n, t in network.state_dict().items()} == {
        n: t.shape for n, t in original.state_dict().items()
    }
    assert [(n, p.requires_grad) for n, p in network.named_parameters()] == [
        (n, p.requires_grad) for n, p in original.named_parameters()
    ]
    assert not network.training
    assert all(type(part).__module__.partition(".")[0] != "enfold" for part in network.modules())
    assert network(data.test.inputs).shape == (30, 3)


@both
@every_fold
def test_members_are_left_untouched(fold, members, data, snapshot):
    unchanged = snapshot(members)
    network = made(fold)(members, data)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)  # what was returned shares nothing with them
    assert unchanged()


@every_fold
def test_the_same_seed_gives_the_same_result(fold, members, data):
    torch.manual_seed(1)
    first = made(fold)(members, data)
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    assert states_equal(first, made(fold)(members, data))
    assert torch.equal(state, torch.random.get_rng_state())
    if trains(fold):
        last, other = (made(fold, seed=seed, select="last")(members, data) for seed in (0, 1))
        assert not states_equal(last, other)


@both
@every_fold_to_one_network
def test_equal_members_fold_to_themselves(fold, members, data):
    """Without training nothing may change but batch-norm statistics, which are measured again."""
    equal = DeepEnsemble([members.member(1)] * 4)
    network = made(fold, epochs=0, settings={"start": "member"})(equal, data)
    learned = dict(network.named_parameters())
    for name, parameter in members.member(1).named_parameters():
        torch.testing.assert_close(learned[name], parameter, rtol=1e-6, atol=1e-7)


@every_fold
def test_different_architectures_are_refused_by_name(fold, networks, data):
    with pytest.raises(EnfoldError, match=r"needs members of one architecture, got MixedEnsemble: put networks into"):
        made(fold)(MixedEnsemble([networks["plain"](), networks["normed"]()]), data)


@every_fold
def test_a_checkpoint_is_taken_and_the_result_is_the_same(fold, members, data, tmp_path):
    file = tmp_path / "fold.safetensors"
    expected = made(fold)(members, data, checkpoint=file)
    assert file.exists() or not trains(fold)
    assert states_equal(expected, made(fold)(members, data, checkpoint=file))
    if trains(fold):
        assert states_equal(expected, made(fold)(members, data))


@both
@every_fold
def test_one_member_is_enough(fold, members, data):
    network = made(fold)(members[:1], data)
    assert torch.isfinite(network(data.test.inputs)).all()
