"""Specimens of the zoo: a network, its inputs, and its properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 3
FEATURES = 6
TOKENS = 11

Inputs = Callable[[int], Tensor]


@dataclass(frozen=True)
class Specimen:
    """A network, its inputs, and its properties."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    stacked: bool  # one batched product a layer is right for it
    vmap: bool = True  # torch.vmap can run it
    draws: bool = False  # it draws random numbers in train mode


ZOO: dict[str, Specimen] = {}


def specimen(
    inputs: Inputs, *, stacked: bool, vmap: bool = True, draws: bool = False
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Add a factory to the zoo under its own name."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO[make.__name__] = Specimen(make.__name__, make, inputs, stacked, vmap, draws)
        return make

    return add


def population(name: str, num_members: int = 3) -> list[nn.Module]:
    """Different networks of one kind, as if trained: running statistics are not what they start as."""
    networks = []
    for index in range(num_members):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(index)
            network = ZOO[name].make()
            for key, buffer in network.named_buffers():
                if key.endswith(("running_mean", "running_var")):
                    buffer.uniform_(0.5, 2.0)
        networks.append(network)
    return networks


def own_inputs(name: str, batch: int, num_members: int = 3) -> Tensor:
    """(M, B, ...): other inputs for each member."""
    return torch.stack([ZOO[name].inputs(batch + index)[:batch] for index in range(num_members)])


def vectors(batch: int) -> Tensor:
    return torch.randn(batch, FEATURES, generator=torch.Generator().manual_seed(batch))


def sequences(batch: int) -> Tensor:
    return torch.randn(batch, 5, FEATURES, generator=torch.Generator().manual_seed(batch))


def images(batch: int) -> Tensor:
    return torch.randn(batch, 2, 8, 8, generator=torch.Generator().manual_seed(batch))


def tokens(batch: int) -> Tensor:
    return torch.randint(1, TOKENS, (batch, 5), generator=torch.Generator().manual_seed(batch))


class Apply(nn.Module):
    """Parts and a function that uses them: `forward(x) = function(self, x)`."""

    def __init__(self, function: Callable[[Apply, Tensor], object], **parts: object) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"first": nn.Linear(FEATURES, 8), "second": nn.Linear(8, FEATURES)})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers["second"](F.gelu(self.layers["first"](x)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Sequential(Block(), Block())])
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = x + F.relu(self.norm2(self.conv(x)))
        return self.head(x.mean((2, 3)))


class Reassigns(nn.Module):
    """Keeps a running mean by putting a new tensor in the buffer's place, and counts its calls in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * outputs.mean(0).detach()
        self.calls = self.calls + 1
        return outputs - self.mean


class Caches(nn.Module):
    """Fills a buffer that is None at first from its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("norm", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is None:
            self.norm = self.layer.weight.detach().norm()
        return self.layer(x) / self.norm


class Keeps(nn.Module):
    """Leaves an activation in an attribute, as people do to look at it later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.relu(self.layer(x))
        self.seen = [self.hidden]
        return self.head(self.hidden)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None
