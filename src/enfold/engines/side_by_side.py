"""All members in one pass, side by side: a value is M tensors, and what is done to it is done to each of them.

Only a batch norm in train mode looks at all of them together. This gives what `Merged` gives, where all values are one
tensor, and is faster for values so large that they do not stay in the cache between two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.engines.base import Engine, laid_out
from enfold.engines.choice import compare, without_draws
from enfold.engines.joint_norm import joint_batch_norm
from enfold.engines.layout import runs_channels_last
from enfold.engines.merged import Merged
from enfold.engines.program import CannotRun
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.trial import EXAMPLES, varied

LARGE = 1 << 23  # bytes of all members' values behind one layer
OPERATORS = (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "pow",
    "rpow", "matmul", "rmatmul", "neg", "abs", "invert", "and", "or", "lt", "le", "gt", "ge", "getitem", "setitem",
)  # fmt: skip


class Several:
    """M tensors that stand in a network's forward where it expects one; numbers such as sizes are the first one's."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = tuple(parts)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for each of its functions that is given an object of this class."""
        if function is F.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        return _each(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols that a tensor has and this has not
        found = [getattr(part, name) for part in self.parts]
        if callable(found[0]):
            return lambda *args, **kwargs: _each(getattr(Tensor, name), (self, *args), kwargs)
        return _gathered(found)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __bool__(self) -> bool:
        raise TypeError("members may differ in what a forward decides by")

    def __deepcopy__(self, memo: object) -> None:
        """What a forward left in its network is not for a copy."""


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)
    return lambda *args: _each(function, args, {})


for _name in OPERATORS:
    setattr(Several, f"__{_name}__", _operator(f"__{_name}__"))


def _each(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function called for each member, with its own part of every argument."""
    given = [*args, *kwargs.values()]
    size = next(_sizes(given))
    return _gathered([
        function(*_part(list(args), index), **{key: _part(value, index) for key, value in kwargs.items()})
        for index in range(size)
    ])  # fmt: skip


def _sizes(value: Any) -> Iterator[int]:
    if isinstance(value, Several):
        yield len(value.parts)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sizes(item)


def _part(value: Any, index: int) -> Any:
    if isinstance(value, Several):
        return value.parts[index]
    if type(value) in (list, tuple):
        return type(value)(_part(item, index) for item in value)
    return value


def _gathered(found: Sequence[Any]) -> Any:
    """Tensors as one value; numbers and the like are the same for all members, or nobody may decide by them."""
    first = found[0]
    if isinstance(first, Tensor):
        return Several(found)
    if isinstance(first, list | tuple) and any(isinstance(item, Tensor) for item in first):
        return tuple(_gathered(items) for items in zip(*found, strict=True))
    if any(other != first for other in found[1:]):
        raise TypeError("members differ in a value that is no tensor")
    return first


def _batch_norm(
    inputs: Several,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Several:
    """F.batch_norm of all members together."""
    given = running_mean, running_var, weight, bias
    if not training:
        return Several([F.batch_norm(part, *given, False, momentum, eps) for part in inputs.parts])
    if any(isinstance(tensor, Several) for tensor in given):
        raise TypeError("members have batch norms of their own")
    return Several(joint_batch_norm(inputs.parts, *given, momentum, eps))


class SideBySide:
    """The engine; `own` names the tensors in which members differ."""

    def __init__(self, skeleton: Skeleton, own: Collection[str]) -> None:
        self.skeleton, self.own = skeleton, set(own)
        self.channels_last = runs_channels_last(skeleton.network)

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        num_members = len(next(iter(state.values())))
        if each:
            rows = Several([laid_out(own, self.channels_last) for own in inputs])
        elif self.skeleton.writes_inputs:
            rows = Several([laid_out(inputs, self.channels_last, copy=True) for _ in range(num_members)])
        else:
            rows = Several([laid_out(inputs, self.channels_last)] * num_members)
        held: dict[str, Any] = {
            name: Several(tensor.unbind(0)) if name in self.own else tensor[0] for name, tensor in state.items()
        }
        with self.skeleton.holding(held) as network:
            outputs = network(rows)
        if not isinstance(outputs, Several):
            raise CannotRun("it does not return one tensor")
        return torch.stack(outputs.parts)


def preferred(merged: Merged, own: Collection[str], state: State, inputs: Tensor) -> Engine:
    """The faster one for such inputs: the merged batch, or for large values members side by side.

    These must give what the merged batch gives, outputs and statistics, in train and in eval mode, for a few examples
    and members that differ.
    """
    skeleton = merged.skeleton
    if inputs.device.type != "cpu" or skeleton.network._compiled_call_impl is not None:
        return merged
    state = shared_varied(state, own, set(skeleton.parameters))
    few = inputs[:EXAMPLES]
    size = _largest(merged, state, few) * len(inputs) * len(next(iter(state.values()))) * inputs.element_size()
    if size < LARGE:
        return merged
    beside = SideBySide(skeleton, own)
    try:
        for training in (False, True):
            seen, found = ({name: tensor.clone() for name, tensor in state.items()} for _ in range(2))
            with torch.no_grad(), torch.random.fork_rng(devices=[]), without_draws(skeleton.network, training):
                expected, outputs = merged(seen, few, False), beside(found, few, False)
            kept = {name: tensor[0] for name, tensor in seen.items()}
            compare({"": expected, **kept}, {"": outputs, **{name: tensor[0] for name, tensor in found.items()}})
    except Exception:  # the user's own forward may do what only a tensor can
        return merged
    return beside


def shared_varied(state: State, own: Collection[str], parameters: set[str]) -> State:
    """Other values for each member, but where they share."""
    return {
        name: tensor if name in own else tensor[:1].expand_as(tensor)
        for name, tensor in varied(state, parameters).items()
    }


@torch.no_grad()
def _largest(merged: Merged, state: State, inputs: Tensor) -> int:
    """Values a member has for one example behind the layer where they are most."""
    sizes = [0]

    def note(layer: nn.Module, args: object, output: object) -> None:
        sizes.append(output.numel() // len(output) if isinstance(output, Tensor) and len(output) else 0)

    hooks = [layer.register_forward_hook(note) for layer, _ in merged.layers]
    try:
        with torch.random.fork_rng(devices=[]), without_draws(merged.skeleton.network, False):
            merged({name: tensor.clone() for name, tensor in state.items()}, inputs, False)
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes)
