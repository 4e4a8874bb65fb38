"""BranchedEnsemble: members with a common trunk and a branch of their own, split by the order of the modules."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from enfold.data.tree import clone, first_examples
from enfold.engines.base import Engine, EngineName
from enfold.engines.choose import disable_dropout
from enfold.engines.compare import OUTPUTS, find_difference
from enfold.engines.examples import EXAMPLES, fix_rng, vary_own
from enfold.engines.initialization import initialize_member
from enfold.engines.skeleton import read_state
from enfold.engines.trunk import OneByOne, OneTrunk
from enfold.ensembles.common.efficient import EfficientEnsemble
from enfold.errors import EnfoldError, closest
from enfold.seeds import generator
from enfold.train import TrainConfig

Start = Literal["fresh", "copies"]
CHAINS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # a split between their children splits no block


class BranchedEnsemble(EfficientEnsemble):
    """M branches on a common trunk. For the same inputs the trunk runs once; a branch's buffers are its member's own.

    Args:
        network: The network that is split into trunk and branch.
        num_members: The number of members.
        own: The names of the parameters and buffers of the branch.
        engine: How members are run; "auto" runs the trunk once.
    """

    seed: int

    def __init__(self, network: nn.Module, num_members: int, own: Sequence[str], engine: EngineName) -> None:
        super().__init__(network, num_members, own, engine, batch_norm="joint")
        self.joint = False  # the trunk runs once: there is one batch to normalise

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Use one order of the data, so that the trunk runs once per step, unless members see different examples."""
        return config if config.bootstrap or config.order == "split" else config.replace(order="shared")

    @torch.no_grad()
    def draw_branches(self, network: nn.Module) -> None:
        """Initialise every branch again, as the members of a deep ensemble with this seed."""
        for index in range(self.num_members):
            values = read_state(initialize_member(network, self.seed, index)[0])
            for name, tensor in self.own.state().items():
                tensor[index].copy_(values[name])

    @torch.no_grad()
    def perturb_branches(self, noise: float) -> None:
        """Add Gaussian noise to the branches' trainable parameters, relative to the root mean square of each tensor."""
        for name, tensor in self.own.state().items():
            if name not in self.skeleton.trainable:
                continue
            size = noise * tensor[0].square().mean().sqrt()
            for index in range(self.num_members):
                source = generator(self.seed, "branch", name, index)
                tensor[index] += size * torch.randn(tensor.shape[1:], generator=source).to(tensor)

    def _loop(self) -> OneByOne:
        return OneByOne(super()._loop().codes)

    def _choose(self, inputs: Any) -> Engine:
        """Choose the engine: "auto" runs the trunk once; without a trunk it is that of a deep ensemble."""
        if self.engine == "loop":
            return self._loop()
        if self.engine != "auto" or not self.shared.state():
            return super()._choose(inputs)
        return OneTrunk(self.skeleton, list(self.own.state())) if self._can_run_trunk_once(inputs) else self._loop()

    @torch.no_grad()
    def _can_run_trunk_once(self, inputs: Any) -> bool:
        """Return whether one pass over the trunk gives the same as one pass per member, on a few examples."""
        own, found = list(self.own.state()), first_examples(inputs, EXAMPLES)
        few = inputs if found is None else found
        state = vary_own(self.expand(), own, set(self.skeleton.parameters))
        for training in (False, True):
            results = []
            for kind in (OneTrunk, OneByOne):
                code = copy.deepcopy(self.skeleton)
                engine = OneTrunk(code, own) if kind is OneTrunk else OneByOne(code)
                values = {name: tensor.clone() for name, tensor in state.items()}
                try:
                    with fix_rng(inputs), disable_dropout(code.network, training):
                        results.append(engine(values, clone(few), False))
                except Exception:  # a batch that is too small for train mode: there is nothing to compare
                    break
            if len(results) == 2 and find_difference({OUTPUTS: results[1]}, {OUTPUTS: results[0]}) is not None:
                return False
        return True

    def is_looped(self, inputs: Any) -> bool:
        """Return False where there is a trunk: gradients member by member would run it once for each."""
        return not self.shared.state() and super().is_looped(inputs)

    def _run(self, inputs: Any, *, each: bool) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return super()._run(inputs, each=each)
        # Tensors made in inference mode have no version counter, by which the engine detects in-place changes.
        with torch.inference_mode(False), torch.no_grad():
            return super()._run(clone(inputs), each=each)


