"""The loop takes images in pieces where that gives the same, and only there."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from enfold.cost import flops
from enfold.engines.inference import PIECE, Fusion, find_fusions
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.networks import ResNet

More = Callable[["Block", Tensor, Tensor, Tensor], Tensor | float]


class Counting(nn.Module):
    """A convolution that records the number of images of each call."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), norm or nn.Identity(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3))
        self.calls: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls.append(len(inputs))
        return self.layers(inputs)


class Remembering(Counting):
    """Writes to a buffer in eval mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(inputs)


class Squeezing(Counting):
    """Loses the batch axis of a single image."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).squeeze()


def calls_of(members: DeepEnsemble, inputs: Tensor) -> tuple[Tensor, list[int]]:
    network = members.skeleton.network
    with torch.no_grad():
        members(inputs[:2])  # the engine is chosen
        members(inputs)  # and whether it may take pieces is found
        network.calls.clear()
        return members(inputs), list(network.calls)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2 * PIECE + 5, 1, 8, 8)


def test_pieces_equal_the_members(images: Tensor) -> None:
    members = DeepEnsemble([Counting(nn.BatchNorm2d(4)) for _ in range(2)], engine="loop").eval()
    found, calls = calls_of(members, images)
    assert calls == [PIECE, PIECE, 5] * 2
    expected = torch.stack([network(images) for network in members.networks()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        each = members.forward_each(images.expand(2, *images.shape))
    torch.testing.assert_close(each, found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "network",
    [Counting(nn.BatchNorm2d(4, track_running_stats=False)), Remembering(), Squeezing()],
    ids=["examples in one batch norm", "a buffer that counts", "no batch of one"],
)
def test_no_pieces_where_results_would_differ(network: Counting, images: Tensor) -> None:
    members = DeepEnsemble([network, network], engine="loop").eval()
    _, calls = calls_of(members, images)
    assert calls == [len(images)] * 2


def test_analysis_with_zeros_holds_for_all_values(images: Tensor) -> None:
    """Equal rows and a head of zeros hide that a network mixes examples."""
    members = DeepEnsemble(
        [Counting(nn.BatchNorm2d(4, track_running_stats=False)) for _ in range(2)], engine="loop"
    ).eval()
    with torch.no_grad():
        for parameter in members.parameters():
            parameter.zero_()
        members(torch.zeros_like(images))
        for parameter in members.parameters():
            parameter.normal_()
        found = members(images)
        expected = torch.stack([network(images) for network in members.networks()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_no_pieces_in_training_or_for_gradients(images: Tensor) -> None:
    members = DeepEnsemble([Counting(nn.BatchNorm2d(4)) for _ in range(2)], engine="loop")
    network = members.skeleton.network
    with torch.no_grad():
        members(images)
    members.eval()(images).sum().backward()
    assert min(size for size in network.calls if size > 5) == len(images)


class Block(nn.Module):
    """A convolution with a batch norm and a relu; `more` sees the convolution's and the batch norm's outputs."""

    def __init__(self, more: More | None = None, *, bias: bool = True, affine: bool = True) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, bias=bias)
        self.norm = nn.BatchNorm2d(4, affine=affine)
        self.relu = nn.ReLU()
        self.head = nn.Linear(4, 3)
        self.register_buffer("gate", torch.zeros(()))
        self.more = more

    def forward(self, inputs: Tensor) -> Tensor:
        convolved = self.convolution(inputs)
        normalised = self.norm(convolved)
        rectified = self.relu(normalised)
        if self.more:
            rectified = rectified + self.more(self, inputs, convolved, normalised)
        return self.head(rectified.mean((2, 3)))


class Between(Block):
    """Something in place between the convolution and the batch norm."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.relu(self.norm(self.convolution(inputs).clamp_(-1, 1))).mean((2, 3)))


def trained(network: nn.Module) -> nn.Module:
    """With statistics and factors that are not those of the beginning."""
    for norm in (part for part in network.modules() if isinstance(part, nn.BatchNorm2d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        if norm.affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return network


def found_in(members: DeepEnsemble, images: Tensor) -> list[Fusion] | None:
    first = {name: tensor[0] for name, tensor in members.expand().items()}
    return find_fusions(members.skeleton, first, images[:3])


def expected_of(members: DeepEnsemble, images: Tensor) -> Tensor:
    return torch.stack([network(images) for network in members.networks()])


def assert_same(members: DeepEnsemble, images: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(members(images), expected_of(members, images), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"affine": False}], ids=str)
@torch.no_grad()
def test_batch_norms_are_fused_into_convolutions(settings: dict[str, bool], dtype: torch.dtype, images: Tensor) -> None:
    members = DeepEnsemble([trained(Block(**settings)).to(dtype) for _ in range(2)], engine="loop").eval()
    images = images.to(dtype)
    network = members.skeleton.network
    has_bias = settings.get("bias", True)
    assert found_in(members, images) == [Fusion(network.convolution, has_bias, network.norm, network.relu)]
    assert_same(members, images, 1e-5 if dtype == torch.float32 else 1e-12)
    assert network.convolution.bias is None or network.convolution.bias.is_meta  # and all is put back
    assert "forward" not in vars(network.norm)


@torch.no_grad()
def test_every_block_of_a_residual_network_is_fused(images: Tensor) -> None:
    members = DeepEnsemble([trained(ResNet(1, 3, depth=8, width=4)) for _ in range(2)], engine="loop").eval()
    found = found_in(members, images)
    convolutions = [part for part in members.skeleton.network.modules() if isinstance(part, nn.Conv2d)]
    assert found is not None
    assert len(found) == sum(isinstance(part, nn.BatchNorm2d) for part in members.skeleton.network.modules())
    assert {id(each.convolution) for each in found} <= {id(part) for part in convolutions}
    assert_same(members, images, 1e-4)


@torch.no_grad()
def test_a_single_image_runs_by_stored_kernels(images: Tensor) -> None:
    members = DeepEnsemble([trained(ResNet(1, 3, depth=8, width=4)) for _ in range(2)], engine="loop").eval()
    image = images[:1]
    assert_same(members, image)
    (fusions,) = members._engine._fusions.values()
    assert fusions
    assert all(fusion.is_verified and set(fusion.prepared) == {0, 1} for fusion in fusions)
    kernels = [fusion.prepared[1].kernel for fusion in fusions]
    assert_same(members, image)
    assert all(fusion.prepared[1].kernel is kernel for fusion, kernel in zip(fusions, kernels, strict=True))
    assert_same(copy.deepcopy(members), image)


@torch.no_grad()
def test_stored_kernels_follow_their_parameters_and_statistics(images: Tensor) -> None:
    members = DeepEnsemble([trained(Block()) for _ in range(2)], engine="loop").eval()
    image = images[:1]
    assert_same(members, image)
    for tensor in (*members.parameters(), *members.buffers()):
        if tensor.is_floating_point():
            tensor.mul_(1.5)
            assert_same(members, image)
    for parameter in members.parameters():
        parameter.data.mul_(2)  # not counted by a version
    assert_same(members.eval(), image)
    members.load_state_dict(DeepEnsemble([trained(Block()) for _ in range(2)]).state_dict())
    assert_same(members, image)


@torch.no_grad()
def test_stored_kernels_only_where_they_give_the_outputs(images: Tensor) -> None:
    circular = trained(Block())
    circular.convolution = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")
    for network in (circular, trained(Block()).double()):
        members = DeepEnsemble([network, trained(copy.deepcopy(network))], engine="loop").eval()
        image = images[:1].to(next(network.parameters()).dtype)
        assert_same(members, image)
        (fusions,) = members._engine._fusions.values()
        assert not any(fusion.prepared for fusion in fusions)


@torch.no_grad()
def test_operations_are_counted_without_stored_kernels(images: Tensor) -> None:
    members = DeepEnsemble([trained(Block()) for _ in range(2)], engine="loop").eval()
    image = images[:1]
    assert_same(members, image)
    assert flops(members, image) == 2 * flops(members.member(0), image)


def above(network: Block, inputs: Tensor, convolved: Tensor, normalised: Tensor) -> Tensor:
    return torch.relu(convolved - 8)  # nothing, for most images


def gated(network: Block, inputs: Tensor, convolved: Tensor, normalised: Tensor) -> Tensor:
    return network.gate * convolved  # nothing, for the first member


def of_large_images(network: Block, inputs: Tensor, convolved: Tensor, normalised: Tensor) -> Tensor | float:
    return convolved if inputs.shape[-1] > 8 else 0.0


def normalised_too(network: Block, inputs: Tensor, convolved: Tensor, normalised: Tensor) -> Tensor:
    return normalised


@torch.no_grad()
def test_values_used_elsewhere_are_not_fused(images: Tensor) -> None:
    bright = torch.cat([images, 20 * images])
    for make in (lambda: Block(above), lambda: Block(gated), Between):
        networks = [trained(make()) for _ in range(2)]
        networks[1].gate.fill_(1.0)
        members = DeepEnsemble(networks, engine="loop").eval()
        assert found_in(members, bright) == []
        assert_same(members, bright, 1e-4)


@torch.no_grad()
def test_a_relu_is_in_place_only_on_values_without_other_users(images: Tensor) -> None:
    members = DeepEnsemble([trained(Block(normalised_too)) for _ in range(2)], engine="loop").eval()
    network = members.skeleton.network
    assert found_in(members, images) == [Fusion(network.convolution, True, network.norm, None)]
    assert_same(members, images)


@torch.no_grad()
def test_images_of_another_size_are_verified_again(images: Tensor) -> None:
    members = DeepEnsemble([trained(Block(of_large_images)) for _ in range(2)], engine="loop").eval()
    assert_same(members, images)
    assert_same(members, torch.randn(PIECE + 1, 1, 12, 12))


class Deciding(Counting):
    """Doubles the batch's logits if one image is bright."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (2 if inputs.max() > 20 else 1)


def test_networks_with_data_dependent_control_flow_get_complete_batches(images: Tensor) -> None:
    members = DeepEnsemble([Deciding() for _ in range(2)], engine="loop").eval()
    images[-1] = 30.0
    found, calls = calls_of(members, images)
    assert calls == [len(images)] * 2
    torch.testing.assert_close(found, expected_of(members, images), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_hooks_see_layer_outputs(images: Tensor) -> None:
    members = DeepEnsemble([trained(Block(above)) for _ in range(2)], engine="loop").eval()
    members.verify(images)
    seen: list[Tensor] = []
    handle = members.skeleton.network.convolution.register_forward_hook(lambda *call: seen.append(call[2].clone()))
    members(images)
    torch.testing.assert_close(seen[-2], members.networks()[0].convolution(images), rtol=1e-4, atol=1e-5)
    handle.remove()
    assert_same(members, 20 * images, 1e-4)


class Failing(Block):
    """Fails for bright images, in the middle of a call."""

    def forward(self, inputs: Tensor) -> Tensor:
        logits = super().forward(inputs)
        if self.calls:
            raise KeyboardInterrupt
        return logits

    calls = 0


@torch.no_grad()
def test_state_is_restored_after_an_exception(images: Tensor) -> None:
    members = DeepEnsemble([trained(Failing(bias=False)) for _ in range(2)], engine="loop").eval()
    assert_same(members, images)
    members.skeleton.network.calls = 1
    with pytest.raises(KeyboardInterrupt):
        members(images)
    members.skeleton.network.calls = 0
    assert members.skeleton.network.convolution.bias is None
    assert_same(members, images)
