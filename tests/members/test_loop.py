"""The loop takes images in pieces where that gives the same, and only there."""

import pytest
import torch
from torch import Tensor, nn

from enfold.members import Stacked
from enfold.members.inference import PIECE, Shortcut, shortcuts_of


class Counting(nn.Module):
    """A convolution that notes how many images each call brought."""

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


def calls_of(members: Stacked, inputs: Tensor) -> tuple[Tensor, list[int]]:
    network = members.skeleton.network
    with torch.no_grad():
        members(inputs[:2])  # the engine is chosen
        members(inputs)  # and whether it may take pieces is found
        network.calls.clear()
        return members(inputs), list(network.calls)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2 * PIECE + 5, 1, 8, 8)


def test_pieces_give_what_the_members_give(images: Tensor) -> None:
    members = Stacked([Counting(nn.BatchNorm2d(4)) for _ in range(2)], engine="loop").eval()
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
def test_no_pieces_where_they_would_give_something_else(network: Counting, images: Tensor) -> None:
    members = Stacked([network, network], engine="loop").eval()
    _, calls = calls_of(members, images)
    assert calls == [len(images)] * 2


def test_what_is_found_with_zeros_holds_for_all_values(images: Tensor) -> None:
    """Equal rows and a head of zeros hide that a network mixes examples."""
    members = Stacked([Counting(nn.BatchNorm2d(4, track_running_stats=False)) for _ in range(2)], engine="loop").eval()
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
    members = Stacked([Counting(nn.BatchNorm2d(4)) for _ in range(2)], engine="loop")
    network = members.skeleton.network
    with torch.no_grad():
        members(images)
    members.eval()(images).sum().backward()
    assert min(size for size in network.calls if size > 5) == len(images)


class Residual(nn.Module):
    """A convolution with a batch norm, its output used once more after the rectifier."""

    def __init__(self, *, again: str = "", bias: bool = True, affine: bool = True) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, bias=bias)
        self.norm = nn.BatchNorm2d(4, affine=affine)
        self.rectifier = nn.ReLU()
        self.head = nn.Linear(4, 3)
        self.again = again

    def forward(self, inputs: Tensor) -> Tensor:
        convolved = self.convolution(inputs)
        normalised = self.norm(convolved)
        rectified = self.rectifier(normalised)
        skipped = {"convolved": convolved, "normalised": normalised}.get(self.again, 0.0)
        return self.head((rectified + skipped).mean((2, 3)))


def trained(network: nn.Module) -> nn.Module:
    """With statistics and factors that are not those of the beginning."""
    for norm in (part for part in network.modules() if isinstance(part, nn.BatchNorm2d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        if norm.affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return network


def found_in(members: Stacked, images: Tensor) -> list[Shortcut] | None:
    first = {name: tensor[0] for name, tensor in members.expand().items()}
    return shortcuts_of(members.skeleton, first, images[:3])


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"affine": False}], ids=str)
def test_batch_norms_are_taken_into_convolutions(settings: dict[str, bool], images: Tensor) -> None:
    members = Stacked([trained(Residual(**settings)) for _ in range(2)], engine="loop").eval()
    with torch.no_grad():
        found = members(images)
        expected = torch.stack([network(images) for network in members.networks()])
        shortcuts = found_in(members, images)
    network = members.skeleton.network
    assert shortcuts == [Shortcut(network.convolution, network.norm, network.rectifier)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert network.convolution.bias is None or network.convolution.bias.is_meta  # and all is put back
    assert "forward" not in vars(network.norm)


@pytest.mark.parametrize("again", ["convolved", "normalised"])
def test_nothing_is_shortened_that_is_used_twice(again: str, images: Tensor) -> None:
    members = Stacked([trained(Residual(again=again)) for _ in range(2)], engine="loop").eval()
    with torch.no_grad():
        assert found_in(members, images) == []
        expected = torch.stack([network(images) for network in members.networks()])
        torch.testing.assert_close(members(images), expected, rtol=1e-4, atol=1e-5)


def test_a_hook_sees_what_the_layer_gives(images: Tensor) -> None:
    members = Stacked([trained(Residual()) for _ in range(2)], engine="loop").eval()
    seen: list[Tensor] = []
    with torch.no_grad():
        members(images)
        members.skeleton.network.convolution.register_forward_hook(lambda *call: seen.append(call[2].clone()))
        members(images)
        expected = members.networks()[0].convolution(images[:PIECE])
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)
