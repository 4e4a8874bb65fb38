"""Stacked: a deep ensemble. Every member owns all its parameters; they are stored stacked under their own names.

B. Lakshminarayanan, A. Pritzel, C. Blundell: Simple and Scalable Predictive Uncertainty Estimation using Deep
Ensembles, NeurIPS 2017, arXiv:1612.01474.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.members.base import Members
from enfold.members.checkpoints import load_into, matching_files
from enfold.members.engines import EngineName
from enfold.members.groups import Decay, decay_groups
from enfold.members.initialise import initialised
from enfold.members.skeleton import Place, State, places, read_state


class Stacked(Members):
    """M networks of one architecture, their parameters stacked; the networks given are copied and left untouched.

    >>> members = Stacked([nn.Linear(4, 3), nn.Linear(4, 3)])
    >>> members(torch.zeros(5, 4)).shape
    torch.Size([2, 5, 3])
    """

    def __init__(self, networks: Sequence[nn.Module], engine: EngineName = "auto") -> None:
        if not networks:
            raise EnfoldError("an ensemble must have at least 1 member, got none: pass a list of networks")
        states = [read_state(network) for network in networks]
        for index, (network, state) in enumerate(zip(networks, states, strict=True)):
            _check_same(networks[0], states[0], network, state, index)
        super().__init__(networks[0], len(networks), engine)
        self.seeds: tuple[int, ...] | None = None  # of the members' initialisation, where they were made from seeds
        self.tree = nn.Module()
        for name in self.skeleton.names:
            stacked = _stack([state[name].detach() for state in states])
            if name in self.skeleton.parameters:
                trainable = name in self.skeleton.trainable
                _plant(self.tree, name, nn.Parameter(stacked, requires_grad=trainable))
            else:
                _plant(self.tree, name, stacked)
        self._find()

    @classmethod
    def make(
        cls,
        network: nn.Module | Callable[[], nn.Module],
        num_members: int,
        *,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> Self:
        """M members from a factory, or re-initialised from a network, each with its own seed.

        Member k depends on `seed` and k alone, so M members are the first M of M + 1.
        """
        if num_members < 1:
            raise EnfoldError(f"an ensemble must have at least 1 member, got {num_members}: pass num_members >= 1")
        networks, seeds = zip(*(initialised(network, seed, index) for index in range(num_members)), strict=True)
        members = cls(networks, engine)
        members.seeds = seeds
        names = list(members.skeleton.parameters)
        if num_members > 1 and names and len(members.equal_parameters()) == len(names):
            warnings.warn(
                f"all {num_members} members are equal, parameter by parameter: the factory ignores the random seed, "
                "or loads the same weights each time; members that start equal only differ by their data order",
                stacklevel=2,
            )
        return members

    @classmethod
    def load(
        cls,
        files: str | Path | Sequence[str | Path],
        network: nn.Module | Callable[[], nn.Module],
        engine: EngineName = "auto",
    ) -> Self:
        """Members from checkpoint files, given as a list or a pattern: ``Stacked.load("runs/*/model.pt", make_net)``.

        Reads safetensors, and `.pt` files that hold tensors only (no pickled object is ever loaded), also wrapped
        under a key such as `state_dict` or with a `module.` prefix.
        """
        return cls([load_into(network, path) for path in matching_files(files)], engine)

    def _find(self) -> None:
        parameters, buffers = places(self.tree)
        self._where: dict[str, Place] = {name: where[0] for name, where in {**parameters, **buffers}.items()}

    def expand(self) -> State:
        """What is stored is what the members are."""
        return {name: held[key] for name, (held, key) in self._where.items()}  # type: ignore[misc]

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Every parameter carries the member axis, so all of training can be told apart by member."""
        owned = [(parameter, parameter.ndim - 1) for parameter in self.parameters()]
        return decay_groups(owned, weight_decay, decay, member_axis=True)

    def equal_parameters(self) -> list[str]:
        """Names of the parameters that are equal in all members (norm scales usually are, before training)."""
        state = self.expand()
        return [name for name in self.skeleton.parameters if bool((state[name] == state[name][:1]).all())]

    def extended(self, network: nn.Module) -> Stacked:
        """These members and one more, as a new object."""
        return Stacked([*self.networks(), network], self.engine_name)

    def __deepcopy__(self, memo: dict[int, object]) -> Stacked:
        copied = Stacked(self.networks(), self.engine_name)
        copied.seeds = self.seeds
        return copied.train(self.training)


def _stack(tensors: list[Tensor]) -> Tensor:
    """(M, ...); convolution kernels keep channels-last inside, where a CPU convolves fastest."""
    if tensors[0].ndim == 4:
        tensors = [tensor.contiguous(memory_format=torch.channels_last) for tensor in tensors]
        stacked = torch.stack([tensor.permute(0, 2, 3, 1) for tensor in tensors])
        return stacked.permute(0, 1, 4, 2, 3)
    return torch.stack(tensors)


def _plant(tree: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a tensor under a dotted name, in containers that mirror the network's own modules."""
    *path, key = name.split(".")
    for part in path:
        tree = tree._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        tree._parameters[key] = tensor
    else:
        tree._buffers[key] = tensor


def _check_same(first: nn.Module, expected: State, network: nn.Module, state: State, index: int) -> None:
    remedy = "use Mixed for networks of different architectures"
    if type(network) is not type(first):
        raise EnfoldError(
            f"all members must be of one class, but member 0 is a {type(first).__name__} and member {index} a "
            f"{type(network).__name__}: {remedy}"
        )
    unequal = sorted(expected.keys() ^ state.keys())
    if unequal:
        raise EnfoldError(
            f"all members must have the same parameters, but member {index} differs in '{unequal[0]}': {remedy}"
        )
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape:
            raise EnfoldError(
                f"all members must have the same shapes, but '{name}' is {tuple(tensor.shape)} in member 0 and "
                f"{tuple(state[name].shape)} in member {index}: {remedy}"
            )
