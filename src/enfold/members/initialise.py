"""Fresh starts: one network, made or re-initialised with a seed of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.members.copying import copied
from enfold.seeds import derive, seeded


def initialised(network: nn.Module | Callable[[], nn.Module], seed: int, index: int) -> tuple[nn.Module, int]:
    """Member `index` and its seed: the factory is called, or a copy of the network re-initialised, under that seed."""
    own = derive(seed, "init", index)
    with seeded(own):
        made = reinitialise(copied(network)) if isinstance(network, nn.Module) else made_by(network)
    return made, own


def made_by(factory: Callable[[], nn.Module]) -> nn.Module:
    """What the factory returns, if it is a network."""
    made: object = factory()
    if not isinstance(made, nn.Module):
        raise EnfoldError(
            f"a network factory must return an nn.Module, got {type(made).__name__}: return the network itself"
        )
    return made


def blank(network: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A network to load values into: a copy, or a new one whose own draws leave the random state as it was."""
    if isinstance(network, nn.Module):
        return copied(network)
    with torch.random.fork_rng(devices=[]):
        return made_by(network)


@torch.no_grad()
def reinitialise(network: nn.Module) -> nn.Module:
    """Draw all trainable parameters anew, in place.

    A module with `reset_parameters` (or attention's `_reset_parameters`) draws its own, after the modules inside it,
    because an outer one knows better. A raw parameter that none of them has drawn is drawn from a normal distribution
    with its current mean and spread if its values vary, and kept if they are constant (a zero class token, a unit
    gain). What is frozen is kept: it was put there, not drawn.
    """
    frozen = [(parameter, parameter.clone()) for parameter in network.parameters() if not parameter.requires_grad]
    versions = {parameter: parameter._version for parameter in network.parameters()}
    drawn: set[Tensor] = set()
    for module in dict.fromkeys(_inside_out(network)):  # a module that appears twice draws once
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
            drawn.update(module.parameters(recurse=False))
    for parameter, version in versions.items():
        if parameter not in drawn and parameter._version == version:
            _redraw(parameter)
    for parameter, values in frozen:
        parameter.copy_(values)
    return network


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    """A module after the modules in it, in the order in which they are usually made and so draw their first values."""
    for part in module.children():
        yield from _inside_out(part)
    yield module


def _redraw(parameter: Tensor) -> None:
    if parameter.numel() > 1 and parameter.is_floating_point():
        spread, mean = torch.std_mean(parameter.float())
        if spread > 0:
            parameter.normal_(float(mean), float(spread))
