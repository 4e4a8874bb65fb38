"""Exponential moving average of the weights (EMA) along a training.

    θ̄_t = d_t θ̄_{t-1} + (1 - d_t) θ_t,   θ̄_0 = θ_0,   d_t = min(ema, (1 + t) / (10 + t))                    (1)

after step t. d_t is smaller in the first steps, so that θ_0 is forgotten in short trainings, too. Running statistics of
normalization layers are averaged as weights are; counters are those of the last step. The averages are evaluated on
validation examples and returned; the training itself continues from θ_t.

B. Polyak and A. Juditsky: Acceleration of Stochastic Approximation by Averaging, 1992; A. Tarvainen and H. Valpola:
Mean Teachers Are Better Role Models, NeurIPS 2017, arXiv:1703.01780.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError


class WeightAverage:
    """The average of equation (1) for a network or an ensemble, or nothing without a decay.

    Args:
        model: The model that is trained.
        decay: The decay of the average; None to use the weights as they are.

    Raises:
        EnfoldError: If the ensemble collects or changes weights along the training itself.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.model, self.decay, self.steps = model, decay, 0
        if decay is not None and isinstance(model, Ensemble) and type(model).on_epoch_end is not Ensemble.on_epoch_end:
            raise EnfoldError(
                f"ema must be None for a {type(model).__name__}, which collects or changes weights along the training, "
                f"got {decay}: leave ema out"
            )
        self.state = {} if decay is None else _copies(model)

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step, (1)."""
        if self.decay is None:
            return
        self.steps += 1
        weight = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, value in _tensors(self.model).items():
            average = self.state[name]
            if average.is_floating_point() or average.is_complex():
                average.lerp_(value.to(average.dtype), weight)  # (1)
            else:
                average.copy_(value)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Put the averages into the model inside the block."""
        if self.decay is None:
            yield
            return
        own = {name: value.clone() for name, value in _tensors(self.model).items()}
        self.apply()
        try:
            yield
        finally:
            _load(self.model, own)

    def apply(self) -> None:
        """Put the averages into the model."""
        if self.decay is not None:
            _load(self.model, self.state)

    def restore(self, state: dict[str, Tensor], steps: int) -> None:
        """Continue from a stored average."""
        if self.decay is not None:
            device = next(self.model.parameters()).device
            self.state, self.steps = {name: value.to(device) for name, value in state.items()}, steps


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors of a model, in single precision at least."""

    def copy_value(value: Tensor) -> Tensor:
        is_real = value.is_floating_point()
        return value.detach().clone().to(torch.promote_types(value.dtype, torch.float32) if is_real else value.dtype)

    return {name: copy_value(value) for name, value in _tensors(model).items()}


@torch.no_grad()
def _load(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, value in _tensors(model).items():
        value.copy_(state[name])
