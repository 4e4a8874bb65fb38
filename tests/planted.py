"""Copies of one network with their hidden units in random orders, and networks to plant them in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.networks import MLP, ResNet, ViT
from enfold.symmetry import Symmetry, permute, symmetries


def pixels(shape: tuple[int, ...] = (3, 8, 8), count: int = 60, seed: int = 0) -> Data:
    """Random inputs with random labels."""
    source = torch.Generator().manual_seed(seed)

    def part(size: int) -> Split:
        return Split(torch.randn(size, *shape, generator=source), torch.randint(3, (size,), generator=source))

    return Data(part(count), part(20), part(20), 3, shape)


def drawn(make, seed: int = 0) -> nn.Module:
    """A network as if trained: also scales, biases and statistics are random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: nn.Module = make().eval()
        with torch.no_grad():
            for tensor in (*network.parameters(), *network.buffers()):
                if tensor.is_floating_point():
                    tensor.add_(0.2 * torch.rand_like(tensor))
    return network


def shallow() -> nn.Module:
    """One hidden layer."""
    return MLP(4, [12], 3)


def deep() -> nn.Module:
    """Three hidden layers."""
    return MLP(4, [12, 10, 8], 3)


def convolutional() -> nn.Module:
    """Convolutions, batch norm, and a flatten in front of the head."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(20, 3),
    )  # fmt: skip


def normed() -> nn.Module:
    """A norm over channels and their places."""
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.LayerNorm([6, 6, 6]), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))


def residual() -> nn.Module:
    """Residual streams with batch norm."""
    return ResNet(depth=8, width=4, num_classes=3)


def attending() -> nn.Module:
    """Heads with units inside them."""
    return ViT((3, 8, 8), 3, width=8, depth=2, heads=2, expansion=2)


class Mixing(nn.Module):
    """An MLP-Mixer: what mixes tokens takes channels as samples, whose order is a member's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.before_tokens, self.before_channels = nn.LayerNorm(6), nn.LayerNorm(6)
        self.tokens = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4))
        self.channels = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, tokens, features) -> (B, classes)."""
        hidden = self.embed(inputs)
        hidden = hidden + self.tokens(self.before_tokens(hidden).mT).mT
        return self.head((hidden + self.channels(self.before_channels(hidden))).mean(1))


class Routed(nn.Module):
    """Each token goes to the expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Linear(5, 6), nn.Linear(6, 2), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6)) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, tokens, features) -> (B, classes)."""
        tokens = self.embed(inputs)
        chosen, made = self.gate(tokens).argmax(-1), torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            made[chosen == index] = expert(tokens[chosen == index])
        return self.head((tokens + made).mean(1))


class Sharing(nn.Module):
    """Four heads of queries, of which pairs have common keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.query, self.key, self.value, self.out = (
            nn.Linear(8, 12),
            nn.Linear(8, 6),
            nn.Linear(8, 6),
            nn.Linear(12, 8),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        parts = (layer(x).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        seen = nn.functional.scaled_dot_product_attention(*parts, enable_gqa=True)
        return self.head((x + self.out(seen.transpose(1, 2).flatten(2))).mean(1))


class Experts(nn.Module):
    """Three experts in one tensor, weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 3), *(nn.Parameter(torch.randn(3, *s)) for s in ((4, 5), (5, 3)))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(torch.einsum("td,edf->tef", inputs, self.up))
        return torch.einsum("te,tef,efd->td", self.gate(inputs).softmax(-1), hidden, self.down)


NETWORKS = {
    "shallow": (shallow, (4,)),
    "deep": (deep, (4,)),
    "convolutional": (convolutional, (3, 8, 8)),
    "normed": (normed, (3, 8, 8)),
    "residual": (residual, (3, 8, 8)),
    "attending": (attending, (3, 8, 8)),
    "mixing": (Mixing, (4, 5)),
    "routed": (Routed, (4, 5)),
    "sharing": (Sharing, (3, 4)),
    "experts": (Experts, (4,)),
}


def shuffled(state: dict[str, Tensor], symmetry: Symmetry, seed: int) -> dict[str, Tensor]:
    """The same function with every group in a random order."""
    source = torch.Generator().manual_seed(seed)
    return permute(state, symmetry, {g.name: torch.randperm(g.size, generator=source) for g in symmetry.groups})


def planted(name: str, count: int, seed: int = 0) -> tuple[DeepEnsemble, nn.Module, Data]:
    """A network and copies of it in random orders (the first as it is), and data for them."""
    make, shape = NETWORKS[name]
    network, data = drawn(make, seed), pixels(shape)
    symmetry = symmetries(network, data.train.inputs[:2])
    whole = DeepEnsemble([network])
    state = {key: tensor[0].detach() for key, tensor in whole.expand().items()}
    copies = [whole.network(shuffled(state, symmetry, seed * 100 + k)) for k in range(1, count)]
    return DeepEnsemble([network, *copies]), network, data


def assert_back(folded: nn.Module, network: nn.Module, data: Data, atol: float = 1e-4) -> None:
    """The function is the network's."""
    inputs = data.test.inputs
    torch.testing.assert_close(folded(inputs), network(inputs), rtol=1e-3, atol=atol)
