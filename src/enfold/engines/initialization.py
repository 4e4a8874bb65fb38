"""Initialisation of members: networks that are made or re-initialised with seeds of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from enfold.engines.copying import copy_network
from enfold.errors import EnfoldError, InitialisationWarning, level_outside
from enfold.seeds import derive, seed_scope

FRESH, TRAINED = 2.0, 8.0  # ratios of standard deviations, to that of the layer's initialisation, that are normal
ENOUGH = 32  # values for an estimate of a standard deviation


def initialize_member(
    network: nn.Module | Callable[[], nn.Module], seed: int, index: int, *, trained: bool | None = None
) -> tuple[nn.Module, int]:
    """Return member `index` and its seed: the result of the factory, or a re-initialised copy of the network.

    Args:
        network: A network or a function that makes one.
        seed: The seed of the ensemble, from which the seed of the member is derived.
        index: The index of the member.
        trained: Whether the network is trained; None: see `reinitialise`.
    """
    own = derive(seed, "init", index)
    with seed_scope(own):
        made = reinitialise(copy_network(network), trained) if isinstance(network, nn.Module) else call_factory(network)
    return made, own


def call_factory(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return the network that a factory makes; raises EnfoldError if it is none."""
    made: object = factory()
    if not isinstance(made, nn.Module):
        raise EnfoldError(
            f"a network factory must return an nn.Module, got {type(made).__name__}: return the network itself"
        )
    return made


def make_blank(network: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return a network into which values are loaded: a copy, or a new one, without changing the random state."""
    if isinstance(network, nn.Module):
        return copy_network(network)
    with torch.random.fork_rng(devices=[]):
        return call_factory(network)


@torch.no_grad()
def reinitialise(network: nn.Module, trained: bool | None = None, *, keep_scale: bool = True) -> nn.Module:
    """Initialise all trainable parameters again, in place.

    A module with `reset_parameters` (or attention's `_reset_parameters`) initialises its own parameters, after its
    submodules, so that an outer module may override them. A parameter that none of them initialises is drawn from a
    normal distribution with its current mean and standard deviation if its values vary, and is not changed if they are
    constant (a zero class token, a unit gain). Frozen parameters are not changed.

    A package may initialise layers in another way than the layers themselves. Zeros therefore stay zeros, and a matrix
    whose standard deviation is not within a factor of 2 of the layer's initialisation is drawn with its current mean
    and standard deviation; a warning names it, because training may also be the reason.

    Args:
        network: The network, modified in place.
        trained: Whether the network is trained, for which the factor is 8; None: if it has gradients or batch
            statistics.
        keep_scale: Whether scales are preserved in this way; false for a network whose layers were changed.

    Returns:
        The network.
    """
    given = {each: each.clone() for each in network.parameters() if each.requires_grad and keep_scale}
    factor = TRAINED if (is_trained(network) if trained is None else trained) else FRESH
    frozen = [(parameter, parameter.clone()) for parameter in network.parameters() if not parameter.requires_grad]
    versions = {parameter: parameter._version for parameter in network.parameters()}
    fresh: set[Tensor] = set()
    for module in dict.fromkeys(_inside_out(network)):  # a module that appears twice is initialised once
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
            fresh.update(module.parameters(recurse=False))
    for parameter, version in versions.items():
        if parameter not in fresh and parameter._version == version:
            _redraw(parameter)
    names = {parameter: name for name, parameter in network.named_parameters()}
    scaled = [names[parameter] for parameter, before in given.items() if _restore_scale(parameter, before, factor)]
    for parameter, values in frozen:
        parameter.copy_(values)
    if scaled:
        _warn_of_scale(scaled)
    return network


def is_trained(network: nn.Module) -> bool:
    """Return whether gradients or batch statistics show that a network was trained."""
    counts = (buffer for name, buffer in network.named_buffers() if name.endswith("num_batches_tracked"))
    return any(bool(count > 0) for count in counts) or any(p.grad is not None for p in network.parameters())


def _restore_scale(parameter: Tensor, before: Tensor, factor: float) -> bool:
    """Draw a parameter with its former scale if that was clearly different; return whether it was."""
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
        f"new members are initialised by the layers of the network, but '{names[0]}'{others} had a clearly different "
        "scale, by another initialisation or by training, and was drawn with that scale: pass a function that makes "
        "the network",
        InitialisationWarning,
        stacklevel=level_outside(),
    )


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules after their submodules, which is usually the order in which they were initialised."""
    for child in module.children():
        yield from _inside_out(child)
    yield module


def _redraw(parameter: Tensor) -> None:
    if parameter.numel() > 1 and parameter.is_floating_point():
        spread, mean = torch.std_mean(parameter.float())
        if spread > 0:
            parameter.normal_(float(mean), float(spread))