def split_names(network: nn.Module, split: str) -> list[str]:
    """Return the names of the tensors of module `split` and of all modules registered after it; "" is the network."""
    order = [name for name, _ in network.named_modules(remove_duplicate=False)]
    if split not in order:
        near = closest(split, order)
        meant = f", did you mean '{near}'?" if near else ""
        raise EnfoldError(
            f"split must be the path of a module in the network, got '{split}'{meant}: choose one of "
            f"{', '.join(name for name in order if name)}"
        )
    behind = set(order[order.index(split) :])
    names = _select(network, lambda owner, name: owner in behind)
    if not any(name in names for name, _ in network.named_parameters()):
        raise EnfoldError(
            f"split must have parameters behind it, got '{split}' with none: split at '{last_layer(network)}' or "
            "before it"
        )
    return names


def pattern_names(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of tensors whose name, or that of a module they are in, matches a regular expression."""
    names = list(dict(_tensors(network)))
    for pattern in patterns:
        if not any(_matches(pattern, name) for name in names):
            raise EnfoldError(
                f"branch must match parameters or modules, but {pattern!r} matches none of {', '.join(names)}: "
                "change it"
            )
    chosen = _select(network, lambda owner, name: any(_matches(pattern, name) for pattern in patterns))
    if not any(name in chosen for name, _ in network.named_parameters()):
        raise EnfoldError(f"branch must match parameters, got only the buffers {', '.join(chosen)}: add a pattern")
    return chosen


def _matches(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(re.search(pattern, ".".join(parts[:length])) for length in range(1, len(parts) + 1))


def _tensors(network: nn.Module) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """Yield name, path of the module and tensor of all parameters and buffers; tied ones repeatedly."""
    for prefix, module in network.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield (f"{prefix}.{key}" if prefix else key), (prefix, tensor)


def _select(network: nn.Module, wanted: Callable[[str, str], bool]) -> list[str]:
    """Return the names for which `wanted(module, name)` holds; a tensor on both sides of the split is an error."""
    seen: dict[int, tuple[str, bool]] = {}
    for name, (owner, tensor) in _tensors(network):
        first, owned = seen.setdefault(id(tensor), (name, wanted(owner, name)))
        if owned != wanted(owner, name):
            raise EnfoldError(
                f"every tensor must be on one side of the split, but '{name}' is tied to '{first}' across it: untie "
                "them, move the split, or use DeepEnsemble"
            )
    return [name for name, owned in seen.values() if owned]


def _layers(network: nn.Module, axes: int) -> list[str]:
    """Return the paths of modules with a parameter of at least `axes` axes; parametrisations belong to their layer."""
    found = (
        name.split(".parametrizations.")[0]
        for name, module in network.named_modules()
        if any(parameter is not None and parameter.ndim >= axes for parameter in module._parameters.values())
    )
    return list(dict.fromkeys(found))


def last_layer(network: nn.Module) -> str:
    """Return the path of the layer registered last: the last one with a weight matrix, or else with any parameter."""
    layers = _layers(network, 2) or _layers(network, 0)
    if not layers:
        raise EnfoldError(f"network must have parameters, but {type(network).__name__} has none: pass one with layers")
    return layers[-1]


def middle_module(network: nn.Module) -> str:
    """Return the path of the module with about half of the layers behind it, the default split.

    Splits lie between the children of the network and of its containers (Sequential and lists). A block is split only
    while less than a quarter of the layers would lie on one side.
    """
    order = {name: place for place, (name, _) in enumerate(network.named_modules())}
    layers = _layers(network, 0)

    def behind(name: str) -> float:
        return sum(order[layer] >= order[name] for layer in layers) / max(len(layers), 1)

    best, path = "", ""
    while True:
        prefix = f"{path}." if path else ""
        parts = [f"{prefix}{name}" for name, _ in network.get_submodule(path).named_children()]
        parts = [name for name in parts if any(layer == name or layer.startswith(f"{name}.") for layer in layers)]
        best = min([best, *parts], key=lambda name: abs(behind(name) - 0.5))
        across = [name for name in parts if behind(name) > 0.5]  # the last one goes over the middle
        is_chain = across and isinstance(network.get_submodule(across[-1]), CHAINS)
        if not across or (abs(behind(best) - 0.5) <= 0.25 and not is_chain):
            return best
        path = across[-1]
