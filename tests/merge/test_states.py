"""Partially traced networks are merged with a warning; untraceable ones are refused."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from enfold import DeepEnsemble, EnfoldError, TrainConfig, fit
from enfold.data import Data, Split
from enfold.merge import activation_matching, c2m3, cca_merge, ot_fusion, perm_avg, weight_matching, zipit
from enfold.merge.common.inputs import BufferMismatchWarning
from enfold.merge.common.states import UnalignedWarning

PLAN = TrainConfig(epochs=1, optimizer="adam", lr=0.1, batch_size=4)


class Deciding(nn.Module):
    """What follows the first part depends on its values."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.head = first, nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.head(hidden if float(hidden.sum()) > 0 else -hidden)


@pytest.fixture
def data() -> Data:
    rows = Split(torch.randn(8, 4), torch.arange(8) % 3)
    return Data(rows, rows, rows, 3, (4,))


def test_units_of_traced_modules_are_matched_with_a_warning(data: Data) -> None:
    network = Deciding(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6)))
    turned = Deciding(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6)))
    order = torch.tensor([3, 0, 4, 1, 2])
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for name, axis in (("first.0.weight", 0), ("first.0.bias", 0), ("first.2.weight", 1)):
        state[name] = state[name].index_select(axis, order)
    turned.load_state_dict(state)
    with pytest.warns(UnalignedWarning, match="some units are averaged .* decides by a value") as told:
        merged = weight_matching(DeepEnsemble([network, turned]), data, repair="none")
    assert told[0].filename == __file__, "the warning points at the user's line"
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], tensor)


def test_untraceable_networks_are_refused(data: Data) -> None:
    members = DeepEnsemble(lambda: Deciding(nn.Linear(4, 6)), 2)
    with pytest.raises(EnfoldError, match="decides by a value"):
        weight_matching(members, data)


class Summing(nn.Module):
    """Units that are summed up one after the other have an order."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cumsum(inputs, -1)


@pytest.mark.parametrize("fold", [partial(weight_matching, repair="none"), partial(perm_avg, config=PLAN)])
def test_units_fixed_by_an_operation_give_a_warning(data: Data, fold: partial) -> None:
    members = DeepEnsemble(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), Summing(), nn.Linear(6, 3)), 2
    )
    with pytest.warns(
        UnalignedWarning, match=r"the units of '2.weight' are fixed \(of aten.cumsum in '3'\): print symm"
    ):
        fold(members, data)


class Blocks(nn.Module):
    """Two blocks of units that are added: the order common to both is found, and no other."""

    def forward(self, inputs: Tensor) -> Tensor:
        both = inputs.unflatten(-1, (2, 3))
        return (both + both.flip(-2)).flatten(-2)


class OneByOne(nn.Module):
    """Experts in one tensor that are run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 4, 5)), nn.Parameter(torch.randn(2, 5, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([torch.relu(inputs @ self.up[k]) @ self.down[k] for k in range(2)]).sum(0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 6), Blocks(), nn.ReLU(), nn.Linear(6, 3)), "0.weight"),
        (OneByOne, "up"),
    ],
)
def test_units_with_one_order_in_all_blocks_give_a_warning(data: Data, make, named: str) -> None:
    members = DeepEnsemble(make, 2)
    with pytest.warns(
        UnalignedWarning, match=rf"the units of '{named}' are fixed \(all its blocks have one order of units"
    ):
        weight_matching(members, data, repair="none")


def test_networks_with_fixed_units_only_are_refused(data: Data) -> None:
    members = DeepEnsemble(lambda: nn.Sequential(nn.Linear(4, 6), Summing(), nn.Linear(6, 3)), 2)
    with pytest.raises(EnfoldError, match=r"'0.weight' are fixed \(of aten.cumsum in '1'\): use enfold.merge.average"):
        weight_matching(members, data)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3))


def pruned() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    prune.l1_unstructured(network[0], "weight", amount=0.3)
    return network


