"""A network whose logits are the concentrations of a distribution over class probabilities, as a predictor."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.members.engines import logits_of
from enfold.metrics.dirichlet import concentrations, dirichlet_uncertainty


class Dirichlet(nn.Module):
    """A network with concentrations α = exp(z) + offset; it answers with the mean of that distribution.

    The network stays what it is and is stored as it is; this only reads it. A share of M members is read member by
    member.
    """

    def __init__(self, network: nn.Module, offset: float = 0.0) -> None:
        require_offset(offset)
        super().__init__()
        self.network, self.offset = network, offset
        self.training = network.training
        if hasattr(network, "num_members"):
            self.num_members = int(network.num_members)  # type: ignore[arg-type]

    def forward(self, inputs: Tensor) -> Tensor:
        """ln α, logits whose softmax is the mean: (B, ...) -> (B, C), or (M, B, C) of a share."""
        logits = self._logits(inputs)
        return torch.logaddexp(logits, logits.new_tensor(math.log(self.offset))) if self.offset else logits

    def concentrations(self, inputs: Tensor) -> Tensor:
        """α in float64: (B, ...) -> (B, C), or (M, B, C) of a share."""
        return concentrations(self._logits(inputs), self.offset)

    @torch.no_grad()
    def uncertainties(self, inputs: Tensor) -> dict[str, Tensor]:
        """total, aleatoric, epistemic, epkl, mkl and precision of each example, (B,), or (M, B) of a share."""
        return asdict(dirichlet_uncertainty(self.concentrations(inputs)))

    def _logits(self, inputs: Tensor) -> Tensor:
        return logits_of(self.network(inputs))

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"offset={self.offset}"


def require_offset(offset: float, name: str = "offset") -> None:
    """Concentrations are above 0, so what is added to exp(z) is not below."""
    if not 0 <= offset < math.inf:
        raise EnfoldError(f"the {name} must be 0 or more, got {offset}: 0 and 1 are usual")


def require_temperature(temperature: float) -> None:
    """Logits are read as concentrations as they are, so they must be learned as they are."""
    if temperature != 1:
        raise EnfoldError(
            f"concentrations are read at the temperature 1 and must be learned there, got {temperature}: "
            "leave the temperature at 1"
        )
