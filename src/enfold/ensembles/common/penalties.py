"""L2 penalties λ of members: log-uniform, with bounds that are tuned, and a linear embedding.

λ = l^(1 - x) u^x,  x uniform on [0, 1],     E[λ] = (u - l) / (log u - log l)            (1)
H[λ] = ½ (log l + log u) + log(log u - log l)                                            (2)
e(λ) = E log̃ λ,  where log̃ λ goes from 0 to 1 over the range of λ                        (3)
‖W + e ∘ Δ‖² = Σ_o (W²)_o + 2 e_o (WΔ)_o + e_o² (Δ²)_o,  o the outputs                    (4)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.batches import Batch
from enfold.engines.parameters import Tree
from enfold.engines.skeleton import State
from enfold.seeds import generator
from enfold.train import TaskLoss

BETAS = (0.9, 0.999)  # Adam's, with the usual epsilon
EPSILON = 1e-8
NARROWEST = 5e-7  # of the range: the entropy has the logarithm of the width


def sample(bounds: Tensor, place: Tensor) -> Tensor:
    """Return λ at `place` in [0, 1], differentiable in the bounds, log l and log u, of shape (2, ...)."""
    return torch.lerp(bounds[0].expand_as(place), bounds[1].expand_as(place), place).exp()  # (1)


def mean(bounds: Tensor) -> Tensor:
    """Return E[λ], in a form that is accurate for narrow distributions, too."""
    width = bounds[1] - bounds[0]
    return torch.exp(bounds[0]) * torch.expm1(width) / width  # (1)


def entropy(bounds: Tensor) -> Tensor:
    """Return H[λ] in nats."""
    return torch.log(bounds[1] - bounds[0]) + bounds.mean(0)  # (2)


def penalty_groups(prefixes: Sequence[str]) -> dict[str, int]:
    """Return the index of the penalty of the weight and the bias of each layer, given the layers in order.

    0 is the first layer, 1 to 3 are the thirds of the hidden layers, 4 and 5 the last weight and bias.
    """
    last, groups = len(prefixes) - 1, dict[str, int]()
    for index, prefix in enumerate(prefixes):
        group = 4 if index == last else 0 if index == 0 else 1 + 3 * (index - 1) // (last - 1)
        groups |= {f"{prefix}weight": group, f"{prefix}bias": 5 if index == last else group}
    return groups


def by_output(weight: Tensor, axis: int, groups: int = 1) -> Tensor:
    """Return the sum over all axes of a weight but that of the outputs, (outputs,); `axis` 1 may be in groups."""
    rows = weight if axis == 0 else weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return torch.sum(rows.flatten(1), dim=1)


class Penalties(nn.Module):
    """H penalties of each of M members, and the state of the optimizer that tunes their bounds.

    Args:
        num_members: M.
        outputs: The number of outputs of every tensor that depends on penalties.
        groups: The index of the penalty of every tensor.
        limits: The range of λ.
        width: The initial distance of the bounds from their centre.
        spread: The standard deviation of the initial embedding.
        seed: The seed of initial values.
    """

    bounds: Tensor
    moments: Tensor
    steps: Tensor

    def __init__(
        self,
        num_members: int,
        outputs: Mapping[str, int],
        groups: Mapping[str, int],
        limits: tuple[float, float],
        width: float,
        spread: float,
        seed: int,
    ) -> None:
        super().__init__()
        self.limits = (math.log(limits[0]), math.log(limits[1]))
        kinds = sorted({groups[name] for name in outputs})
        self.groups = {name: kinds.index(groups[name]) for name in outputs}
        self.current: Tensor | None = None  # λ, (M, H), where it is not the mean
        rows = {name: (len(kinds), size) for name, size in outputs.items()}
        drawn = {name: torch.randn(shape, generator=generator(seed, "embed", name)) for name, shape in rows.items()}
        self.embedding = Tree({name: nn.Parameter(spread * tensor) for name, tensor in drawn.items()})
        bounds = self._start(num_members, len(kinds), limits, width, seed)
        self.register_buffer("bounds", bounds)  # log l and log u, (2, M, H)
        self.register_buffer("moments", torch.zeros(2, *bounds.shape))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def _start(self, num_members: int, count: int, limits: tuple[float, float], width: float, seed: int) -> Tensor:
        """Return bounds around the mean of the range that differ a little between members."""
        centre = float(mean(torch.tensor(self.limits, dtype=torch.float64)))
        drawn = [torch.randn(count, generator=generator(seed, "penalty", m)) for m in range(num_members)]
        values = centre + 0.1 * width * torch.stack(drawn)  # (M, H)
        return self._within(torch.stack([values - width, values + width]).clamp(*limits).log())

    def _within(self, bounds: Tensor) -> Tensor:
        """Return the nearest bounds in the range with l < u."""
        low, high = self.limits
        narrow = NARROWEST * (high - low)
        log_low = bounds[0].clamp(low, high - 2 * narrow)
        return torch.stack([log_low, bounds[1].clamp(max=high).maximum(log_low + narrow)])

    def draw(self, size: int) -> Tensor:
        """Return samples of λ, (M, size, H), drawn by torch's global generator, which `fit` seeds in every step."""
        _, num_members, count = self.bounds.shape
        place = torch.rand(num_members, size, count).to(self.bounds.device)
        return sample(self.bounds.unsqueeze(2), place)

    @contextmanager
    def at(self, values: Tensor) -> Iterator[None]:
        """Use these λ, (M, H), in place of the mean inside the block."""
        self.current = values
        try:
            yield
        finally:
            self.current = None

    def embed(self, values: Tensor | None = None) -> State:
        """Return e(λ) of every tensor: (..., H) -> (..., outputs); at the current λ by default."""
        if values is None:
            values = mean(self.bounds) if self.current is None else self.current
        low, high = self.limits
        scaled = (values.log() - low) / (high - low)
        return {name: scaled @ rows for name, rows in self.embedding.state().items()}  # (3)

    def expected_penalty(self, values: Tensor, name: str, e: Tensor, sums: Sequence[Tensor]) -> Tensor:
        """Return the mean of λ ‖W + e(λ) ∘ Δ‖² over samples, (M,), from the sums of (4), (outputs,) or (M, outputs).

        Args:
            values: Samples of λ.
            name: The name of the parameter.
            e: The embedding of the samples.
            sums: The three sums of (4).
        """
        square, cross, delta = (each if each.ndim == 1 else each.unsqueeze(1) for each in sums)
        norms = (square + 2 * e * cross + e.square() * delta).sum(-1)  # (4), (M, S)
        return (values[..., self.groups[name]] * norms).mean(1)

    def tune(self, loss: Callable[[], Tensor], source: torch.Generator, tau: float, rate: float) -> None:
        """Take one step of Adam on the bounds for loss(λ) - τ H[λ] with a new sample of λ, and clip to the range.

        Args:
            loss: The loss as a function without arguments.
            source: The random generator of the sample.
            tau: The weight τ of the entropy.
            rate: The learning rate.
        """
        bounds = self.bounds.clone().requires_grad_()
        place = torch.rand(bounds.shape[1:], generator=source).to(bounds.device)
        with self.at(sample(bounds, place)):
            total = loss() - tau * entropy(bounds).mean()
        self._step(torch.autograd.grad(total, bounds)[0], rate)

    @torch.no_grad()
    def _step(self, gradient: Tensor, rate: float) -> None:
        self.steps += 1
        first, second = self.moments
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square(), 1 - BETAS[1])
        count = int(self.steps)
        size = (second / (1 - BETAS[1] ** count)).sqrt() + EPSILON
        self.bounds.copy_(self._within(self.bounds - rate * first / (1 - BETAS[0] ** count) / size))


@dataclass(frozen=True)
class Penalised:
    """An objective: the loss of the task at one λ per member, and the expected penalty."""

    loss: TaskLoss

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        """Return the loss of each member, (M,)."""
        values = model.distribution.draw(len(batch))  # (M, B, H)
        with model.distribution.at(values[:, 0]):
            losses = self.loss(model, batch)
        total: Tensor = losses + model.penalty(values) / model.num_examples  # divided by N
        return total
