"""BottleneckResNet: the published sizes, the stride of a block, and both stems."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enfold.errors import EnfoldError
from enfold.networks import BottleneckResNet, make
from enfold.networks.bottleneck_resnet import Bottleneck


@pytest.mark.parametrize(("blocks", "count"), [((3, 4, 6, 3), 25_557_032), ((3, 4, 23, 3), 44_549_160)])
def test_published_numbers_of_parameters(blocks, count):
    with torch.device("meta"):
        network = BottleneckResNet(blocks=blocks)
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    layers = [each for each in network.modules() if isinstance(each, nn.Conv2d) and each.kernel_size != (1, 1)]
    assert len(layers) == 1 + sum(blocks)


def test_the_catalogue_has_resnet_50():
    with torch.device("meta"):
        network = make("resnet50", (3, 224, 224), 200)
        assert type(network) is BottleneckResNet
        assert network.eval()(torch.empty(2, 3, 224, 224)).shape == (2, 200)


def test_groups_halve_the_image_and_double_the_channels():
    network = BottleneckResNet(num_classes=5, width=4).eval()
    x = network.pool(torch.relu(network.norm(network.conv(torch.zeros(1, 3, 64, 64)))))
    assert x.shape == (1, 4, 16, 16)
    for group, shape in zip(network.groups, [(16, 16), (32, 8), (64, 4), (128, 2)], strict=True):
        x = group(x)
        assert x.shape == (1, shape[0], shape[1], shape[1])
    small = BottleneckResNet(num_classes=5, width=4, stem="small")
    assert small.pool(small.conv(torch.zeros(1, 3, 32, 32))).shape == (1, 4, 32, 32)


def test_the_shortcut_is_a_strided_projection():
    torch.manual_seed(0)
    block = Bottleneck(6, 2, 2).eval()
    x = torch.randn(2, 6, 8, 8)
    projection = block.shortcut[1]
    strided = nn.functional.conv2d(x, projection.weight, stride=2)
    torch.testing.assert_close(block.shortcut(x), block.shortcut[2](strided))
    assert isinstance(Bottleneck(8, 2, 1).shortcut, nn.Identity)


def test_invalid_arguments_are_refused():
    for settings in ({"stem": "large"}, {"blocks": ()}, {"width": 0}):
        with pytest.raises(EnfoldError, match=next(iter(settings))):
            BottleneckResNet(**settings)
