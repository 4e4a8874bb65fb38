"""What every perturbation keeps to: inputs moved a little, to where the teachers have more to tell.

    x̃ = clip(x + ε),   ε = (η / 255) u,   mean u² = 1 in each example                        (1)

x are pixels in [0, 1], before they are normalised, so that a step is as large in every channel. Data that are not known
to be pixels (neither bytes nor given with a mean) are moved in their own unit, and not clipped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from enfold.data import Data
from enfold.engines.modes import evaluating
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits


class Asked:
    """A model that is asked about one batch, member by member: in eval mode, with gradients to the inputs alone.

    Members run alone where they can, so that the others cost nothing; what gives all members at once is run once.
    Parameters are read anew for each batch: nothing is kept while a student learns.
    """

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        self.model = model
        self.num_members = int(getattr(model, "num_members", 1))
        device = next((tensor.device for tensor in model.parameters()), inputs.device)
        self.inputs = inputs.to(device)
        self._alone = isinstance(model, Ensemble) and (model.is_expandable or isinstance(model, MixedEnsemble))
        self._heard: dict[int, Tensor] = {}

    def logits(self, index: int) -> Tensor:
        """What one member says, (B, C), differentiable in the inputs."""
        if index not in self._heard:
            self._heard.update({index: self._one(index)} if self._alone else enumerate(self._all()))
        return self._heard[index]

    def fixed(self, index: int) -> Tensor:
        """The same as numbers, (B, C), without a gradient."""
        if index in self._heard or not self._alone:
            return self.logits(index).detach()
        with torch.no_grad():
            return self._one(index)

    @cached_property
    def _state(self) -> State:
        with torch.no_grad():
            return self.model.expand() if isinstance(self.model, Ensemble) and self.model.is_expandable else {}

    def _one(self, index: int) -> Tensor:
        if isinstance(self.model, Ensemble) and self.model.is_expandable:
            self.model.verify(self.inputs)
            code = self.model.code(index)
            state = {name: tensor.detach()[index] for name, tensor in self._state.items()}
            with evaluating(code.network), code.holding(state) as network:
                return member_logits(network, self.inputs.clone() if code.writes_inputs else self.inputs)[0]
        network = self.model.members[index] if isinstance(self.model, MixedEnsemble) else self.model
        with evaluating(network), frozen(network):
            return member_logits(network, self.inputs)[0]

    def _all(self) -> Tensor:
        with evaluating(self.model), frozen(self.model):
            return member_logits(self.model, self.inputs)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside the block no parameter wants a gradient, so that none is computed."""
    wanting = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanting:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_()


@dataclass(frozen=True)
class Perturbation(ABC):
    """A way to move a batch of inputs; subclasses are frozen dataclasses whose fields are the hyper-parameters."""

    step: float = 1.0  # η: the root mean square of a move, in 1/255 of the range of pixels

    replaces: ClassVar[bool] = False  # whether labels, too, are learned at the moved inputs instead of the clean ones

    def __post_init__(self) -> None:
        if not 0 <= self.step < math.inf:
            raise EnfoldError(f"a step must be 0 or more, got {self.step}: 1 is a change of 1/255 of a pixel's range")

    def require(self, teachers: nn.Module, student: nn.Module) -> None:  # noqa: B027 - most have nothing to refuse
        """What must hold between teachers and student before anything is trained."""

    @abstractmethod
    def moves(self, pixels: Tensor, teachers: Asked, student: Asked, source: torch.Generator) -> Tensor:
        """u of equation (1), shaped as the pixels, on which what is asked depends; 0 where there is no direction."""

    def __call__(
        self, inputs: Tensor, data: Data, teachers: nn.Module, student: nn.Module, source: torch.Generator
    ) -> Tensor:
        """The moved inputs, detached; given and returned as a network sees them, (B, ...).

        Moves of pixels end at 0 and 1: of data whose training inputs are bytes, or that have a mean and a standard
        deviation. Teachers and student are left as they are, modes and gradients too.
        """
        if not inputs.is_floating_point():
            raise EnfoldError(
                f"inputs must be real numbers to be moved, got {inputs.dtype}: leave the perturbation out for tokens"
            )
        self.require(teachers, student)
        inputs = inputs.detach()
        # float32 also where training runs in 16 bits: gradients of confident teachers would be rounded to nothing
        with torch.enable_grad(), torch.autocast(inputs.device.type, enabled=False):
            pixels = data.denormalise(inputs).detach().requires_grad_()
            seen = data.normalise(pixels)
            u = self.moves(pixels, Asked(teachers, seen), Asked(student, seen), source).detach()
        pixels = pixels.detach()
        moved = pixels + (self.step / 255) * u  # (1)
        if data.has_pixels:  # what lies outside already, by rounding or by a mean of other data, is not pulled in
            moved = torch.clamp(moved, pixels.clamp(max=0.0), pixels.clamp(min=1.0))
        still = moved.eq(pixels).flatten(1).all(1).view(-1, *(1,) * (inputs.ndim - 1))
        return torch.where(still, inputs, data.normalise(moved))  # what stays where it is keeps its bits


def unit(gradient: Tensor) -> Tensor:
    """Each example's gradient at a root mean square of 1; where it is zero, or no number, there is no direction: 0."""
    rows = gradient.flatten(1)
    rows = rows / rows.abs().amax(1, keepdim=True)  # first, since the squares of a small gradient would vanish
    rows = rows / rows.square().mean(1, keepdim=True).sqrt()
    return torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0).view_as(gradient)


def gradient(pixels: Tensor, outputs: Sequence[Tensor], pulls: Sequence[Tensor | None]) -> Tensor:
    """Σ pulls · ∂outputs/∂pixels; outputs that do not depend on the pixels add nothing."""
    chosen = [pair for pair in zip(outputs, pulls, strict=True) if pair[0].requires_grad]
    if not chosen:
        return torch.zeros_like(pixels)
    found = torch.autograd.grad([one for one, _ in chosen], pixels, [one for _, one in chosen], materialize_grads=True)
    return found[0]
