"""What every tree keeps to: members that share a trunk and own a branch, found by the order of a network's modules."""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.engines.base import Engine, EngineName
from enfold.engines.choice import without_draws
from enfold.engines.initialization import initialised
from enfold.engines.side_by_side import shared_varied
from enfold.engines.skeleton import read_state
from enfold.engines.trial import EXAMPLES
from enfold.engines.trunk import OneByOne, OneTrunk
from enfold.engines.verify import OUTPUTS, difference, fixed_draws
from enfold.ensembles.common.sharing import Share, Sharing
from enfold.errors import EnfoldError, closest
from enfold.seeds import generator
from enfold.train import TrainConfig

Start = Literal["fresh", "copies"]
CHAINS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # a cut between their parts cuts no block in two


class Branching(Share):
    """A share whose members have one trunk: trained on the same examples, so that the trunk runs once a step."""

    seed: int
    engine: EngineName

    @abstractmethod
    def branch_of(self, network: nn.Module) -> list[str]:
        """The names of the parameters and buffers behind the split, which every member owns."""

    def adapted(self, plan: TrainConfig) -> TrainConfig:
        """One order of the data for all members, unless members are to see different examples."""
        return plan if plan.bootstrap or plan.order == "split" else plan.replace(order="shared")


class Branches(Sharing):
    """M branches on one trunk. Given the same inputs, the trunk runs once; a branch's buffers are its member's own."""

    def __init__(self, network: nn.Module, share: Branching, start: Start, noise: float = 0.0) -> None:
        super().__init__(network, share.num_members, share.branch_of(network), share.engine, batch_norm="joint")
        self.joint = False  # the trunk runs once: there is one batch to normalise
        self.share = share
        if start == "fresh":
            self._draw(network)
        elif noise:
            self._perturb(noise)

    @torch.no_grad()
    def _draw(self, network: nn.Module) -> None:
        """Initialise every branch anew, as the members of a deep ensemble with this seed are."""
        for index in range(self.num_members):
            values = read_state(initialised(network, self.share.seed, index)[0])
            for name, tensor in self.own.state().items():
                tensor[index].copy_(values[name])

    @torch.no_grad()
    def _perturb(self, noise: float) -> None:
        """Add Gaussian noise to the trainable parameters, relative to the root mean square of each tensor."""
        for name, tensor in self.own.state().items():
            if name not in self.skeleton.trainable:
                continue
            size = noise * tensor[0].square().mean().sqrt()
            for index in range(self.num_members):
                source = generator(self.share.seed, "branch", name, index)
                tensor[index] += size * torch.randn(tensor.shape[1:], generator=source).to(tensor)

    def _loop(self) -> OneByOne:
        return OneByOne(super()._loop().codes)

    def _choose(self, inputs: Tensor) -> Engine:
        """ "auto" is one pass over the trunk; without a trunk, what runs a deep ensemble."""
        if self.engine_name == "loop":
            return self._loop()
        if self.engine_name != "auto" or not self.shared.state():
            return super()._choose(inputs)
        return OneTrunk(self.skeleton, list(self.own.state())) if self._shares_its_trunk(inputs) else self._loop()

    @torch.no_grad()
    def _shares_its_trunk(self, inputs: Tensor) -> bool:
        """Whether one pass over the trunk gives what a pass for every member gives, on a few examples."""
        own, few = list(self.own.state()), inputs[:EXAMPLES]
        state = shared_varied(self.expand(), own, set(self.skeleton.parameters))
        for training in (False, True):
            results = []
            for kind in (OneTrunk, OneByOne):
                code = copy.deepcopy(self.skeleton)
                engine = OneTrunk(code, own) if kind is OneTrunk else OneByOne(code)
                values = {name: tensor.clone() for name, tensor in state.items()}
                try:
                    with fixed_draws(inputs), without_draws(code.network, training):
                        results.append(engine(values, few.clone(), False))
                except Exception:  # a batch that is too small for train mode: there is nothing to compare
                    break
            if len(results) == 2 and difference({OUTPUTS: results[1]}, {OUTPUTS: results[0]}) is not None:
                return False
        return True

    def looped(self, inputs: Tensor) -> bool:
        """Not by the training loop: a member's gradients alone would run the trunk once for each."""
        return not self.shared.state() and super().looped(inputs)

    def _run(self, inputs: Tensor, *, each: bool) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return super()._run(inputs, each=each)
        # Tensors of the inference mode do not count their versions, by which the engine sees what was altered in place.
        with torch.inference_mode(False), torch.no_grad():
            return super()._run(inputs.clone(), each=each)


