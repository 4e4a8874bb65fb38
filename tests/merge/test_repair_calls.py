"""REPAIR of layers that are called twice, not always or never, or whose outputs a norm undoes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.merge import align, average, repair, weight_matching
from enfold.merge.repair import hidden_layers, repair_layers
from enfold.symmetry import symmetries
from planted import Routed, drawn, pixels


class PreActivation(nn.Module):
    """A layer whose units go into a batch norm and past it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.block, self.head = (
            nn.Linear(4, 9),
            nn.BatchNorm1d(9),
            nn.Linear(9, 9),
            nn.Linear(9, 3),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, 4) -> (B, 3)."""
        hidden = self.stem(inputs)
        return self.head(torch.relu(hidden + self.block(torch.relu(self.norm(hidden)))))


def test_layers_before_a_batch_norm_are_skipped_without_other_users():
    members, data = DeepEnsemble([drawn(PreActivation, seed) for seed in range(3)]), pixels((4,))
    goals = torch.stack([one.stem(data.train.inputs).std(0) for one in align(members, data)]).mean(0)
    torch.testing.assert_close(
        weight_matching(members, data, repair="repair").stem(data.train.inputs).std(0), goals, rtol=1e-5, atol=1e-6
    )


class Repeated(nn.Module):
    """A layer that sees what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.returned: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, 4) -> (B, 3)."""
        one = self.again(torch.relu(self.first(inputs)))
        other = self.again(torch.relu(one))
        self.returned = [one.detach(), other.detach()]
        return self.head(torch.relu(other))


def test_a_layer_that_is_called_twice_has_the_goals_over_both_calls():
    members, data = DeepEnsemble([drawn(Repeated, seed) for seed in range(3)]), pixels((4,), 600)
    network = average(members, data)
    names = ["first", "again"]
    repair_layers(network, list(members), data, names)

    def both(one: nn.Module) -> tuple[Tensor, Tensor]:
        one.eval()(data.train.inputs)
        units = torch.cat(one.returned)
        return units.mean(0), units.std(0, correction=0)

    goals = [both(member) for member in members]
    for which, found in enumerate(both(network)):
        torch.testing.assert_close(found, torch.stack([goal[which] for goal in goals]).mean(0), rtol=1e-3, atol=1e-3)
    member = members.member(0)
    before = {name: tensor.clone() for name, tensor in member.state_dict().items()}
    repair_layers(member, [members.member(0)] * 2, data, names)
    torch.testing.assert_close(dict(member.state_dict()), before, rtol=1e-5, atol=1e-6)


class Skipping(Routed):
    """Experts without tokens are not called."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, tokens, features) -> (B, classes)."""
        tokens = self.embed(inputs)
        chosen, made = self.gate(tokens).argmax(-1), torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            if bool((chosen == index).any()):
                made[chosen == index] = expert(tokens[chosen == index])
        return self.head((tokens + made).mean(1))


@pytest.mark.filterwarnings("ignore::enfold.merge.common.states.UnalignedWarning")
@pytest.mark.parametrize("kind", ["repair", "rescale", "closed_form"])
@pytest.mark.parametrize("make", [Routed, Skipping])
def test_layers_without_calls_are_unchanged(make, kind):
    """No token of one member goes to its second expert."""
    networks, data = [drawn(make, seed) for seed in range(3)], pixels((4, 5), 600)
    with torch.no_grad():
        networks[1].gate.bias[1] = -100.0
    members = DeepEnsemble(networks)
    plain = weight_matching(members, data, repair="none")
    with torch.no_grad():
        plain.gate.bias.copy_(networks[0].gate.bias)  # the network itself calls both
    found = repair(plain, members, data, kind=kind)
    for name, tensor in plain.experts[1].state_dict().items():
        assert torch.equal(found.experts[1].state_dict()[name], tensor)
    assert torch.equal(found.experts[0][0].weight, plain.experts[0][0].weight) == (kind == "closed_form")


class NeverCalled(nn.Module):
    """Layers whose weights are used by others."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.attention = nn.Linear(5, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, tokens, 5) -> (B, 3)."""
        tokens = F.linear(inputs, self.hidden.weight, self.hidden.bias)
        return self.head(torch.relu(tokens + self.attention(tokens, tokens, tokens)[0]).mean(1))


@pytest.mark.parametrize("kind", ["repair", "rescale", "closed_form"])
def test_a_network_of_uncalled_layers_is_returned_unchanged(kind):
    members, data = DeepEnsemble([drawn(NeverCalled, seed) for seed in range(2)]), pixels((4, 5))
    plain = weight_matching(members, data, repair="none")
    assert hidden_layers(plain, symmetries(plain, data.train.inputs[:2]))
    found = repair(plain, members, data, kind=kind)
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
