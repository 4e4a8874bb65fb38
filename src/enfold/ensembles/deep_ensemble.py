"""DeepEnsemble: a deep ensemble. Every member owns all its parameters; they are stored stacked under their own names.

B. Lakshminarayanan, A. Pritzel, C. Blundell: Simple and Scalable Predictive Uncertainty Estimation using Deep
Ensembles, NeurIPS 2017, arXiv:1612.01474.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from enfold.engines.base import EngineName
from enfold.engines.groups import Decay, decay_groups
from enfold.engines.initialization import initialised
from enfold.engines.layout import owners, stack
from enfold.engines.skeleton import State, read_state
from enfold.engines.tree import Tree
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.io.checkpoints import load_into, matching_files


class DeepEnsemble(Ensemble):
    """M networks of one architecture, their parameters stacked; the networks given are copied and left untouched.

    >>> members = DeepEnsemble([nn.Linear(4, 3), nn.Linear(4, 3)])
    >>> members(torch.zeros(5, 4)).shape
    torch.Size([2, 5, 3])
    """

    expands = False

    def __init__(self, networks: Sequence[nn.Module], engine: EngineName = "auto") -> None:
        given: object = networks
        if isinstance(given, nn.Module) and not isinstance(given, nn.ModuleList | Ensemble):
            raise EnfoldError(
                f"members are given as a list of networks, got one {type(given).__name__}: pass [network, ...], or "
                "draw new ones like it with DeepEnsemble.make(network, num_members)"
            )
        networks = list(networks)
        if not networks:
            raise EnfoldError("an ensemble must have at least 1 member, got none: pass a list of networks")
        states = [read_state(network) for network in networks]
        if not states[0]:
            raise EnfoldError(
                f"members must have parameters to differ in, but {type(networks[0]).__name__} has none: "
                "pass a network with layers"
            )
        for index, (network, state) in enumerate(zip(networks, states, strict=True)):
            _check_same(networks[0], states[0], network, state, index)
        super().__init__(networks, len(networks), engine)
        self.seeds: tuple[int, ...] | None = None  # of the members' initialisation, where they were made from seeds
        layers = owners(networks[0], batched_products=engine != "loop")
        self.tree = Tree({name: self._stacked(name, states, layers) for name in self.skeleton.names})

    def _stacked(self, name: str, states: Sequence[State], layers: Mapping[int, nn.Module]) -> Tensor:
        return self._stored(name, stack([state[name].detach() for state in states], layers.get(id(states[0][name]))))

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
        """Members from checkpoint files, a list or a pattern: ``DeepEnsemble.load("runs/*/model.pt", make_net)``.

        Reads safetensors, and `.pt` files that hold tensors only (no pickled object is ever loaded), also wrapped
        under a key such as `state_dict` or with a `module.` prefix.
        """
        return cls([load_into(network, path) for path in matching_files(files)], engine)

    def expand(self) -> State:
        """What is stored is what the members are."""
        return self.tree.state()

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Every parameter carries the member axis, so all of training can be told apart by member."""
        owned = [(parameter, parameter.ndim - 1) for parameter in self.parameters()]
        return decay_groups(owned, weight_decay, decay, member_axis=True)

    def equal_parameters(self) -> list[str]:
        """Names of the parameters that are equal in all members (norm scales usually are, before training)."""
        state = self.expand()
        return [name for name in self.skeleton.parameters if bool((state[name] == state[name][:1]).all())]

    def extended(self, network: nn.Module) -> DeepEnsemble:
        """These members and one more, as a new object."""
        return DeepEnsemble([*self.networks(), network], self.engine_name)


def as_ensemble(models: Ensemble | Sequence[nn.Module]) -> Ensemble:
    """Return an ensemble unchanged, or a `DeepEnsemble` of a list of networks.

    Args:
        models: An ensemble, or networks of one architecture.

    Raises:
        EnfoldError: If `models` is a single network, or the networks differ in architecture.
    """
    return models if isinstance(models, Ensemble) else DeepEnsemble(models)


def _check_same(first: nn.Module, expected: State, network: nn.Module, state: State, index: int) -> None:
    remedy = "use MixedEnsemble for networks of different architectures"
    ours, theirs = dict(first.named_modules()), dict(network.named_modules())
    for name in [*ours, *theirs]:
        kinds = [_kind(modules[name]) if name in modules else "nothing" for modules in (ours, theirs)]
        if kinds[0] != kinds[1]:
            where = f" in '{name}'" if name else ""
            raise EnfoldError(
                f"all members must be of one architecture, but{where} member 0 has {kinds[0]} and member {index} "
                f"{kinds[1]}: {remedy}"
            )
    unequal = sorted(expected.keys() ^ state.keys())
    if unequal:
        raise EnfoldError(
            f"all members must have the same parameters, but member {index} differs in '{unequal[0]}': {remedy}"
        )
    for name, tensor in expected.items():
        other = state[name]
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad != other.requires_grad:
            raise EnfoldError(
                f"all members must train the same parameters, but '{name}' is "
                f"{'trained' if tensor.requires_grad else 'frozen'} in member 0 and not in member {index}: set its "
                "requires_grad alike in all networks"
            )
        for what, ours_is, theirs_is, mend in (
            ("shapes", tuple(tensor.shape), tuple(other.shape), remedy),
            ("types of numbers", tensor.dtype, other.dtype, f"convert it with network.to({tensor.dtype})"),
            ("device", tensor.device, other.device, f'move it with network.to("{tensor.device}")'),
        ):
            if ours_is != theirs_is:
                raise EnfoldError(
                    f"all members must have the same {what}, but '{name}' is {ours_is} in member 0 and {theirs_is} in "
                    f"member {index}: {mend}"
                )


def _kind(module: nn.Module) -> str:
    """The class, and for torch's own layers their settings: a stride or a dropout rate leaves no trace in a shape."""
    kind = type(module)
    said = module.extra_repr() if kind.__module__.startswith("torch.nn.modules.") else ""
    settings = f"({said})" if said else ""
    return f"a {kind.__qualname__}{settings}"
