"""Fresh starts: one network, made or re-initialised with a seed of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from enfold.engines.copying import copied
from enfold.errors import EnfoldError, InitialisationWarning, level_outside
from enfold.seeds import derive, seeded

FRESH, TRAINED = 2.0, 8.0  # factors between a matrix's spread and what its layer draws that say nothing
ENOUGH = 32  # values for a spread to be known


def initialised(
    network: nn.Module | Callable[[], nn.Module], seed: int, index: int, *, trained: bool | None = None
) -> tuple[nn.Module, int]:
    """Member `index` and its seed: the factory is called, or a copy of the network re-initialised, under that seed."""
    own = derive(seed, "init", index)
    with seeded(own):
        made = reinitialise(copied(network), trained) if isinstance(network, nn.Module) else made_by(network)
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
def reinitialise(network: nn.Module, trained: bool | None = None, *, keep_scale: bool = True) -> nn.Module:
    """Draw all trainable parameters anew, in place.

    A module with `reset_parameters` (or attention's `_reset_parameters`) draws its own, after the modules inside it,
    because an outer one knows better. A raw parameter that none of them has drawn is drawn from a normal distribution
    with its current mean and spread if its values vary, and kept if they are constant (a zero class token, a unit
    gain). What is frozen is kept: it was put there, not drawn.

    A package may start its layers otherwise than they start themselves. Zeros therefore stay zeros, and a matrix whose
    spread is not within a factor of 2 of what its layer draws is drawn with the mean and spread it has; training may
    have made it so, which cannot be known, so a warning names it. In a network that is known to be `trained` (None: if
    it holds gradients or statistics of batches) the factor is 8. Without `keep_scale`, layers draw as they do
    themselves: of a network whose layers were changed, values tell nothing.
    """
    given = {each: each.clone() for each in network.parameters() if each.requires_grad and keep_scale}
    factor = TRAINED if (is_trained(network) if trained is None else trained) else FRESH
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
    names = {parameter: name for name, parameter in network.named_parameters()}
    kept = [names[parameter] for parameter, before in given.items() if _keep_scale(parameter, before, factor)]
    for parameter, values in frozen:
        parameter.copy_(values)
    if kept:
        _warn_of_scale(kept)
    return network


def is_trained(network: nn.Module) -> bool:
    """Tell whether a network shows that it was trained; one that does not may have been."""
    counts = (buffer for name, buffer in network.named_buffers() if name.endswith("num_batches_tracked"))
    return any(bool(count > 0) for count in counts) or any(p.grad is not None for p in network.parameters())


def _keep_scale(parameter: Tensor, before: Tensor, factor: float) -> bool:
    """Give a parameter that was drawn the scale it had before if that was clearly another; tell whether it was."""
    if not parameter.is_floating_point() or torch.equal(parameter, before):
        return False
    if not bool(before.any()):
        parameter.zero_()
        return False
    if parameter.ndim < 2 or parameter.numel() < ENOUGH:
        return False
    spreads = [float(tensor.float().std()) for tensor in (parameter, before)]
    if not all(spreads) or 1 / factor <= spreads[1] / spreads[0] <= factor:
        return False
    parameter.normal_(float(before.float().mean()), spreads[1])
    return True


def _warn_of_scale(names: list[str]) -> None:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    warnings.warn(
        f"new members are drawn as the layers of a network start, but '{names[0]}'{others} had clearly another scale, "
        "by its own initialisation or by training, and was drawn with that: pass a function that makes the network",
        InitialisationWarning,
        stacklevel=level_outside(),
    )


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