def require_start(start: Start, noise: float) -> None:
    """Branches start anew or as copies, which noise of a size can set apart."""
    if start not in ("fresh", "copies"):
        raise EnfoldError(f"branches start 'fresh' or as 'copies', got {start!r}: choose one of them")
    if not 0 <= noise < float("inf"):
        raise EnfoldError(f"the noise must be 0 or more, got {noise}: 0.1 is a tenth of a weight's size")


def split_names(network: nn.Module, split: str) -> list[str]:
    """The tensors of the module at the path `split` and of all modules registered after it; "" is the whole network."""
    order = [name for name, _ in network.named_modules(remove_duplicate=False)]
    if split not in order:
        near = closest(split, order)
        meant = f", did you mean '{near}'?" if near else ""
        raise EnfoldError(
            f"a split must be the path of a module in the network, got '{split}'{meant}: choose one of "
            f"{', '.join(name for name in order if name)}"
        )
    behind = set(order[order.index(split) :])
    names = _chosen(network, lambda owner, name: owner in behind)
    if not any(name in names for name, _ in network.named_parameters()):
        raise EnfoldError(
            f"a split must have parameters behind it, got '{split}' with none: split at '{last_layer(network)}' or "
            "before it"
        )
    return names


def pattern_names(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The tensors whose own name, or the name of a module they are in, matches one of the regular expressions."""
    names = list(dict(_tensors(network)))
    for pattern in patterns:
        if not any(_matches(pattern, name) for name in names):
            raise EnfoldError(
                f"a pattern must match a parameter or a module, but {pattern!r} matches none of {', '.join(names)}: "
                "change it"
            )
    chosen = _chosen(network, lambda owner, name: any(_matches(pattern, name) for pattern in patterns))
    if not any(name in chosen for name, _ in network.named_parameters()):
        raise EnfoldError(f"a branch must have parameters, got only the buffers {', '.join(chosen)}: add a pattern")
    return chosen


def _matches(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(re.search(pattern, ".".join(parts[:length])) for length in range(1, len(parts) + 1))


def _tensors(network: nn.Module) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """All parameters and buffers in the order of modules: name, path of the module, tensor; tied ones repeatedly."""
    for prefix, module in network.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield (f"{prefix}.{key}" if prefix else key), (prefix, tensor)


def _chosen(network: nn.Module, wanted: Callable[[str, str], bool]) -> list[str]:
    """The names for which `wanted(module, name)`; a tensor that would be shared and owned is refused."""
    seen: dict[int, tuple[str, bool]] = {}
    for name, (owner, tensor) in _tensors(network):
        first, owned = seen.setdefault(id(tensor), (name, wanted(owner, name)))
        if owned != wanted(owner, name):
            raise EnfoldError(
                f"a tensor must be on one side of the split, but '{name}' is tied to '{first}' across it: untie them, "
                "move the split, or use DeepEnsemble"
            )
    return [name for name, owned in seen.values() if owned]


def _layers(network: nn.Module, axes: int) -> list[str]:
    """The paths of modules with a parameter of so many axes; what computes a layer's weight is a part of the layer."""
    found = (
        name.split(".parametrizations.")[0]
        for name, module in network.named_modules()
        if any(parameter is not None and parameter.ndim >= axes for parameter in module._parameters.values())
    )
    return list(dict.fromkeys(found))


def last_layer(network: nn.Module) -> str:
    """The path of the layer registered last: the last one with a weight matrix, or else with any parameter."""
    layers = _layers(network, 2) or _layers(network, 0)
    if not layers:
        raise EnfoldError(
            f"a branch needs parameters to differ in, but {type(network).__name__} has none: pass a network with layers"
        )
    return layers[-1]


def middle(network: nn.Module) -> str:
    """The path of the module with about half of the layers behind it; the split that is taken by default.

    Cuts are looked for between the parts of the network and of its chains (Sequential and lists). A block is opened
    only while less than a quarter of the layers would lie on one side.
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
