"""One optimizer for M members: decay groups, clipping by member, and settings by member."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.train import TrainConfig
from enfold.train.optimize import Optimizer, param_groups

PLAIN = torch.amp.GradScaler("cpu", enabled=False)
SGD = TrainConfig(optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.0, schedule="constant")


class Scaled(nn.Module):
    """A parameter without axes beside a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(inputs)


def with_gradients(model: nn.Module, value: float = 1.0) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def sizes(groups: list[dict]) -> list[tuple[int, float]]:
    return [(sum(p.numel() for p in group["params"]), group["weight_decay"]) for group in groups]


@pytest.mark.parametrize("stacked", [False, True])
def test_decayed_parameters(stacked):
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))  # 12 + 8 weights, 6 + 8 others
    model = DeepEnsemble([network] * 3) if stacked else network
    times = 3 if stacked else 1
    assert sizes(param_groups(model, TrainConfig(weight_decay=0.5, decay="all"))) == [(34 * times, 0.5)]
    assert sizes(param_groups(model, TrainConfig(weight_decay=0.5, decay="weights"))) == [
        (20 * times, 0.5),
        (14 * times, 0.0),
    ]


@pytest.mark.parametrize(("decay", "left"), [("all", 0.9), ("weights", 1.0)])
@pytest.mark.parametrize("decays", [0.1, (0.0, 0.1)], ids=["one decay", "one each"])
def test_decay_shrinks_weights(decay, left, decays):
    """AdamW with zero gradients: θ ← θ - lr λ θ, for biases only if all is decayed."""
    members = with_gradients(DeepEnsemble([nn.Linear(3, 2), nn.Linear(3, 2)]), 0.0)
    before = {name: tensor.clone() for name, tensor in members.expand().items()}
    Optimizer(members, TrainConfig(lr=1.0, weight_decay=decays, decay=decay)).step(1.0, PLAIN)
    torch.testing.assert_close(members.expand()["weight"][1], before["weight"][1] * 0.9)
    torch.testing.assert_close(members.expand()["bias"][1], before["bias"][1] * left)
    first = 1.0 if isinstance(decays, tuple) else 0.9
    torch.testing.assert_close(members.expand()["weight"][0], before["weight"][0] * first)


def test_clipping_is_per_member():
    members = with_gradients(DeepEnsemble([nn.Linear(3, 2), nn.Linear(3, 2)]), 1.0)  # 8 ones: norm sqrt 8
    for parameter in members.parameters():
        parameter.grad[1] *= 0.01
    before = {name: tensor.clone() for name, tensor in members.expand().items()}
    Optimizer(members, SGD.replace(lr=1.0, clip_norm=1.0)).step(1.0, PLAIN)
    moved = before["weight"] - members.expand()["weight"]
    torch.testing.assert_close(moved[0], torch.full((2, 3), 8**-0.5), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moved[1], torch.full((2, 3), 0.01), rtol=1e-5, atol=1e-5)  # short enough already


def test_clipping_equals_torch_for_one_network():
    network, members = Scaled(), DeepEnsemble([Scaled()])
    reference = with_gradients(Scaled(), 3.0)
    for model in (network, members):
        with_gradients(model, 3.0)
        Optimizer(model, SGD.replace(clip_norm=0.5)).clip(0.5)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    for own, stacked, expected in zip(network.parameters(), members.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)
        torch.testing.assert_close(stacked.grad[0], expected.grad)


def test_gradients_are_cleared_and_the_rate_is_multiplied():
    network = with_gradients(nn.Linear(3, 2))
    before = network.weight.detach().clone()
    Optimizer(network, SGD).step(0.5, PLAIN)
    torch.testing.assert_close(network.weight, before - 0.05)
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("rates", [0.1, (0.1, 0.1)], ids=["one rate", "one each"])
def test_a_declared_scale_multiplies_the_learning_rate(rates):
    class Slow(DeepEnsemble):
        def param_groups(self, weight_decay, decay="all"):
            return [{**group, "lr_scale": 0.5} for group in super().param_groups(weight_decay, decay)]

    members = with_gradients(Slow([nn.Linear(3, 2), nn.Linear(3, 2)]))
    before = members.expand()["weight"].detach().clone()
    Optimizer(members, SGD.replace(lr=rates)).step(1.0, PLAIN)
    torch.testing.assert_close(members.expand()["weight"], before - 0.05)


def test_frozen_parameters_do_not_change():
    network = nn.Linear(3, 2)
    network.weight.requires_grad_(False)
    members = DeepEnsemble([network, network])
    members.tree.bias.grad = torch.ones(2, 2)
    Optimizer(members, SGD.replace(lr=(0.1, 0.2), weight_decay=0.5)).step(1.0, PLAIN)
    assert torch.equal(members.expand()["weight"][0], network.weight)
    assert not torch.equal(members.expand()["bias"][0], network.bias)


def test_optimizer_state_survives_a_round_trip():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    plan = TrainConfig(lr=0.1)
    one, other = Optimizer(with_gradients(first), plan), Optimizer(second, plan)
    one.step(1.0, PLAIN)
    second.load_state_dict(first.state_dict())
    other.load(one.state())
    for model, optimizer in ((first, one), (second, other)):
        with_gradients(model, 0.3)
        optimizer.step(1.0, PLAIN)
    assert torch.equal(first.weight, second.weight)


def test_nothing_to_train():
    network = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(EnfoldError, match="trainable parameters"):
        Optimizer(network, SGD)


def test_settings_per_member_need_parameters_per_member():
    with pytest.raises(EnfoldError, match="lr and weight_decay"):
        Optimizer(MixedEnsemble([nn.Linear(3, 2), nn.Linear(3, 2)]), SGD.replace(lr=(0.1, 0.2)))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_parameters_in_float16_stay_finite_where_gradients_vanish(optimizer):
    network = nn.Linear(2, 1, bias=False).half()
    steps = Optimizer(network, TrainConfig(optimizer=optimizer, lr=0.01))
    network.weight.grad = torch.tensor([[0.0, 1e-5]]).half()  # of which the square is 0
    steps.step(1.0, torch.amp.GradScaler(enabled=False))
    assert bool(network.weight.isfinite().all())
