"""permAVG on convolutions, residual streams and attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.data import Data, Split
from enfold.fold.perm_avg import PermAVG
from enfold.members import Stacked
from enfold.networks import ResNet, ViT
from enfold.train import Plan

SHORT = Plan(epochs=2, batch_size=16, optimizer="adam", learning_rate=0.1, weight_decay=0.0, select="last")


def image_data(shape: tuple[int, ...]) -> Data:
    generator = torch.Generator().manual_seed(0)
    part = Split(torch.randn(24, *shape, generator=generator), torch.arange(24) % 3)
    return Data(part, part, part, 3, shape)


@pytest.mark.parametrize("settings", [{}, {"matched": 12.0}], ids=str)
def test_a_convolution_network_with_batch_norm(settings):
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 5, 3),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 3),
        )

    members, data = Stacked.make(make, 2), image_data((3, 8, 8))
    fold = PermAVG(plan=SHORT, **settings)
    network = fold(members, data)
    assert [each.shape[-1] for each in fold.learned(members, data).all_matrices()] == [5, 4]
    assert torch.isfinite(network(data.test.inputs)).all()
    assert isinstance(network[1], nn.BatchNorm2d)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ResNet(num_classes=3, depth=8, width=3),
        lambda: ViT((3, 8, 8), 3, patch=4, width=8, depth=1, heads=2),
    ],
    ids=["residual", "attention"],
)
def test_residual_and_attention_networks(make):
    members, data = Stacked.make(make, 2), image_data((3, 8, 8))
    plan = SHORT.replace(epochs=1)
    matched = PermAVG(matched=30.0, plan=plan.replace(epochs=0), reestimate_batch_norm=False)
    same = matched(Stacked([members.member(0), members.member(0)]), data)
    assert torch.equal(same(data.test.inputs), members.member(0).eval()(data.test.inputs))
    fold = PermAVG(matched=12.0, plan=plan)
    assert len(fold.learned(members, data).all_matrices()) >= 3
    assert torch.isfinite(fold(members, data)(data.test.inputs)).all()
