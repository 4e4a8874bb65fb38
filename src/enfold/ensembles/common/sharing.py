"""What every share keeps to: members that use the network's own parameters, but for those that each one owns."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from enfold.data import Data
from enfold.engines.base import Engine, EngineName
from enfold.engines.groups import Decay, decay_groups
from enfold.engines.layout import owners, stack
from enfold.engines.merged import Merged
from enfold.engines.program import CannotRun
from enfold.engines.side_by_side import preferred
from enfold.engines.skeleton import State, read_state
from enfold.engines.tree import Tree
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, PartialCoverageWarning, level_outside
from enfold.train import Objective, TrainConfig, fit
from enfold.train.batch_norm import TRACKING, reestimate

NormChoice = Literal["own", "shared", "joint"]
"""Batch norm of members that share: all of it each member's own (EnsembleBN); the affine parameters shared, while each
member normalises its own batch and so has its own statistics; or one for all, which in training normalises the
members' batches together."""


HALF = 0.5  # of a network's parameters: where members differ in less, the user is told


class Share(ABC):
    """A way to hold or draw M members; subclasses are frozen dataclasses whose fields are the hyper-parameters.

    Most methods say only what their members are. Where training differs from the plan they change the plan, give an
    objective, let the model follow its training (`enfold.train.Follower`), or train in their own way.
    """

    num_members: int

    @property
    def effort(self) -> float:
        """How many times the work of training the model once a whole training is."""
        return 1.0

    @property
    def wants_trained(self) -> bool:
        """Whether the network given should be a trained one, of which the method trains little."""
        return False

    @abstractmethod
    def __call__(self, network: nn.Module) -> nn.Module:
        """A predictor of M members that starts from the network, which is left untouched."""

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """The plan by which this method trains, given the one that a plain network would be trained by."""
        return plan

    def objective(self, plan: TrainConfig) -> Objective | None:
        """What is minimised; None is the cross-entropy of each member."""
        return None

    def train(
        self,
        network: nn.Module,
        data: Data,
        plan: TrainConfig | None = None,
        *,
        checkpoint: Path | None = None,
        title: str | None = None,
        quiet: bool = False,
    ) -> nn.Module:
        """The members, trained from the network, which is left untouched."""
        model = self(network)
        fit(model, data, config=plan, checkpoint=checkpoint, title=title or type(self).__name__, quiet=quiet)
        return model


