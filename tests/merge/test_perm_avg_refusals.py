"""permAVG: options, members and matrices that are refused or lead to a warning."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.errors import EnfoldError
from enfold.merge import perm_avg, straight_through
from enfold.merge.common.soft_permutations import warn_if_singular
from enfold.merge.common.states import UnalignedWarning
from enfold.networks import MLP
from enfold.symmetry import permute, symmetries
from soft_averages import SHORT, learned


@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": 0.0}, {"final_temperature": -1.0}, {"matched": 0.0}, {"ridge": -0.1}, {"iterations": 0}),
        *({"alpha": 2.0}, {"order": "random"}, {"mixing": "some"}, {"gradient": "none"}, {"temperature": "1"}),
        *({"start": "zero"}, {"inverse": "left"}, {"start": "random", "matched": 4.0}),
    ],
    ids=str,
)
def test_invalid_options_are_refused_before_anything_is_computed(settings):
    with pytest.raises(EnfoldError, match=next(iter(settings))):
        perm_avg(None, None, **settings)


def test_settings_of_the_training_are_given_by_name(members, data):
    expected = perm_avg(members[:2], data, config=SHORT).state_dict()
    settings = {"epochs": 2, "batch_size": 16, "select": "last"}
    found = perm_avg(members[:2], data, **settings).state_dict()
    assert found.keys() == expected.keys()
    with pytest.raises(EnfoldError, match="epoch"):
        perm_avg(members[:2], data, epoch=2)


def test_members_of_different_shapes_are_refused(data):
    with pytest.raises(EnfoldError, match="architecture"):
        perm_avg(DeepEnsemble([MLP(4, [6], 3), MLP(4, [7], 3)]), data)


def test_a_singular_matrix_gives_a_remedy(members, data):
    with pytest.raises(
        EnfoldError, match=r"must be invertible.*lower the temperature or the learning rate, start from a matching"
    ):
        perm_avg(members[:2], data, temperature=1e9, config=SHORT)


def test_ill_conditioned_matrices_give_a_warning(members, data):
    model = learned(partial(perm_avg, config=SHORT), members[:2], data)
    with torch.no_grad():
        for scores in model.scores:
            scores.mul_(1e-6)
    with pytest.warns(UserWarning, match=r"condition number of .*lower the temperature"):
        warn_if_singular(model)


class Deciding(nn.Module):
    """A network whose graph depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.inner(inputs))
        return self.head(hidden if float(hidden.sum()) > 0 else -hidden)


def test_an_untraceable_network_is_averaged_with_a_warning(data):
    members = DeepEnsemble(Deciding, 2)
    with pytest.warns(UnalignedWarning, match="no unit is aligned, .*because the graph"):
        network = perm_avg(members, data, config=SHORT)
    for name, mean in members.mean_state().items():
        torch.testing.assert_close(network.state_dict()[name], mean)


class Tied(nn.Module):
    """A weight that makes units and takes them, and units of its own before the classes."""

    def __init__(self, free: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.free = nn.Sequential(nn.Linear(4, free), nn.ReLU()) if free else nn.Identity()
        self.head = nn.Linear(free or 4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.inner(inputs))
        logits: Tensor = self.head(self.free(F.linear(hidden, self.inner.weight.t())))
        return logits


@pytest.mark.parametrize("free", [0, 5])
def test_units_of_tied_weights_are_permuted_only_if_matched(data, free):
    first, second, inputs = Tied(free), Tied(free), data.test.inputs
    symmetry = symmetries(first, inputs[:2])
    orders = {group.name: torch.randperm(group.size) for group in symmetry.groups}
    second.load_state_dict(permute(first.state_dict(), symmetry, orders))
    members = DeepEnsemble([first, second])
    with pytest.warns(UnalignedWarning, match="because tied weights"):
        perm_avg(members, data, config=SHORT)
    network = perm_avg(members, data, config=SHORT.replace(epochs=0), matched=40.0)
    torch.testing.assert_close(network(inputs), first(inputs), rtol=1e-4, atol=1e-5)


def test_half_precision_is_refused_with_a_remedy(data):
    with pytest.raises(EnfoldError, match="float32 or float64"):
        perm_avg(DeepEnsemble([MLP(4, [6], 3).bfloat16() for _ in range(2)]), data, config=SHORT)


@pytest.mark.parametrize(
    "fold", [partial(perm_avg, config=SHORT), partial(straight_through, epochs=2, batch_size=8)], ids=["soft", "hard"]
)
def test_a_checkpoint_of_other_members_is_refused(members, data, tmp_path, fold):
    fold(members[:2], data, checkpoint=tmp_path / "c.safetensors")
    with pytest.raises(EnfoldError, match="checkpoint must belong"):
        fold(members[[0, 2]], data, checkpoint=tmp_path / "c.safetensors")


def test_matrices_are_balanced_in_full_precision_also_where_training_is_not(members, data):
    model = learned(partial(perm_avg, config=SHORT), members[:2], data).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (matrix,) = model.matrices()
        average = model.average([matrix])
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix.sum(-1)))
    for name, expected in model.average(model.matrices()).items():
        torch.testing.assert_close(average[name], expected)
