"""EfficientEnsemble: members that have most parameters in common and own the rest."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from enfold.data import Data
from enfold.engines.base import CannotRun, Engine, EngineName
from enfold.engines.joint import Merged, choose_joint_engine
from enfold.engines.layout import find_owners, stack
from enfold.engines.parameters import Decay, Tree, decay_groups
from enfold.engines.skeleton import State, read_state
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, PartialCoverageWarning, UnsuitableNetwork, level_outside
from enfold.train.batch_norm import TRACKING, reestimate

NormChoice = Literal["own", "shared", "joint"]
"""Batch norm of an efficient ensemble: "own", one per member (EnsembleBN); "shared", common affine parameters, while
every member normalises its own batch and has its own statistics; "joint", one batch norm, which in training normalises
the batches of all members together."""

LOW_COVERAGE = 0.5  # fraction of a network's parameters below which a warning says that members hardly differ


class EfficientEnsemble(Ensemble):
    """M members of which each owns the tensors named in `own`; all other tensors are common to all members.

    Losses are summed over members. The gradient of common tensors is divided by M, so that it is as large as that of a
    single network; the gradient of what a member owns is not.

    Args:
        network: The network that members are made from.
        num_members: The number of members.
        own: The names of the parameters and buffers that every member owns; running statistics are added, so that
            `self.own.state()` has them beside these names.
        engine: How members are run.
        batch_norm: What members have in common in batch norms; see `NormChoice`.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: int,
        own: Collection[str] = (),
        engine: EngineName = "auto",
        *,
        batch_norm: NormChoice = "shared",
    ) -> None:
        super().__init__(network, num_members, engine)
        self.joint = batch_norm == "joint" and num_members > 1 and bool(batch_norm_names(network))
        self._merged: Engine | None = None
        if batch_norm != "joint":
            own = {*own, *batch_norm_names(network, statistics=batch_norm == "shared"), *running_statistics(network)}
        state, layers = read_state(network), find_owners(network, batched_products=False)
        shared = {name: stack([tensor.detach()], layers.get(id(tensor)))[0] for name, tensor in state.items()}
        self.shared = Tree({name: self._convert(name, shared[name]) for name in state if name not in own})
        stacked = {
            name: stack([tensor.detach()] * num_members, layers.get(id(tensor)))
            for name, tensor in state.items()
            if name in own
        }
        self.own = Tree({name: self._convert(name, tensor) for name, tensor in stacked.items()})

    def expand(self) -> State:
        """Return the common tensors, repeated without a copy, and those that members own."""
        shared = {name: tensor.expand(self.num_members, *tensor.shape) for name, tensor in self.shared.state().items()}
        return {**shared, **self.own.state()}

    def _run(self, inputs: Any, *, each: bool) -> Tensor:
        if not (self.joint and self.training):
            return super()._run(inputs, each=each)
        state = self.expand()
        if self._merged is None:
            try:
                own, few = self.differing, inputs[0] if each else inputs
                self._merged = choose_joint_engine(Merged(self.skeleton, own).check(state, few), own, state, few)
            except CannotRun as reason:
                raise EnfoldError(
                    f"batch norms cannot be joint in this network because {reason}: use batch_norm='shared' or 'own'"
                ) from reason
        return self._merged(state, inputs, each)

    @property
    def differing(self) -> set[str]:
        """The names of the tensors in which members may differ."""
        return {name for name, tensor in self.expand().items() if tensor.stride(0) or name in self.own.state()}

    @torch.no_grad()
    def coverage(self) -> float:
        """Return the fraction of the network's parameters in which members may differ."""
        if self.num_members == 1:
            return 1.0
        sizes = {name: self.skeleton.shape(name).numel() for name in self.skeleton.parameters}
        return sum(sizes[name] for name in self.differing & sizes.keys()) / max(1, sum(sizes.values()))

    def warn_if_low_coverage(self) -> None:
        """Warn, and set `notice` for tables, if members differ in less than half of the network's parameters.

        Constructors of methods that are meant to differ in most layers call it last, when all options are stored.
        Methods whose members have few parameters of their own by design (heads, norm layers, low-rank adapters) do not:
        the coverage is in their `repr`.
        """
        coverage = self.coverage()
        options = self.options()
        is_chosen = options.get("include") or options.get("exclude")  # by the user
        if is_chosen or coverage >= LOW_COVERAGE:
            return
        common = self.skeleton.parameters.keys() - self.differing
        largest = max(sorted(common), key=lambda name: self.skeleton.shape(name).numel())
        self.notice = (
            f"members differ in {100 * coverage:.0f} % of the network's parameters only, as "
            f"{type(self).__name__} does not support the layer that contains '{largest}'"
        )
        warnings.warn(
            f"{self.notice}; use DeepEnsemble, or a network of linear, convolution and embedding layers",
            PartialCoverageWarning,
            stacklevel=level_outside(),
        )

    def extra_repr(self) -> str:
        """Return the summary that print(ensemble) shows, with the coverage."""
        return f"{super().extra_repr()}, members differ in {100 * self.coverage():.3g} % of the network's parameters"

    def is_looped(self, inputs: Any) -> bool:
        """Return whether members run one after the other, which a joint batch norm excludes in training."""
        return not (self.joint and self.training) and super().is_looped(inputs)

    @torch.no_grad()
    def reestimate_batch_norm(self, data: Data) -> None:
        """Estimate the statistics of batch norms again, by one pass over the training data for every member.

        Statistics that are common to all members are those of all activations together.
        """
        measured: dict[str, list[Tensor]] = {name: [] for name in running_statistics(self.skeleton.network)}
        for network in self.networks() if measured else ():
            reestimate(network, data)
            state = read_state(network)
            for name, values in measured.items():
                values.append(state[name])
        own, shared = self.own.state(), self.shared.state()
        for name, values in measured.items():
            stacked = torch.stack(values)
            if name in own:
                own[name].copy_(stacked)
            elif not stacked.is_floating_point():
                shared[name].copy_(stacked[0])
            else:
                shared[name].copy_(stacked.mean(0))
                means = measured.get(f"{name.removesuffix('running_var')}running_mean")
                if name.endswith("running_var") and means is not None:
                    shared[name].add_(torch.stack(means).var(0, correction=0))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_merged": None}

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Return the common parameters, with gradients divided by M, and those that members own."""
        shared = [(parameter, parameter.ndim) for parameter in self.shared.parameters()]
        owned = [(parameter, parameter.ndim - 1) for parameter in self.own.parameters()]
        groups = decay_groups(shared, weight_decay, decay, grad_scale=1 / self.num_members)
        return [*groups, *decay_groups(owned, weight_decay, decay, member_axis=True)]


def batch_norm_names(network: nn.Module, statistics: bool = False) -> list[str]:
    """Return the names of the parameters and buffers of batch norms, or only of the buffers, their statistics."""
    return _names_in(network, (_BatchNorm,), parameters=not statistics)


def running_statistics(network: nn.Module) -> list[str]:
    """Return the names of the running statistics of batch norms and instance norms."""
    return _names_in(network, TRACKING, parameters=False)


def _names_in(network: nn.Module, kinds: tuple[type[nn.Module], ...], *, parameters: bool) -> list[str]:
    chosen = {
        id(tensor)
        for module in network.modules()
        if isinstance(module, kinds)
        for tensor in (*(module.parameters(recurse=False) if parameters else ()), *module.buffers(recurse=False))
    }
    return [name for name, tensor in read_state(network).items() if id(tensor) in chosen]


def select_layers(
    network: nn.Module, kinds: tuple[type[nn.Module], ...], include: Sequence[str], exclude: Sequence[str]
) -> dict[str, nn.Module]:
    """Return the layers of these kinds whose names match a pattern of `include` and none of `exclude`, by name.

    Args:
        network: The network.
        kinds: The classes of layers.
        include: Regular expressions; all layers if empty.
        exclude: Regular expressions.

    Raises:
        EnfoldError: If a pattern matches no layer, no layer remains, or a weight is tied or computed from others.
    """
    layers = {name: module for name, module in network.named_modules() if isinstance(module, kinds)}
    for pattern in (*include, *exclude):
        if not any(re.search(pattern, name) for name in layers):
            raise EnfoldError(
                f"include and exclude must match layers, but {pattern!r} matches none of {', '.join(layers)}: change it"
            )
    chosen = {
        name: module
        for name, module in layers.items()
        if (not include or any(re.search(pattern, name) for pattern in include))
        and not any(re.search(pattern, name) for pattern in exclude)
    }
    if not chosen:
        known = ", ".join(kind.__name__ for kind in kinds)
        raise UnsuitableNetwork(
            f"network must contain a layer of a supported kind ({known}), got none: change the network or the patterns"
        )
    for name, module in chosen.items():
        if hasattr(module, "weight") and "weight" not in module._parameters:
            raise EnfoldError(
                f"layers must have a weight parameter, but '{name}' computes its weight from others, as weight norm "
                "does: remove the parametrisation, or exclude the layer"
            )
    refuse_ties(network)
    return chosen


def refuse_ties(network: nn.Module) -> None:
    """Raise an error if parameters are tied: they would be changed twice."""
    seen: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            raise EnfoldError(
                f"network must use every parameter in one place, but '{name}' is tied to '{seen[id(parameter)]}': "
                "untie them, or use DeepEnsemble"
            )
        seen[id(parameter)] = name
