"""What every merge guarantees: the user's class, untouched inputs, one seed one result, any kind of data."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from enfold import merge
from enfold.arguments import arguments_of
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.registry import methods
from enfold.train import TrainConfig
from fine_tuned import moved

MERGES = {name: each.target for name, each in methods("merge").items() if "network" not in each.inputs}  # of members
PARAMETERS = {name: inspect.signature(each).parameters for name, each in MERGES.items()}
DATA = {name: next((key for key in known if key in ("train", "val")), None) for name, known in PARAMETERS.items()}
CONFIG = TrainConfig(epochs=2, batch_size=16, lr=0.01, select="last")
BRIEF = {  # of merges that train
    name: {"config": CONFIG} if "config" in known else {"epochs": 2}
    for name, known in PARAMETERS.items()
    if {"config", "epochs"} & known.keys()
}
IDENTITY = {  # options with which equal members give themselves, and the order of examples does not matter
    "wise_ft": {"alpha": 1.0},
    "ties": {"density": 1.0},
    "dare": {"drop": 0.0},
    "fisher": {"samples": None},
}

both = pytest.mark.parametrize("members", ["plain", "normed"], indirect=True)
every_merge = pytest.mark.parametrize("name", MERGES)
with_data = pytest.mark.parametrize("name", [name for name, key in DATA.items() if key is not None])
pytestmark = pytest.mark.filterwarnings("ignore::enfold.merge.soup.SingleModelWarning")


def merged(name: str, members: object, data: object, **options: object) -> nn.Module:
    """The result of a merge that is given these examples and a base if it takes any, with short training."""
    given = {} if DATA[name] is None else {DATA[name]: data}
    if "base" in PARAMETERS[name]:
        given["base"] = moved(first_network(members))
    return MERGES[name](members, **{**given, **BRIEF.get(name, {}), **IDENTITY.get(name, {}), **options})


def first_network(members: object) -> nn.Module | None:
    """The first network of a list or of an ensemble."""
    if isinstance(members, list | DeepEnsemble) and members and isinstance(members[0], nn.Module):
        return members[0]
    return None


def states_equal(first: nn.Module, second: nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_known_merges_are_here():
    assert MERGES.keys() >= {"average", "perm_avg", "soup", "weight_matching"}
    assert set(BRIEF) >= {"perm_avg", "straight_through"}


@pytest.mark.parametrize("name", merge.__all__)
def test_every_option_is_documented(name):
    function = getattr(merge, name)
    assert inspect.getmodule(inspect.unwrap(function)).__doc__.splitlines()[0].endswith(".")
    assert all(argument.help for argument in arguments_of(function).values())
    assert "Args:" in function.__doc__
    parameters = inspect.signature(function).parameters.values()
    required = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if name != "align":
        with pytest.raises((TypeError, EnfoldError), match="nonsense"):
            function(**dict.fromkeys(required), nonsense=1)


@pytest.mark.combinations
@both
@every_merge
def test_the_result_has_the_class_and_keys_of_the_members(name, members, data):
    network, original = merged(name, members, data), members.member(0)
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


@pytest.mark.combinations
@both
@every_merge
def test_members_are_not_modified(name, members, data, snapshot):
    unchanged = snapshot(members)
    network = merged(name, members, data)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)  # the result shares no memory with them
    assert unchanged()


@every_merge
def test_a_list_of_networks_is_merged_like_an_ensemble(name, members, data, snapshot):
    networks = members.networks()
    unchanged = [snapshot(network) for network in networks]
    assert states_equal(merged(name, networks, data), merged(name, members, data))
    assert all(check() for check in unchanged)


@every_merge
def test_the_same_seed_gives_the_same_result(name, members, data):
    torch.manual_seed(1)
    first = merged(name, members, data)
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    assert states_equal(first, merged(name, members, data))
    assert torch.equal(state, torch.random.get_rng_state())


def test_another_seed_learns_other_permutations(members, data):
    first, second = (merged("perm_avg", members, data, config=CONFIG.replace(seed=seed)) for seed in (0, 1))
    assert not states_equal(first, second)


@pytest.mark.combinations
@both
@every_merge
def test_equal_members_merge_to_themselves(name, members, data):
    """Without training nothing changes but batch-norm statistics, which are measured again."""
    untrained = {"config": CONFIG.replace(epochs=0)} if "config" in PARAMETERS[name] else {}
    network = merged(name, [members.member(1)] * 4, data, **untrained)
    learned = dict(network.named_parameters())
    for key, parameter in members.member(1).named_parameters():
        torch.testing.assert_close(learned[key], parameter, rtol=1e-6, atol=1e-7)


@every_merge
def test_different_architectures_are_refused_by_name(name, networks, data):
    pair = [networks["plain"](), networks["normed"]()]
    with pytest.raises(EnfoldError, match="MixedEnsemble"):
        merged(name, MixedEnsemble(pair), data)
    with pytest.raises(EnfoldError, match="architecture"):
        merged(name, pair, data)


@every_merge
@pytest.mark.parametrize("models", [None, [], "networks", 3, [1, 2], nn.Linear(4, 3)], ids=str)
def test_other_types_are_refused(name, models, data):
    with pytest.raises(EnfoldError, match="models"):
        merged(name, models, data)


@pytest.mark.parametrize("name", [name for name in BRIEF if "checkpoint" in PARAMETERS[name]])
def test_training_continues_from_a_checkpoint(name, members, data, tmp_path):
    file = tmp_path / "merge.safetensors"
    expected = merged(name, members, data, checkpoint=str(file))
    assert file.exists()
    assert states_equal(expected, merged(name, members, data, checkpoint=file))
    assert states_equal(expected, merged(name, members, data))


@pytest.mark.combinations
@both
@every_merge
def test_one_member_is_enough(name, members, data):
    network = merged(name, members[:1], data)
    assert states_equal(network, members.member(0))


def kinds(data):
    """The training and validation examples in all accepted forms."""
    yield lambda split: (split.inputs, split.labels)
    yield lambda split: (split.inputs.numpy(), split.labels.numpy())
    yield lambda split: TensorDataset(split.inputs, split.labels)
    yield lambda split: DataLoader(TensorDataset(split.inputs, split.labels), 40)
    yield lambda split: [(split.inputs, split.labels)]


@pytest.mark.parametrize("members", [pytest.param("plain", marks=pytest.mark.slow), "normed"], indirect=True)
@with_data
def test_any_kind_of_examples(name, members, data):
    expected = merged(name, members, data) if name not in BRIEF else None
    for convert in kinds(data):
        train, val = convert(data.train), convert(data.val)
        network = merged(name, members, val, train=train) if DATA[name] == "val" else merged(name, members, train)
        assert torch.isfinite(network(data.test.inputs)).all()
        for key, tensor in expected.state_dict().items() if expected is not None else ():
            torch.testing.assert_close(network.state_dict()[key], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["activation_matching", "zipit", "cca_merge", "ot_fusion", "straight_through", "perm_avg", "fisher", "regmean"],
)
def test_training_examples_are_needed_by_name(name, members):
    with pytest.raises(EnfoldError, match="train"):
        merged(name, members, None)


@pytest.mark.combinations
@with_data
@pytest.mark.parametrize("train", [3, "mnist", np.zeros((4, 4)), (1, 2, 3)], ids=str)
def test_invalid_data_are_refused(name, members, train):
    with pytest.raises(EnfoldError, match=DATA[name]):
        merged(name, members, train)


@pytest.mark.parametrize("members", ["plain"], indirect=True)
@pytest.mark.parametrize("name", ["average", "weight_matching", "merge_many", "c2m3"])
def test_networks_without_batch_norm_need_no_data(name, members, data):
    given = {} if name == "average" else {"example": data.train.inputs[:2]}
    assert states_equal(MERGES[name](members, **given), MERGES[name](members, data))


@pytest.mark.parametrize("members", ["plain"], indirect=True)
def test_a_uniform_soup_without_batch_norm_needs_no_data(members, data):
    assert states_equal(merge.soup(members, kind="uniform"), merge.average(members))


@pytest.mark.parametrize("name", ["average", "weight_matching", "merge_many", "c2m3"])
def test_batch_norm_needs_training_examples_unless_it_is_averaged(name, members, data):
    given = {} if name == "average" else {"example": data.train.inputs[:2]}
    with pytest.raises(EnfoldError, match="train"):
        MERGES[name](members, **given)
    expected = MERGES[name](members, data, repair="none")
    assert states_equal(MERGES[name](members, repair="none", **given), expected)


@pytest.mark.parametrize("members", ["plain"], indirect=True)
@pytest.mark.parametrize("repair", ["repair", "rescale", "closed_form"])
def test_a_repair_needs_training_examples(members, data, repair):
    with pytest.raises(EnfoldError, match="train"):
        merge.weight_matching(members, example=data.train.inputs[:2], repair=repair)


@pytest.mark.parametrize("name", ["weight_matching", "merge_many", "c2m3", "align"])
def test_inputs_are_needed_to_find_symmetries(name, members):
    options = {} if name == "align" else {"repair": "none"}
    with pytest.raises(EnfoldError, match="example"):
        getattr(merge, name)(members, **options)
    with pytest.raises(EnfoldError, match="example"):
        getattr(merge, name)(members, example=3, **options)


def test_align_has_the_options_of_its_method(members, data):
    assert isinstance(merge.align(members, data), DeepEnsemble)
    with pytest.raises(EnfoldError, match="rounds"):
        merge.align(members, data, rounds=0)
    with pytest.raises(EnfoldError, match="iterations"):
        merge.align(members, data, iterations=3)
    with pytest.raises(EnfoldError, match="repair"):
        merge.align(members, data, repair="none")
    with pytest.raises(EnfoldError, match="method"):
        merge.align(members, data, method="zipit")
