"""DeepEnsemble: M networks of one architecture, initialised and trained independently, whose predictions are averaged.

    p(y | x) = 1/M Σ_m softmax(f(x; θ_m)),      θ_m from its own initialisation and its own order of the data        (1)

B. Lakshminarayanan, A. Pritzel, C. Blundell: Simple and Scalable Predictive Uncertainty Estimation using Deep
Ensembles, NeurIPS 2017, arXiv:1612.01474.

Differs from the paper: no adversarial training. With `weights`, 1/M is w_m, as in Bayesian model averaging and stacking
(`enfold.fit_weights`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.engines.initialization import initialize_member
from enfold.engines.layout import find_owners, stack
from enfold.engines.parameters import Decay, Tree, decay_groups
from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.ensembles.common.checkpoints import load_members
from enfold.errors import EnfoldError, level_outside
from enfold.metrics.weights import Weights, select_weights

Factory = Callable[[], nn.Module]


@checked
class DeepEnsemble(Ensemble):
    """M networks of one architecture that are trained independently; their parameters are stored stacked.

    >>> ensemble = DeepEnsemble([nn.Linear(4, 3), nn.Linear(4, 3)])
    >>> ensemble(torch.zeros(5, 4)).shape
    torch.Size([2, 5, 3])
    >>> DeepEnsemble(lambda: nn.Linear(4, 3), 4).num_members
    4

    Args:
        networks: A list of networks, which are copied; or a network or a function that makes one, from which
            `num_members` new ones are drawn. Member k depends on `seed` and k only: M members are the first M of M + 1.
        num_members: The number of members to draw; the length of the list, if a list is given.
        seed: The seed of the members that are drawn.
        weights: Weights of the members in the mean of their predictions; None for equal weights.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    computes_state = False

    def __init__(
        self,
        networks: Sequence[nn.Module] | nn.Module | Factory,
        num_members: PositiveInt | None = None,
        *,
        seed: int = 0,
        weights: tuple[float, ...] | None = None,
        engine: EngineName = "auto",
    ) -> None:
        members, seeds = _make_networks(networks, num_members, seed)
        states = [read_state(network) for network in members]
        if not states[0]:
            raise EnfoldError(
                f"networks must have parameters to differ in, but {type(members[0]).__name__} has none: "
                "pass networks with layers"
            )
        for index, (network, state) in enumerate(zip(members, states, strict=True)):
            _check_same(members[0], states[0], network, state, index)
        super().__init__(members, len(members), engine)
        self.set_weights(weights)
        self.seed = seed
        self.seeds = seeds  # of each member's initialisation, where members were drawn
        layers = find_owners(members[0], batched_products=engine != "loop")
        self.tree = Tree({name: self._stack(name, states, layers) for name in self.skeleton.names})
        if self.seeds and self.num_members > 1:
            self._warn_if_equal()

    def _stack(self, name: str, states: Sequence[State], layers: Mapping[int, nn.Module]) -> Tensor:
        return self._convert(name, stack([state[name].detach() for state in states], layers.get(id(states[0][name]))))

    @classmethod
    def from_checkpoints(
        cls,
        files: str | Path | Sequence[str | Path],
        network: nn.Module | Factory,
        *,
        key: str | None = None,
        engine: EngineName = "auto",
    ) -> Self:
        """Load members from checkpoints: ``DeepEnsemble.from_checkpoints("runs/*/model.pt", make_net)``.

        Args:
            files: A file, a folder, a pattern or a list of them: safetensors (also in shards); `.pt`, `.pth`, `.bin`
                and `.ckpt` files with tensors below a key such as `state_dict`, with or without a prefix such as
                `model.`; folders of transformers, accelerate, torch.distributed.checkpoint and nnU-Net; adapters of
                peft. Pickled objects are never loaded.
            network: A network of the architecture, or a function that makes one; for adapters, the network with the
                weights of the base.
            key: The key or the prefix of names to read, such as "state_dict_ema" or "student.", if a checkpoint has
                several networks.
            engine: How members are run.

        Raises:
            EnfoldError: If a checkpoint is missing, damaged, ambiguous, or does not fit the network.
        """
        return cls(load_members(files, network, key), engine=engine)

    @classmethod
    def from_options(cls, networks: Sequence[nn.Module], options: dict[str, Any]) -> Self:
        """Make an ensemble of these networks; methods derived from this class are made from the first one."""
        return cls(networks, **options) if cls is DeepEnsemble else super().from_options(networks, options)

    @property
    def weights(self) -> Weights:
        """The weights of the members, `member_weights`."""
        return self.member_weights

    def expand(self) -> State:
        """Return the stored parameters."""
        return self.tree.state()

    @property
    def owns_all_parameters(self) -> bool:
        """Every member owns all of its parameters."""
        return True

    @property
    def has_independent_members(self) -> bool:
        """Members of this class are trained alone; derived classes say so themselves."""
        return type(self) is DeepEnsemble

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Return groups of parameters with a member axis."""
        owned = [(parameter, parameter.ndim - 1) for parameter in self.parameters()]
        return decay_groups(owned, weight_decay, decay, member_axis=True)

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        """Return one member as a network, or several as a `DeepEnsemble`: ``ensemble[0]``, ``ensemble[:3]``."""
        chosen = super().__getitem__(index)
        if not isinstance(chosen, list):
            return chosen
        indices = [index] if isinstance(index, int) else index  # an int gives a network above
        indices = range(self.num_members)[indices] if isinstance(indices, slice) else indices
        return DeepEnsemble(chosen, weights=select_weights(self.weights, indices), engine=self.engine)

    def equal_parameters(self) -> list[str]:
        """Return the names of the parameters that are equal in all members (norm scales often are, before training)."""
        state = self.expand()
        return [name for name in self.skeleton.parameters if bool((state[name] == state[name][:1]).all())]

    def _warn_if_equal(self) -> None:
        names = list(self.skeleton.parameters)
        if names and len(self.equal_parameters()) == len(names):
            warnings.warn(
                f"all {self.num_members} members are equal in every parameter: the function that makes networks "
                "ignores the random seed, or loads the same weights each time; such members only differ by the order "
                "of their data",
                stacklevel=level_outside(),
            )


def _make_networks(
    given: Sequence[nn.Module] | nn.Module | Factory, num_members: int | None, seed: int
) -> tuple[list[nn.Module], tuple[int, ...] | None]:
    """Return the members of a deep ensemble, and the seeds of those that were drawn."""
    if callable(given) and not isinstance(given, nn.ModuleList | Ensemble):
        if num_members is None:
            raise EnfoldError(
                f"num_members must be given to draw members from one {type(given).__name__}, got None: pass "
                "DeepEnsemble(network, num_members), or a list of networks"
            )
        return draw_networks(given, num_members, seed)
    members = list(given)  # type: ignore[arg-type]
    if not members:
        raise EnfoldError("networks must contain at least 1 network, got none: pass a list of networks")
    if num_members not in (None, len(members)):
        raise EnfoldError(
            f"num_members must be the number of networks in the list, got {num_members} for {len(members)} networks: "
            "leave num_members out"
        )
    return members, None


def draw_networks(network: nn.Module | Factory, num_members: int, seed: int) -> tuple[list[nn.Module], tuple[int, ...]]:
    """Return `num_members` networks, made by a function or re-initialised from a network, and the seed of each."""
    pairs = [initialize_member(network, seed, index) for index in range(num_members)]
    return [network for network, _ in pairs], tuple(own for _, own in pairs)


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
                "requires_grad to the same value in all networks"
            )
        for what, ours_is, theirs_is, fix in (
            ("shapes", tuple(tensor.shape), tuple(other.shape), remedy),
            ("types of numbers", tensor.dtype, other.dtype, f"convert it with network.to({tensor.dtype})"),
            ("device", tensor.device, other.device, f'move it with network.to("{tensor.device}")'),
        ):
            if ours_is != theirs_is:
                raise EnfoldError(
                    f"all members must have the same {what}, but '{name}' is {ours_is} in member 0 and {theirs_is} in "
                    f"member {index}: {fix}"
                )


def _kind(module: nn.Module) -> str:
    """Return the class and, of torch's own layers, the settings: a stride or a dropout rate is not in the shapes."""
    kind = type(module)
    text = module.extra_repr() if kind.__module__.startswith("torch.nn.modules.") else ""
    settings = f"({text})" if text else ""
    return f"a {kind.__qualname__}{settings}"