class Sharing(Ensemble):
    """M members of which each owns the tensors named in `own` and shares all others.

    Losses are summed over members; the gradient of what is shared is divided by M, so that it has the size of one
    network's, and what a member owns gets its gradient whole.
    """

    notice: str = ""  # what tables tell of them

    def __init__(
        self,
        network: nn.Module,
        num_members: int,
        own: Collection[str] = (),
        engine: EngineName = "auto",
        *,
        batch_norm: NormChoice = "shared",
    ) -> None:
        if batch_norm not in get_args(NormChoice):
            choices = ", ".join(get_args(NormChoice))
            raise EnfoldError(f"batch norm must be one of {choices}, got {batch_norm!r}: choose one")
        super().__init__(network, num_members, engine)
        self.joint = batch_norm == "joint" and num_members > 1 and bool(batch_norm_names(network))
        self._merged: Engine | None = None
        if batch_norm != "joint":
            own = {*own, *batch_norm_names(network, statistics=batch_norm == "shared"), *running_statistics(network)}
        state, layers = read_state(network), owners(network, batched_products=False)
        shared = {name: stack([tensor.detach()], layers.get(id(tensor)))[0] for name, tensor in state.items()}
        self.shared = Tree({name: self._stored(name, shared[name]) for name in state if name not in own})
        stacked = {
            name: stack([tensor.detach()] * num_members, layers.get(id(tensor)))
            for name, tensor in state.items()
            if name in own
        }
        self.own = Tree({name: self._stored(name, tensor) for name, tensor in stacked.items()})

    def expand(self) -> State:
        """What is shared, seen M times without a copy, and what is owned."""
        shared = {name: tensor.expand(self.num_members, *tensor.shape) for name, tensor in self.shared.state().items()}
        return {**shared, **self.own.state()}

    def _run(self, inputs: Tensor, *, each: bool) -> Tensor:
        if not (self.joint and self.training):
            return super()._run(inputs, each=each)
        state = self.expand()
        if self._merged is None:
            try:
                own, few = self.differing, inputs[0] if each else inputs
                self._merged = preferred(Merged(self.skeleton, own).passed(state, few), own, state, few)
            except CannotRun as reason:
                raise EnfoldError(
                    f"batch norms cannot be joint in this network because {reason}: use batch_norm: shared or own"
                ) from reason
        return self._merged(state, inputs, each)

    @property
    def differing(self) -> set[str]:
        """The names of the tensors in which members may differ."""
        return {name for name, tensor in self.expand().items() if tensor.stride(0) or name in self.own.state()}

    @torch.no_grad()
    def covered(self) -> float:
        """Return the share of the network's parameters in which members may differ."""
        if self.num_members == 1:
            return 1.0
        sizes = {name: self.skeleton.shape(name).numel() for name in self.skeleton.parameters}
        return sum(sizes[name] for name in self.differing & sizes.keys()) / max(1, sum(sizes.values()))

    def report_coverage(self) -> None:
        """Warn, and keep a notice for tables, if members share more than half of what they were to differ in."""
        covered = self.covered()
        chosen = any(getattr(self.share, name, ()) for name in ("include", "exclude"))  # by the user
        if chosen or covered >= HALF:
            return
        shared = self.skeleton.parameters.keys() - self.differing
        largest = max(sorted(shared), key=lambda name: self.skeleton.shape(name).numel())
        self.notice = (
            f"members differ in {100 * covered:.0f} % of the network's parameters and share the rest, as "
            f"{type(self.share).__name__} does not know the layer that holds '{largest}'"
        )
        warnings.warn(
            f"{self.notice}; use DeepEnsemble, or a network of linear, convolution and embedding layers",
            PartialCoverageWarning,
            stacklevel=level_outside(),
        )

    def extra_repr(self) -> str:
        """Shown by print(members), with the share of the network in which members may differ."""
        return f"{super().extra_repr()}, members differ in {100 * self.covered():.3g} % of the network's parameters"

    def looped(self, inputs: Tensor) -> bool:
        """Not where a batch norm sees all members together."""
        return not (self.joint and self.training) and super().looped(inputs)

    @torch.no_grad()
    def reestimate_batch_norm(self, data: Data) -> None:
        """Measure the statistics of batch norms anew, each member's by its own pass over the training part.

        Statistics that are one for all are those of the members' activations put together.
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
        """What is shared with its gradient divided by M, and what members own."""
        shared = [(parameter, parameter.ndim) for parameter in self.shared.parameters()]
        owned = [(parameter, parameter.ndim - 1) for parameter in self.own.parameters()]
        groups = decay_groups(shared, weight_decay, decay, grad_scale=1 / self.num_members)
        return [*groups, *decay_groups(owned, weight_decay, decay, member_axis=True)]


def batch_norm_names(network: nn.Module, statistics: bool = False) -> list[str]:
    """The names of all parameters and buffers of batch norms, or of the buffers alone, which are their statistics."""
    return _names_in(network, (_BatchNorm,), parameters=not statistics)


def running_statistics(network: nn.Module) -> list[str]:
    """The names of the statistics that batch norms and instance norms keep: each member has its own."""
    return _names_in(network, TRACKING, parameters=False)


def _names_in(network: nn.Module, kinds: tuple[type[nn.Module], ...], *, parameters: bool) -> list[str]:
    chosen = {
        id(tensor)
        for module in network.modules()
        if isinstance(module, kinds)
        for tensor in (*(module.parameters(recurse=False) if parameters else ()), *module.buffers(recurse=False))
    }
    return [name for name, tensor in read_state(network).items() if id(tensor) in chosen]


def chosen_layers(
    network: nn.Module, kinds: tuple[type[nn.Module], ...], include: Sequence[str], exclude: Sequence[str]
) -> dict[str, nn.Module]:
    """The layers of these kinds whose names match a pattern of `include` and none of `exclude` (regular expressions).

    A pattern that matches no layer is an error, and so is a layer whose weight is tied to another's.
    """
    include, exclude = ((given,) if isinstance(given, str) else given for given in (include, exclude))
    layers = {name: module for name, module in network.named_modules() if isinstance(module, kinds)}
    for pattern in (*include, *exclude):
        if not any(re.search(pattern, name) for name in layers):
            raise EnfoldError(
                f"a pattern must match a layer, but {pattern!r} matches none of {', '.join(layers)}: change it"
            )
    chosen = {
        name: module
        for name, module in layers.items()
        if (not include or any(re.search(pattern, name) for pattern in include))
        and not any(re.search(pattern, name) for pattern in exclude)
    }
    if not chosen:
        known = ", ".join(kind.__name__ for kind in kinds)
        raise EnfoldError(
            f"a share needs layers of a kind it knows ({known}), got none: give another network or pattern"
        )
    for name, module in chosen.items():
        if hasattr(module, "weight") and "weight" not in module._parameters:
            raise EnfoldError(
                f"a share needs layers that hold their weight, but '{name}' computes it from others, as weight norm "
                "does: remove the parametrisation, or exclude the layer"
            )
    refuse_ties(network)
    return chosen


def refuse_ties(network: nn.Module) -> None:
    """Tied parameters would be scaled twice: they are refused by name."""
    seen: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            raise EnfoldError(
                f"a share needs parameters used in one place, but '{name}' is tied to '{seen[id(parameter)]}': "
                "untie them, or use DeepEnsemble"
            )
        seen[id(parameter)] = name


def require_size(num_members: int) -> None:
    """An ensemble has members."""
    if not isinstance(num_members, int) or num_members < 1:
        raise EnfoldError(f"an ensemble must have at least 1 member, got {num_members}: pass num_members >= 1")
