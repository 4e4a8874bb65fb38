"""A chain: layers that each feed the next alone, through element-wise functions, norms, pooling and flattening.

The chain is read off the order in which the layers run, and then proved: with random weights and inputs, a random order
of each layer's units must leave the outputs unchanged, and must not if the next layer is not told.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from enfold.errors import EnfoldError
from enfold.members import Members, State
from enfold.members.engines import logits_of
from enfold.members.skeleton import Skeleton
from enfold.modes import evaluating
from enfold.seeds import generator
from enfold.sharing.layer_shapes import CONVOLUTIONS, TRANSPOSED, layer_shape

WEIGHTED = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
NORMS = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU)
PROOFS = 6  # one random order could spare the groups of a small grouped norm


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor along which hidden units lie, each taking `block` neighbouring places."""

    name: str
    axis: int
    block: int = 1

    def ordered(self, tensor: Tensor, order: Tensor) -> Tensor:
        """The tensor with unit order[k] in place k."""
        places = order.unsqueeze(1) * self.block + torch.arange(self.block)
        return tensor.index_select(self.axis, places.flatten().to(tensor.device))

    def by_unit(self, tensor: Tensor) -> Tensor:
        """(units, everything else)."""
        moved = tensor.movedim(self.axis, 0)
        return moved.reshape(moved.shape[0] // self.block, -1)


@dataclass(frozen=True)
class Hidden:
    """The units of one layer: where they go out, are normed, and come into the next."""

    layer: str
    units: int
    produced: tuple[Axis, ...]
    consumed: tuple[Axis, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All of them."""
        return self.produced + self.consumed


def reordered(state: State, axes: tuple[Axis, ...], order: Tensor) -> State:
    """What changes in a state when units are put in this order."""
    return {axis.name: axis.ordered(state[axis.name], order) for axis in axes}


def chain(members: Members, example: Tensor | None = None) -> list[Hidden]:
    """The hidden layers of members whose layers form a chain; other networks are refused by name."""
    skeleton = members.skeleton
    _refuse_unknown(skeleton)
    source = generator(0, "chain")
    state = _random_state(members, source)
    with evaluating(members):
        inputs = _inputs(skeleton, example, source)
        hidden = _links(skeleton, _order(skeleton, state, inputs))
        for layer in hidden:
            _prove(skeleton, state, inputs, layer, source)
    return hidden


def _refusal(skeleton: Skeleton, reason: str) -> EnfoldError:
    name = type(skeleton.network).__name__
    return EnfoldError(
        f"hidden units are matched in networks whose layers form a chain, but in this {name} {reason}: "
        "leave matching out for it"
    )


def _refuse_unknown(skeleton: Skeleton) -> None:
    """Layers and norms whose axes are known here, and no parameters anywhere else."""
    for name, module in skeleton.network.named_modules():
        what = (
            f"'{name}' is a {type(module).__name__}" if name else f"the {type(module).__name__} itself has parameters"
        )
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if not isinstance(module, WEIGHTED + NORMS):
            raise _refusal(skeleton, what)
        if getattr(module, "groups", 1) > 1:
            raise _refusal(skeleton, f"{what} with groups")


def _random_state(members: Members, source: torch.Generator) -> State:
    """Values with which every unit matters: weights at the usual scale, all else positive."""
    state: State = {}
    for name, tensor in members.expand().items():
        shape = tensor.shape[1:]
        if not tensor.is_floating_point():
            state[name] = tensor[0].detach().clone()
        elif name in members.skeleton.parameters and len(shape) > 1:
            scale = (2 / shape[1:].numel()) ** 0.5
            state[name] = scale * torch.randn(shape, generator=source, dtype=torch.float64)
        else:
            state[name] = 0.5 + torch.rand(shape, generator=source, dtype=torch.float64)
    return {name: tensor.cpu() for name, tensor in state.items()}


def _inputs(skeleton: Skeleton, example: Tensor | None, source: torch.Generator) -> Tensor:
    if example is not None:
        return torch.randn(example[:4].shape, generator=source, dtype=torch.float64)
    first = next(module for module in skeleton.network.modules() if isinstance(module, WEIGHTED))
    if isinstance(first, nn.Linear):
        return torch.randn(4, first.in_features, generator=source, dtype=torch.float64)
    raise EnfoldError(
        f"matching hidden units runs the network once, but the size of the images for a {type(first).__name__} is "
        "unknown: pass a few inputs as example"
    )


def _run(skeleton: Skeleton, state: State, inputs: Tensor) -> Tensor:
    try:
        with skeleton.holding({name: tensor.clone() for name, tensor in state.items()}) as network:
            return logits_of(network(inputs))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, EnfoldError):
            raise
        raise EnfoldError(
            f"matching hidden units runs the network in float64, but inputs of shape {tuple(inputs.shape)} failed "
            f"({str(error).splitlines()[0]}): pass a few inputs of the right shape as example"
        ) from error


def _order(skeleton: Skeleton, state: State, inputs: Tensor) -> list[nn.Module]:
    """The modules that have parameters or are norms in the order in which they run, each once."""
    names = {module: name for name, module in skeleton.network.named_modules() if isinstance(module, WEIGHTED + NORMS)}
    ran: list[nn.Module] = []
    hooks = [module.register_forward_hook(lambda module, *_: ran.append(module)) for module in names]
    try:
        _run(skeleton, state, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for module, name in names.items():
        if ran.count(module) != 1:
            raise _refusal(skeleton, f"'{name}' runs {ran.count(module)} times in one pass")
    return ran


def _links(skeleton: Skeleton, order: list[nn.Module]) -> list[Hidden]:
    """Each layer with the norms behind it and the layer after them, by the order in which they run."""
    positions = [index for index, module in enumerate(order) if not isinstance(module, NORMS)]
    modules = {module: name for name, module in skeleton.network.named_modules()}
    found = []
    for here, there in pairwise(positions):
        layer, after = order[here], order[there]
        units, inputs = _sizes(layer)[1], _sizes(after)[0]
        if inputs % units:
            raise _refusal(
                skeleton, f"'{modules[after]}' with {inputs} inputs runs after '{modules[layer]}' with {units} outputs"
            )
        names = skeleton.names_in(layer)
        produced = [Axis(names["weight"], 1 if isinstance(layer, TRANSPOSED) else 0)]
        produced += [Axis(names["bias"], 0)] if "bias" in names else []
        for norm in order[here + 1 : there]:
            for name in skeleton.names_in(norm).values():
                shape = skeleton.shape(name)
                if len(shape) and shape[0] % units == 0:
                    produced.append(Axis(name, 0, shape[0] // units))
        consumed = Axis(skeleton.names_in(after)["weight"], 0 if isinstance(after, TRANSPOSED) else 1, inputs // units)
        if units > 1:
            found.append(Hidden(modules[layer], units, tuple(produced), (consumed,)))
    return found


def _sizes(layer: nn.Module) -> tuple[int, int]:
    shape = layer_shape(layer)
    return shape.inputs, shape.outputs


def _prove(skeleton: Skeleton, state: State, inputs: Tensor, layer: Hidden, source: torch.Generator) -> None:
    """Several random orders must leave the outputs unchanged, and one must not if the next layer is not told."""
    plain = _run(skeleton, state, inputs)

    def unchanged(axes: tuple[Axis, ...]) -> bool:
        order = torch.randperm(layer.units, generator=source)
        if bool((order == torch.arange(layer.units)).all()):
            order = order.flip(0)
        changed = _run(skeleton, {**state, **reordered(state, axes, order)}, inputs)
        return torch.allclose(changed, plain, rtol=1e-7, atol=1e-9 * float(plain.abs().max()))

    if not all(unchanged(layer.axes) for _ in range(PROOFS)):
        reasons = "a residual sum, attention, a concatenation or a grouped norm"
        raise _refusal(skeleton, f"the order of the outputs of '{layer.layer}' matters ({reasons})")
    if unchanged(layer.produced):
        raise _refusal(skeleton, f"the outputs of '{layer.layer}' do not reach the network's")
