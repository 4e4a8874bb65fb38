"""Fresh starts: one network, made or re-initialised with a seed of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.seeds import derive


def initialised(network: nn.Module | Callable[[], nn.Module], seed: int, index: int) -> tuple[nn.Module, int]:
    """Member `index` and its seed: the factory is called, or a copy of the network re-initialised, under that seed."""
    own = derive(seed, "init", index)
    with torch.random.fork_rng():
        torch.manual_seed(own)
        if isinstance(network, nn.Module):
            made: object = reinitialise(copy.deepcopy(network))
        else:
            made = network()
    if not isinstance(made, nn.Module):
        raise EnfoldError(
            f"a network factory must return an nn.Module, got {type(made).__name__}: return the network itself"
        )
    return made, own


@torch.no_grad()
def reinitialise(network: nn.Module) -> nn.Module:
    """Draw all parameters anew, in place.

    A module with `reset_parameters` (or attention's `_reset_parameters`) draws its own. A raw parameter of a module
    without one is drawn from a normal distribution with its current mean and spread if its values vary, and kept if
    they are constant (a zero class token, a unit gain).
    """
    covered: set[int] = set()
    for module in network.modules():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
            covered.update(id(parameter) for parameter in module.parameters(recurse=False))
    for parameter in network.parameters():
        if id(parameter) not in covered:
            _redraw(parameter)
    return network


def _redraw(parameter: Tensor) -> None:
    if parameter.numel() > 1 and parameter.is_floating_point():
        spread, mean = torch.std_mean(parameter.float())
        if spread > 0:
            parameter.normal_(float(mean), float(spread))
