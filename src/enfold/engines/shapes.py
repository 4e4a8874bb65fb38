"""Inputs that a network cannot take: torch's own error, beside the shape that was given and what the network wants."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError, WrongShape

ABOUT_SHAPES = re.compile(r"shape|size|dimension|channels|\dD\b", re.IGNORECASE)
AXES: dict[type[nn.Module], str] = {
    nn.Conv1d: "length",
    nn.Conv2d: "height, width",
    nn.Conv3d: "depth, height, width",
}


def refuse_shape(model: nn.Module, inputs: Tensor, error: Exception) -> None:
    """Raise one sentence from the error of a first pass, if it is about shapes; any other is left to be raised."""
    if isinstance(error, EnfoldError | torch.OutOfMemoryError) or not ABOUT_SHAPES.search(str(error)):
        return
    codes = getattr(model, "codes", None)  # of an ensemble
    network = codes[0].network if codes else model
    given, said = tuple(inputs.shape[1:]), " ".join(str(error).split())
    raise WrongShape(
        f"a network must take the inputs it is given, but {type(network).__name__}{_wanted(network)} fails on inputs "
        f"of shape {given} ({type(error).__name__}: {said}): change the network, or the shape of the data"
    ) from error


def _wanted(network: nn.Module) -> str:
    """What the first layer is made for, where that can be told."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            return f", whose first layer takes {module.in_features} features,"
        axes = AXES.get(type(module))
        if axes is not None:
            return f", whose first layer takes ({module.in_channels}, {axes}),"
    return ""
