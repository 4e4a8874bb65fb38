"""States of members, their mean, and the hidden units that may be permuted in them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, level_outside
from enfold.merge.common.layers import PRODUCERS, produced_axis
from enfold.symmetry import Symmetry, symmetries
from enfold.symmetry.find import CHANGED, SINGLE_ORDER

OF_LAYER = re.compile(r"\.?(parametrizations\.weight\.original\d?|weight(_orig|_v)?)$")  # behind a layer's name
EXPECTED = ("they are the network's", "the outputs do not depend", "a part of it is", "it is a sequence", "it numbers")


class UnalignedWarning(UserWarning):
    """Some hidden units, or all, are averaged without being aligned."""


@torch.no_grad()
def states_of(members: Ensemble) -> list[State]:
    """Return the parameters and buffers of each member, as views of the tensors that `expand` returns."""
    stacked = {name: tensor.detach() for name, tensor in members.expand().items()}
    return [{name: tensor[index] for name, tensor in stacked.items()} for index in range(members.num_members)]


@torch.no_grad()
def mean_of(states: Sequence[State], weights: Sequence[float] | None = None) -> State:
    """Return the mean of states; counters and index buffers, which have no mean, are those of the first."""
    found: State = {}
    for name, first in states[0].items():
        if not (first.is_floating_point() or first.is_complex()):
            found[name] = first
        elif weights is None:
            found[name] = torch.stack([state[name] for state in states]).mean(0)
        else:
            found[name] = sum((w * s[name] for w, s in zip(weights, states, strict=True)), torch.zeros_like(first))
    return found


def find_units(network: nn.Module, example: Any, seed: int = 0) -> Symmetry:
    """Return the groups of hidden units that may be permuted, with a warning if some units are fixed.

    Args:
        network: The network; it is not modified.
        example: One or two inputs, (B, ...), in the structure that the network takes.
        seed: Seed of the permutations with which groups are verified.

    Raises:
        EnfoldError: If nothing may be permuted although the network has hidden units.
    """
    symmetry = symmetries(network, example, seed=seed, logits_only=True)
    reason = unaligned_reason(network, symmetry)
    if reason and not symmetry.groups:
        raise EnfoldError(
            f"units are matched in networks whose symmetries are known, but in this {type(network).__name__} {reason}: "
            "use enfold.merge.average or enfold.distill"
        )
    if reason:
        warn_unaligned("some units are", reason)
    return symmetry


def unaligned_reason(network: nn.Module, symmetry: Symmetry) -> str:
    """Return why the units of some layer cannot be permuted, or "" if all are, as far as a network allows it."""
    if symmetry.note:
        return symmetry.note
    modules = dict(network.named_modules(remove_duplicate=False))
    moved = {axis.name for group in symmetry.groups for axis in group.axes}
    for one in symmetry.fixed:
        layer = modules.get(OF_LAYER.sub("", one.name))
        produced = isinstance(layer, PRODUCERS) and one.axis == produced_axis(layer)
        if one.name not in moved and _is_bare(one.name, modules):  # which axis makes units is not known
            produced = one.reason.startswith("of ")
        if one.reason in (SINGLE_ORDER, CHANGED) or (produced and not one.reason.startswith(EXPECTED)):
            return f"the units of '{one.name}' are fixed ({one.reason})"
    return ""


def _is_bare(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a weight is held directly by a module that is not a layer of PyTorch."""
    owner, _, key = name.rpartition(".")
    module = modules.get(owner)
    weight = None if module is None else module._parameters.get(key)
    return weight is not None and weight.ndim > 1 and not type(module).__module__.startswith("torch.nn")


def warn_unaligned(what: str, reason: str) -> None:
    """Warn, at the caller's line, that units are averaged without being aligned."""
    message = f"{what} averaged without alignment, because {reason}: print symmetries(network, example) to see them"
    warnings.warn(message, UnalignedWarning, stacklevel=level_outside())
