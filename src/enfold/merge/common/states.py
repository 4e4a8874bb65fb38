"""States: members one by one, their mean, and what may be permuted in them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.dataset import has_examples
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, level_outside
from enfold.merge.common.layers import PRODUCERS, produced_axis
from enfold.symmetry import Symmetry, symmetries
from enfold.symmetry.find import ALIKE, CHANGED

OF_LAYER = re.compile(r"\.?(parametrizations\.weight\.original\d?|weight(_orig|_v)?)$")  # behind a layer's name
EXPECTED = ("they are the network's", "the outputs do not depend", "a part of it is", "it is a sequence", "it numbers")


class UnalignedWarning(UserWarning):
    """Some units, or all, are averaged as they are."""


@torch.no_grad()
def states_of(members: Ensemble) -> list[State]:
    """Each member's own parameters and buffers; views of what the members hold, or of what they expand to."""
    stacked = {name: tensor.detach() for name, tensor in members.expand().items()}
    return [{name: tensor[index] for name, tensor in stacked.items()} for index in range(members.num_members)]


@torch.no_grad()
def mean_of(states: Sequence[State], weights: Sequence[float] | None = None) -> State:
    """The mean; counters and index buffers, which have no mean, are the first state's."""
    found: State = {}
    for name, first in states[0].items():
        if not (first.is_floating_point() or first.is_complex()):
            found[name] = first
        elif weights is None:
            found[name] = torch.stack([state[name] for state in states]).mean(0)
        else:
            found[name] = sum((w * s[name] for w, s in zip(weights, states, strict=True)), torch.zeros_like(first))
    return found


def example_of(data: Data) -> Tensor:
    """Two training inputs as a network sees them."""
    if not has_examples(data.train):
        raise EnfoldError("merging looks at examples of the training part, got none: pass at least one")
    if isinstance(data.train, Split):
        return data.prepare(data.train.inputs[:2])
    for batch in data.train:
        if not isinstance(batch, tuple | list):
            raise EnfoldError(
                f"the training part must yield pairs of inputs and labels, got {type(batch).__name__}: wrap the loader"
            )
        return torch.as_tensor(batch[0][:2])
    raise EnfoldError("the training part must yield batches, got none: pass a DataLoader or a list")


def units_of(network: nn.Module, data: Data, seed: int = 0) -> Symmetry:
    """What may be permuted in the network; a warning tells of what could not be looked at, an error if that is all."""
    with torch.random.fork_rng(devices=[]):  # a loader of the user's own may draw
        example = example_of(data)
    symmetry = symmetries(network, example, seed=seed, logits_only=True)
    reason = why_unaligned(network, symmetry)
    if reason and not symmetry.groups:
        raise EnfoldError(
            f"members are merged where the symmetries of their network are known, but in this {type(network).__name__} "
            f"{reason}: use average or a distillation for it"
        )
    if reason:
        say_unaligned("some units are", reason)
    return symmetry


def why_unaligned(network: nn.Module, symmetry: Symmetry) -> str:
    """What keeps the units of some layer in their order, if it is nothing that every network has; else nothing."""
    if symmetry.note:
        return symmetry.note
    modules = dict(network.named_modules(remove_duplicate=False))
    moved = {axis.name for group in symmetry.groups for axis in group.axes}
    for one in symmetry.fixed:
        layer = modules.get(OF_LAYER.sub("", one.name))
        produced = isinstance(layer, PRODUCERS) and one.axis == produced_axis(layer)
        if one.name not in moved and _is_bare(one.name, modules):  # which axis makes units is not known
            produced = one.reason.startswith("of ")
        if one.reason in (ALIKE, CHANGED) or (produced and not one.reason.startswith(EXPECTED)):
            return f"the units of '{one.name}' are fixed ({one.reason})"
    return ""


def _is_bare(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether it is a weight that a module of the user's own holds."""
    owner, _, key = name.rpartition(".")
    module = modules.get(owner)
    weight = None if module is None else module._parameters.get(key)
    return weight is not None and weight.ndim > 1 and not type(module).__module__.startswith("torch.nn")


def say_unaligned(what: str, reason: str) -> None:
    """Warn, at the line outside of enfold, that units are averaged without having been brought into one order."""
    told = f"{what} averaged as they are, because {reason}: print symmetries(network, example) to see them"
    warnings.warn(told, UnalignedWarning, stacklevel=level_outside())


def require_reference(index: int, num_members: int) -> int:
    """The member whose order the others take, if there is one of that number."""
    if not isinstance(index, int) or not 0 <= index < num_members:
        raise EnfoldError(f"the reference is one of the {num_members} members, got {index}: use 0 to {num_members - 1}")
    return index
