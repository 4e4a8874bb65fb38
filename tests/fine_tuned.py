"""Tiny networks that were fine-tuned from one, and tests that all merges of such members have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from enfold import merge

SOURCE = 11
BASED = ("wise_ft", "model_stock", "task_arithmetic", "ties", "dare", "lora")
EVERY = (*BASED, "fisher", "regmean", "slerp")
IDENTITY = {"wise_ft": {"alpha": 1.0}, "ties": {"density": 1.0}, "dare": {"drop": 0.0}}
"""Options with which equal members give themselves."""
ZERO = {"wise_ft": {"alpha": 0.0}, "task_arithmetic": {"scale": 0.0}, "ties": {"scale": 0.0}, "dare": {"scale": 0.0}}
"""Options with which the result is the base."""


class Mixed(nn.Module):
    """Convolution with groups, batch norm, embedding tied to a head, attention, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, stride=2, groups=2, dilation=1)
        self.norm = nn.BatchNorm2d(4)
        self.embed = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, inputs: Tensor) -> Tensor:
        found = torch.relu(self.norm(self.grouped(torch.relu(self.conv(inputs)))))
        tokens = found.flatten(2).mT + self.embed(torch.tensor([0, 1, 2, 3]).to(inputs.device))
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(torch.tanh(self.inner(mixed.mean(1))))


def images(count: int = 24) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(SOURCE)
    return torch.randn(count, 1, 6, 6, generator=source), torch.randint(5, (count,), generator=source)


@torch.no_grad()
def family(count: int = 3, spread: float = 0.2) -> tuple[nn.Module, list[nn.Module]]:
    """Return a base and members around it; statistics of batch norms are those of the members' own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SOURCE)
        base, members = Mixed(), []
        for _ in range(count):
            member = Mixed()
            member.load_state_dict(base.state_dict())
            for parameter in member.parameters():
                parameter.add_(spread * torch.randn_like(parameter))
            for name, buffer in member.named_buffers():
                if name.endswith("running_var"):
                    buffer.mul_(1 + torch.rand_like(buffer))
            members.append(member.eval())
    return base.eval(), members


def merged(name: str, members: list[nn.Module], base: nn.Module, **options: object) -> nn.Module:
    """Return the result of a merge on the images."""
    if name in BASED:
        options = {"base": base, **options}
    if name == "fisher":
        options = {"targets": "labels", **options}
    return getattr(merge, name)(members, images(), **options)


def flat(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().double() for name, tensor in network.named_parameters()}


def moved(network: nn.Module | None) -> dict[str, Tensor]:
    """A state dict near a network's, as of the network that it was fine-tuned from."""
    source = torch.Generator().manual_seed(3)
    state = {} if network is None else network.state_dict()
    return {
        name: tensor + 0.1 * torch.rand(tensor.shape, generator=source) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
