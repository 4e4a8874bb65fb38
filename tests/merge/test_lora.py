"""LoRA adapters: products, never factors; every way in which networks hold them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from enfold.ensembles.lora_ensemble import LoRAEnsemble
from enfold.errors import EnfoldError
from enfold.merge import average, lora

INPUTS = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))


class Adapted(nn.Module):
    """A linear layer with an adapter, as in loralib."""

    def __init__(self, scaling: object = 2.0, rank: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 5), requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(rank, 5))
        self.lora_B = nn.Parameter(torch.randn(4, rank))
        self.scaling = scaling

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.weight + self.scaling * self.lora_B @ self.lora_A).T


class Wrapped(nn.Module):
    """A linear layer in a wrapper with named adapters, as in peft."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(5, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(5, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
        self.scaling = {"default": 0.5}

    def forward(self, inputs: Tensor) -> Tensor:
        low = self.lora_B["default"](self.lora_A["default"](inputs))
        return self.base_layer(inputs) + self.scaling["default"] * low


def family(make: type[nn.Module], count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    base = make()
    members = [make() for _ in range(count)]
    with torch.no_grad():
        for member in members:
            own = dict(member.named_parameters())
            for name, tensor in base.named_parameters():
                if "lora" not in name:
                    own[name].copy_(tensor)
    return members


@pytest.mark.parametrize("make", [Adapted, Wrapped])
def test_outputs_are_those_of_the_mean_product(make):
    """A linear layer's output is linear in B A, and not in A and B."""
    members = family(make)
    expected = torch.stack([member(INPUTS) for member in members]).mean(0)
    torch.testing.assert_close(lora(members)(INPUTS), expected)
    assert not torch.allclose(average(members)(INPUTS), expected, atol=1e-2)


@pytest.mark.parametrize("make", [Adapted, Wrapped])
def test_one_adapter_at_weight_1_gives_itself(make):
    members = family(make)
    torch.testing.assert_close(lora(members[:1])(INPUTS), members[0](INPUTS), rtol=0, atol=0)
    torch.testing.assert_close(lora(members, weights=(0.0, 1.0, 0.0))(INPUTS), members[1](INPUTS))
    torch.testing.assert_close(lora(members[:1], rank=2)(INPUTS), members[0](INPUTS), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lora([members[2]] * 3)(INPUTS), members[2](INPUTS))


def test_factors_that_differ_by_a_rotation_are_one_adapter():
    members = family(Adapted, 2)
    turn = torch.linalg.qr(torch.randn(2, 2)).Q
    with torch.no_grad():
        members[1].lora_A.copy_(turn @ members[0].lora_A)
        members[1].lora_B.copy_(members[0].lora_B @ turn.T)
    torch.testing.assert_close(lora(members)(INPUTS), members[0](INPUTS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_rank_is_that_of_the_nearest_matrix(rank):
    members = family(Adapted)
    change = (lora(members, rank=rank).weight - members[0].weight).detach()
    mean = sum(2.0 * each.lora_B @ each.lora_A for each in members).detach() / 3
    left, values, right = torch.linalg.svd(mean)
    torch.testing.assert_close(change, left[:, :rank] * values[:rank] @ right[:rank], rtol=1e-4, atol=1e-4)
    assert int(torch.linalg.matrix_rank(change, rtol=1e-4)) == rank


def test_a_factor_is_alpha_over_the_rank_where_layers_have_none():
    members = family(Adapted)
    for member in members:
        del member.scaling
    change = lora(members, alpha=4.0).weight - members[0].weight
    torch.testing.assert_close(change, sum(4.0 / 2 * each.lora_B @ each.lora_A for each in members) / 3)


def test_adapters_of_different_bases_are_refused_by_name():
    members = family(Adapted)
    with torch.no_grad():
        members[2].weight[0, 0] += 1
    with pytest.raises(EnfoldError, match="'weight' of member 2"):
        lora(members)


def test_other_adapters_are_refused_by_name():
    class Dora(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.lora_magnitude_vector = nn.Parameter(torch.ones(4))

    with pytest.raises(EnfoldError, match="lora_magnitude_vector"):
        lora(family(Dora))
    with pytest.raises(EnfoldError, match="base="):
        lora([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(EnfoldError, match="weights"):
        lora(family(Adapted), weights=(1.0,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


def adapted_block() -> LoRAEnsemble:
    ensemble = LoRAEnsemble(Block(), 3, rank=2, alpha=4.0)
    with torch.no_grad():
        for name, tensor in ensemble.low_rank.state().items():
            if name.endswith(".B"):
                tensor.normal_()
    return ensemble


def test_a_lora_ensemble():
    ensemble = adapted_block()
    members, name = [dict(member.named_parameters()) for member in ensemble], "attention.in_proj_weight"
    found = dict(lora(ensemble).named_parameters())
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, sum(own[key] for own in members) / 3, rtol=1e-4, atol=1e-5)
    base = ensemble.shared.state()[name]
    low = dict(lora(ensemble, rank=2).named_parameters())[name] - base
    for block, own in zip(low.chunk(3), (found[name] - base).chunk(3), strict=True):
        left, values, right = torch.linalg.svd(own.detach())
        torch.testing.assert_close(block, left[:, :2] * values[:2] @ right[:2], rtol=1e-3, atol=1e-4)


def test_adapters_that_were_merged_into_networks():
    ensemble = adapted_block()
    base = ensemble.network({name: tensor[0] for name, tensor in ensemble.expand().items()})
    with torch.no_grad():
        for name, tensor in ensemble.shared.state().items():
            dict(base.named_parameters())[name].copy_(tensor)
    merged, direct = lora(ensemble.networks(), base=base), lora(ensemble)
    torch.testing.assert_close(dict(merged.state_dict()), dict(direct.state_dict()), rtol=1e-4, atol=1e-5)