@pytest.mark.parametrize("make", [spectral, pruned])
def test_computed_weights_are_averaged_by_perm_avg_with_a_warning(data: Data, make) -> None:
    with (
        pytest.warns(BufferMismatchWarning, match=r"'0\S+' differs: if weights are computed") as told,
        pytest.warns(UnalignedWarning, match="are fixed"),
    ):
        perm_avg(DeepEnsemble(make, 2), data, config=PLAN)
    assert told[0].filename == __file__, "the warning points at the user's line"


def test_a_single_layer_has_no_hidden_units(data: Data) -> None:
    members = DeepEnsemble(lambda: nn.Linear(4, 3), 2)
    torch.testing.assert_close(weight_matching(members, data).weight, members.expand()["weight"].mean(0))


@pytest.mark.parametrize(
    ("index", "says"),
    [(2, "reference"), (1.5, "reference")],
)
def test_an_invalid_reference_is_refused(data: Data, index: float, says: str) -> None:
    with pytest.raises(EnfoldError, match=says):
        weight_matching(DeepEnsemble(two_layers, 2), data, reference=index)  # type: ignore[arg-type]


def test_members_with_different_statistics_are_measured_again(data: Data) -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    other = copy.deepcopy(network)
    other[1].running_mean += 1.0
    found = perm_avg(DeepEnsemble([network, other]), data, config=PLAN)
    torch.testing.assert_close(found[1].running_mean, network[0](data.train.inputs).mean(0), rtol=1e-4, atol=1e-5)
    assert torch.equal(perm_avg(DeepEnsemble([other, other]), data, config=PLAN)[1].running_mean, other[1].running_mean)


def test_gradients_are_switched_on_and_inference_mode_is_refused(data: Data) -> None:
    members = DeepEnsemble(two_layers, 2)
    expected = perm_avg(members, data, config=PLAN)[0].weight
    with torch.no_grad():
        torch.testing.assert_close(perm_avg(members, data, config=PLAN)[0].weight, expected, rtol=0, atol=0)
    with torch.inference_mode():
        for fold in (partial(perm_avg, config=PLAN), partial(weight_matching)):
            with pytest.raises(EnfoldError, match=r"needs gradients, got a call inside torch.inference_mode\(\)"):
                fold(members, data)
        with pytest.raises(EnfoldError, match="training needs gradients"):
            fit(nn.Linear(4, 3), data, config=TrainConfig(epochs=1))


class Telling(nn.Module):
    """A network that gives its features beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.inner(inputs))
        return {"logits": self.head(hidden), "features": hidden}


MATCHING = [
    partial(weight_matching),
    partial(activation_matching),
    partial(zipit),
    partial(cca_merge),
    partial(ot_fusion),
    partial(c2m3),
    partial(perm_avg, config=PLAN.replace(epochs=0), matched=40.0),
]


@pytest.mark.parametrize("fold", MATCHING, ids=lambda fold: fold.func.__name__)
def test_other_outputs_than_logits_do_not_affect_matching(data: Data, fold: partial) -> None:
    network, turned = Telling(), Telling()
    order = torch.tensor([3, 0, 4, 1, 2, 5])
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for name, axis in (("inner.weight", 0), ("inner.bias", 0), ("head.weight", 1)):
        state[name] = state[name].index_select(axis, order)
    turned.load_state_dict(state)
    merged = fold(DeepEnsemble([network, turned]), data)
    found, expected = (one(data.test.inputs)["logits"] for one in (merged, network))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class Own(nn.Module):
    """Weights of the user's own, in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(3, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(inputs @ self.first.t()).cumsum(1) @ self.second.t()


def test_units_of_raw_parameters_give_a_warning(data: Data) -> None:
    with pytest.raises(EnfoldError, match=r"the units of 'first' are fixed \(of aten.cumsum"):
        weight_matching(DeepEnsemble(Own, 2), data)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (Split(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)), "got none"),
        ([], "got none"),
        (iter(()), "train"),
        ([{"inputs": torch.zeros(2, 4)}], "target"),
    ],
    ids=["split", "list", "iterator", "dictionaries"],
)
def test_an_empty_training_split(data: Data, train: object, says: str) -> None:
    with pytest.raises(EnfoldError, match=says):
        weight_matching(DeepEnsemble(two_layers, 2), data.replace(train=train))
