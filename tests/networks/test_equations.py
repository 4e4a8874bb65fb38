"""Each network against its definition, written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from enfold.networks import MLP, MediumCNN, ResNet, SmallCNN, ViT, WideResNet


def test_mlp_by_hand() -> None:
    network = MLP(2, (2,), 1)
    with torch.no_grad():
        network.hidden[0].weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 0.0]]))
        network.hidden[0].bias.copy_(torch.tensor([0.0, -1.0]))
        network.head.weight.copy_(torch.tensor([[3.0, 4.0]]))
        network.head.bias.copy_(torch.tensor([0.5]))
    # (1, 2): relu(1 - 2) = 0 and relu(2 - 1) = 1, so 4 + 0.5; (3, 1): relu(2) and relu(5), so 6 + 20 + 0.5.
    torch.testing.assert_close(network(torch.tensor([[1.0, 2.0], [3.0, 1.0]])), torch.tensor([[4.5], [26.5]]))


def test_mlp_flattens_and_its_names_do_not_depend_on_dropout() -> None:
    network = MLP(12, (4,), 3)
    inputs = torch.randn(2, 3, 2, 2)
    torch.testing.assert_close(network(inputs), network(inputs.reshape(2, 12)))
    assert list(network.state_dict()) == list(MLP(12, (4,), 3, dropout=0.5).state_dict())


def test_mlp_drops_hidden_units_in_train_mode_only() -> None:
    network = MLP(4, (64,), 2, dropout=0.5)
    inputs = torch.randn(3, 4)
    assert not torch.equal(network(inputs), network(inputs))
    network.eval()
    assert torch.equal(network(inputs), network(inputs))


def test_medium_cnn_drops_pools_and_rectifies_in_the_authors_order() -> None:
    network = SmallCNN((3, 12, 12), 4, channels=(6, 5))
    inputs = torch.randn(2, 3, 12, 12)
    torch.manual_seed(3)
    x = F.conv2d(inputs, network.convs[0].weight, network.convs[0].bias, padding="same")
    x = F.relu(F.max_pool2d(F.dropout(x, 0.1), 2))
    x = F.conv2d(x, network.convs[1].weight, network.convs[1].bias, padding="same")
    x = F.max_pool2d(F.dropout(x, 0.1), 2)
    expected = F.linear(x.reshape(2, -1), network.head.weight, network.head.bias)
    torch.manual_seed(3)
    torch.testing.assert_close(network(inputs), expected)


def test_medium_cnn_starts_xavier_uniform_biases_included() -> None:
    torch.manual_seed(0)
    network = MediumCNN()
    for name, tensor in network.named_parameters():
        size = tensor.shape[0]
        if name.endswith("bias"):
            bound = math.sqrt(6 / (1 + size))
        else:
            kernel = tensor[0, 0].numel()
            bound = math.sqrt(6 / (kernel * (size + tensor.shape[1])))
        assert tensor.abs().max() <= bound, name
        if size > 50:
            assert tensor.abs().max() > 0.9 * bound, name


@settings(max_examples=20, deadline=None)
@given(height=st.integers(1, 40), width=st.integers(1, 40))
def test_cnn_accepts_images_of_any_size(height: int, width: int) -> None:
    logits = SmallCNN((1, height, width), 3, channels=(2, 2, 2))(torch.zeros(1, 1, height, width))
    assert logits.shape == (1, 3)


def test_resnet_pad_shortcut_subsamples_and_pads_channels() -> None:
    block = ResNet(width=2, depth=8, shortcut="pad").groups[1][0]
    inputs = torch.randn(1, 2, 6, 6)
    expected = torch.cat([inputs[:, :, ::2, ::2], torch.zeros(1, 2, 3, 3)], dim=1)
    torch.testing.assert_close(block.shortcut(inputs), expected)


def test_resnet_projection_is_a_strided_convolution() -> None:
    pool, convolution, _ = ResNet(width=3, depth=8).groups[2][0].shortcut
    for side in (6, 7):
        inputs = torch.randn(2, 6, side, side)
        torch.testing.assert_close(convolution(pool(inputs)), F.conv2d(inputs, convolution.weight, stride=2))


def test_narrow_resnet_has_the_same_gradients_in_channels_last() -> None:
    torch.manual_seed(0)
    network = ResNet(width=4, depth=8).double()
    inputs = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    expected = torch.autograd.grad(network(inputs).square().sum(), list(network.parameters()))
    network, inputs = network.float(), inputs.float().contiguous(memory_format=torch.channels_last)
    found = torch.autograd.grad(network(inputs).square().sum(), list(network.parameters()))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-3, atol=1e-3 * other.abs().max().item())


def test_resnet_block_adds_before_it_rectifies() -> None:
    block = ResNet(width=2, depth=8).groups[0][0].eval()
    torch.nn.init.zeros_(block.conv2.weight)
    inputs = torch.randn(1, 2, 4, 4)
    torch.testing.assert_close(block(inputs), inputs.relu())


def test_wide_resnet_adds_the_raw_input_or_its_projection() -> None:
    network = WideResNet(16, 2).eval()
    first, second = network.groups[0]
    for block in (first, second):
        torch.nn.init.zeros_(block.conv2.weight)
    inputs = torch.randn(1, 16, 4, 4)
    torch.testing.assert_close(first(inputs), F.conv2d(inputs, first.shortcut.weight))
    inputs = torch.randn(1, 32, 4, 4)
    torch.testing.assert_close(second(inputs), inputs)


@pytest.mark.parametrize(
    ("network", "channels"), [(ResNet(width=4, depth=8), 16), (WideResNet(10, 1), 64)], ids=["resnet", "wide"]
)
def test_residual_networks_halve_the_image_twice(network: ResNet | WideResNet, channels: int) -> None:
    sizes: list[torch.Size] = []
    for group in network.groups:
        group.register_forward_hook(lambda module, args, output: sizes.append(output.shape))
    network(torch.zeros(2, 3, 32, 24))
    assert [size[2:] for size in sizes] == [(32, 24), (16, 12), (8, 6)]
    assert sizes[-1][:2] == (2, channels)


def test_vit_attention_is_that_of_torch() -> None:
    attention = ViT(width=12, heads=3, depth=1).blocks[0].attention
    torch.nn.init.normal_(attention.query.bias)
    torch.nn.init.normal_(attention.value.bias)
    x = torch.randn(2, 5, 12)
    expected, _ = F.multi_head_attention_forward(
        *(x.transpose(0, 1),) * 3,
        embed_dim_to_check=12,
        num_heads=3,
        in_proj_weight=None,
        in_proj_bias=torch.cat([attention.query.bias, torch.zeros(12), attention.value.bias]),
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=attention.out.weight,
        out_proj_bias=attention.out.bias,
        use_separate_proj_weight=True,
        q_proj_weight=attention.query.weight,
        k_proj_weight=attention.key.weight,
        v_proj_weight=attention.value.weight,
    )
    torch.testing.assert_close(attention(x), expected.transpose(0, 1))


def test_vit_is_equivariant_without_positions() -> None:
    torch.manual_seed(0)
    network = ViT((1, 8, 8), width=16, depth=2, heads=2)
    image = torch.randn(1, 1, 8, 8)
    swapped = image.roll(4, dims=3)  # patches of 4: the left and the right half change places
    assert not torch.allclose(network(image), network(swapped), atol=1e-4)
    torch.nn.init.zeros_(network.positions)
    torch.testing.assert_close(network(image), network(swapped))
