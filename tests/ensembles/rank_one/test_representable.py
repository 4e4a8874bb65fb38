"""Whether members are a BatchEnsemble: all kinds of layers, any reference, what else differs, and after matching."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.ensembles.rank_one import hadamard_rank_defect, representable
from enfold.errors import EnfoldError
from enfold.networks import MLP, MediumCNN, ViT

LAYERS = {
    "linear": lambda: nn.Linear(5, 4),
    "conv1d": lambda: nn.Conv1d(4, 6, 3),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "conv3d": lambda: nn.Conv3d(2, 4, 2),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
    "grouped transposed": lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
    "embedding": lambda: nn.Embedding(7, 5, padding_idx=0),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("init", ["gaussian", "signs"])
def test_every_kind_of_layer_of_a_batch_ensemble_is_representable(kind, init):
    torch.manual_seed(0)
    found = representable(BatchEnsemble(LAYERS[kind](), 3, init=init))
    assert found
    assert found.layers[0].defect < 1e-6
    assert found.layers[0].contradictions == 0


@pytest.mark.parametrize("kind", LAYERS)
def test_a_changed_weight_is_detected_in_every_kind_of_layer(kind):
    torch.manual_seed(0)
    networks = BatchEnsemble(LAYERS[kind](), 3).networks()
    assert representable(DeepEnsemble(networks))
    with torch.no_grad():
        networks[1].weight.view(-1)[-1] *= 1.02
    found = representable(DeepEnsemble(networks))
    assert not found
    assert 1 in found.layers[0].pair
    assert 1e-6 < found.layers[0].defect < 0.2


def test_groups_have_separate_inputs():
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, 4, 3, groups=2, bias=False) for _ in range(2)]
    r = torch.tensor([[1.0, -2.0], [1.0, -2.0], [0.5, 3.0], [0.5, 3.0]])  # of the inputs that each output sees
    with torch.no_grad():
        layers[1].weight.copy_(layers[0].weight * r.unsqueeze(-1))
    assert representable(DeepEnsemble(layers))
    assert hadamard_rank_defect(layers[1].weight, layers[0].weight) > 0.1  # as if all outputs saw the same inputs


def test_deep_ensembles_are_not_representable():
    torch.manual_seed(0)
    found = representable(DeepEnsemble(MediumCNN((3, 16, 16), 4, channels=(4, 8)), 3))
    assert not found
    assert not any(found.fits(layer) for layer in found.layers)
    assert min(layer.defect for layer in found.layers) > 0.1
    assert [layer.name for layer in found.layers] == ["convs.0", "convs.1", "head"]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.permutations(range(3)))
def test_the_reference_member_does_not_matter(seed, order):
    torch.manual_seed(seed)
    members = BatchEnsemble(MLP(6, [5], 3), 3, seed=seed)
    networks = members.networks()
    found = representable(members)
    assert found
    assert representable(DeepEnsemble([networks[index] for index in order])).layers[0].defect == pytest.approx(
        found.layers[0].defect
    )
    with torch.no_grad():
        networks[1].head.weight[0, 0] += 1
    weights = [network.head.weight for network in networks]
    for reference in weights:  # each one alone tells that not all quotients have rank one
        assert max(hadamard_rank_defect(weight, reference) for weight in weights) > 1e-6
    verdicts = [
        representable(DeepEnsemble([networks[index] for index in order])),
        representable(DeepEnsemble(networks)),
    ]
    assert [[one.fits(layer) for layer in one.layers] for one in verdicts] == [[True, False]] * 2


def test_one_member_is_a_batch_ensemble():
    found = representable(DeepEnsemble([MLP(4, [3], 2)]), match=True)
    assert found
    assert found.matched
    assert found.layers[0].pair is None


def test_tensors_that_a_batch_ensemble_has_in_common_are_named():
    torch.manual_seed(0)
    network = ViT((3, 8, 8), 4, width=8, depth=1, heads=2)
    networks = BatchEnsemble(network, 2).networks()
    assert representable(DeepEnsemble(networks))
    with torch.no_grad():
        networks[0].positions.add_(0.1)
    found = representable(DeepEnsemble(networks))
    assert not found
    assert found.others == ("positions",)
    assert "different between members: positions" in str(found)


def test_batch_norms_are_owned_or_shared():
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    networks = BatchEnsemble(network, 2).networks()
    assert not representable(DeepEnsemble(networks)).norms_differ
    networks[1][1].running_mean.add_(1)
    assert not representable(DeepEnsemble(networks)).norms_differ
    nn.init.constant_(networks[1][1].weight, 2)
    found = representable(DeepEnsemble(networks))
    assert found
    assert found.norms_differ
    assert 'batch_norm="own"' in str(found)


def test_zeros_are_counted():
    members = BatchEnsemble(nn.Linear(5, 4), 2)
    networks = members.networks()
    with torch.no_grad():
        for network in networks:
            network.weight[1, 2] = 0
    found = representable(DeepEnsemble(networks))
    assert found
    assert (found.layers[0].left_out, found.layers[0].contradictions) == (1, 0)
    with torch.no_grad():
        networks[0].weight[0, 0] = 1e-12
    found = representable(DeepEnsemble(networks))
    assert found.layers[0].defect == 1
    assert found.layers[0].contradictions == 1


def test_units_in_another_order_are_representable_after_matching():
    torch.manual_seed(0)
    networks = BatchEnsemble(MLP(12, [16, 10], 4), 3, spread=0.1).networks()
    with torch.no_grad():
        for network in networks[1:]:
            first, second = network.hidden
            for layer, after in ((first, second), (second, network.head)):
                order = torch.randperm(layer.out_features)
                layer.weight.copy_(layer.weight[order])
                layer.bias.copy_(layer.bias[order])
                after.weight.copy_(after.weight[:, order])
    found = representable(DeepEnsemble(networks), match=True)
    assert not found
    assert found.matched
    assert "matched" in str(found).splitlines()[0]
    assert str(found).splitlines()[-1].endswith("no, after matching hidden units: yes")


def test_the_table_is_readable():
    torch.manual_seed(0)
    lines = str(representable(BatchEnsemble(nn.Sequential(nn.Linear(5, 4), nn.Conv1d(4, 2, 3)), 2))).splitlines()
    columns = ["layer", "weight", "defect", "pair", "near zero", "only in one", "representable"]
    assert re.split(r" {2,}", lines[0]) == columns
    assert lines[2].split()[:2] == ["1", "2x4x3"]
    assert lines[2].endswith("yes")
    assert lines[-1] == "a BatchEnsemble of rank one within 1e-06: yes"
    assert "(the network)" in str(representable(BatchEnsemble(nn.Linear(2, 2), 2)))


def test_invalid_inputs_are_refused():
    members = DeepEnsemble([nn.Linear(3, 2), nn.Linear(3, 2)])
    with pytest.raises(EnfoldError, match=r"tolerance must be in \[0, 1\), got -1"):
        representable(members, -1)
    with pytest.raises(EnfoldError, match="got MixedEnsemble: use DeepEnsemble"):
        representable(MixedEnsemble([nn.Linear(3, 2)]))
    with pytest.raises(EnfoldError, match="got none"):
        representable(DeepEnsemble([nn.LayerNorm(3)]))
    with torch.no_grad():
        members.expand()["weight"][1, 0, 0] = torch.inf
    with pytest.raises(EnfoldError, match="'weight' of member 1 is not"):
        representable(members)
    with pytest.raises(EnfoldError, match="'weight' of member 1 is not"):
        representable(members, match=True)
