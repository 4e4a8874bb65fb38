"""Joint batch norm: all members in one pass, so that a common batch norm normalises their batches together.

`Merged` runs the network once on the merged batch, (M * B, ...), as implementations do that repeat the batch M times. A
layer in which members differ processes the rows member by member; every other layer gets the rows of all members.

`SideBySide` gives the same results with M tensors in place of one: every operation runs on each of them, and only a
batch norm in train mode computes on all of them together. It is used for large values, which do not stay in the cache
between two operations: a training step of the 32-64-128 network with M = 4 takes 0.81 of the time.

With the mean μ_m and the variance v_m of each of M batches of n values per channel, N = M n:

    μ = (1/M) Σ_m μ_m,   v = (1/M) Σ_m (v_m + (μ_m - μ)²),   y = γ (x - μ) / σ + β,   σ² = v + ε       (1)
    dβ = Σ dy,   dγ = Σ dy (x - μ) / σ,   dx = (γ / σ) (dy - dβ / N - (x - μ) / σ · dγ / N)             (2)

(1) and (2) are `F.batch_norm` of the concatenated batches, without concatenating them: a tensor of more than 32 MB is
requested from the system again in every step, which takes longer than normalising it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from enfold.data.tree import count_examples, describe, first_examples, repeat_examples
from enfold.engines.base import CannotRun, Engine, Loop
from enfold.engines.call import call_network
from enfold.engines.choose import compare_results, disable_dropout, run_once
from enfold.engines.examples import EXAMPLES, vary_own
from enfold.engines.layout import arrange_images, runs_channels_last
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.stacked import unmerge
from enfold.engines.verify import find_recomputation

LARGE = 1 << 23  # bytes of the output of one layer, of all members
OPERATORS = (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "pow",
    "rpow", "matmul", "rmatmul", "neg", "abs", "invert", "and", "or", "lt", "le", "gt", "ge", "getitem", "setitem",
)  # fmt: skip


class Merged:
    """An engine that runs the merged batch; `own` are the names of the tensors in which members differ."""

    def __init__(self, skeleton: Skeleton, own: Collection[str]) -> None:
        self.skeleton = skeleton
        self.channels_last = runs_channels_last(skeleton.network)
        self.layers: list[tuple[nn.Module, dict[str, str]]] = []
        for path, module in skeleton.network.named_modules():
            names = {key: name for key, name in skeleton.names_in(module).items() if name in own}
            if not names:
                continue
            if any(True for _ in module.children()) or _is_used_by_parent(skeleton.network, path):
                raise CannotRun(f"members differ in '{path}', which is not a layer that is called by itself")
            self.layers.append((module, names))

    def __call__(self, state: State, inputs: Any, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, ...)."""
        num_members = len(next(iter(state.values())))
        rows = inputs.flatten(0, 1) if each else repeat_examples(inputs, num_members)
        first = {name: tensor[0] for name, tensor in state.items()}
        with self.skeleton.use_values(first) as network, self._split_layers(state, num_members):
            outputs = get_logits(call_network(network, arrange_images(rows, self.channels_last)), network)
        if len(outputs) != count_examples(rows):
            raise CannotRun("it does not give one output per example")
        return unmerge(outputs, num_members)

    @contextmanager
    def _split_layers(self, state: State, num_members: int) -> Iterator[None]:
        """Let layers in which members differ process their rows member by member, inside the block."""
        with ExitStack() as stack:
            for layer, names in self.layers:
                stack.enter_context(_split_layer(layer, names, state, num_members))
            yield

    @torch.no_grad()
    def check(self, state: State, inputs: Any) -> Merged:
        """Return the engine; raises CannotRun if in eval mode it gives other outputs than the members one by one."""
        find_recomputation(self.skeleton, {name: tensor[0] for name, tensor in state.items()}, inputs)
        if self.skeleton.recomputes:
            raise CannotRun("it uses activation checkpointing")
        with eval_mode(self.skeleton.network):
            self.skeleton.network.eval()
            few = first_examples(inputs, 3)
            if few is None:
                raise CannotRun(f"batches of {describe(inputs)} cannot be joined")
            values = {name: tensor.detach().clone() for name, tensor in state.items()}
            try:
                same = torch.allclose(self(values, few, False), Loop(self.skeleton)(values, few, False), 1e-3, 1e-4)
            except (RuntimeError, ValueError, TypeError) as error:
                raise CannotRun(f"it does not run on a merged batch ({error})") from error
        if not same:
            raise CannotRun("it gives other outputs on a merged batch than the members one by one")
        return self


@contextmanager
def _split_layer(layer: nn.Module, names: dict[str, str], state: State, num_members: int) -> Iterator[None]:
    """Run a layer with each member's own tensors on the rows of that member, inside the block."""
    places: list[tuple[dict[str, Any], str]] = [
        (layer._parameters if key in layer._parameters else layer._buffers, key) for key in names
    ]
    slices = [state[name].unbind(0) for name in names.values()]
    original = layer.forward

    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        outputs = []
        for index, part in enumerate(rows.chunk(num_members)):
            for (container, key), tensors in zip(places, slices, strict=True):
                container[key] = tensors[index]
            outputs.append(original(part, *args, **kwargs))
        for (container, key), tensors in zip(places, slices, strict=True):
            container[key] = tensors[0]  # as `use_values` set it
        return torch.cat(outputs)

    layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def _is_used_by_parent(network: nn.Module, path: str) -> bool:
    """Return whether the parent reads the weights of a layer without calling it, as attention does."""
    parent = network.get_submodule(path.rpartition(".")[0]) if path else network
    return isinstance(parent, nn.MultiheadAttention | nn.TransformerEncoderLayer)


class Several:
    """M tensors in place of one in a forward pass; numbers such as sizes must be equal for all of them."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = tuple(parts)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch with an argument of this class."""
        if function is F.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        return _each(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # a protocol of tensors that is not supported
        found = [getattr(part, name) for part in self.parts]
        if callable(found[0]):
            return lambda *args, **kwargs: _each(getattr(Tensor, name), (self, *args), kwargs)
        return _gather(found)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __bool__(self) -> bool:
        raise TypeError("the control flow of a forward pass may differ between members")

    def __deepcopy__(self, memo: object) -> None:
        """Return None: values that a forward pass stored in its network are not copied."""


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)
    return lambda *args: _each(function, args, {})


for _name in OPERATORS:
    setattr(Several, f"__{_name}__", _operator(f"__{_name}__"))


def _each(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call the function for each member, with its own tensors in every argument."""
    given = [*args, *kwargs.values()]
    size = next(_sizes(given))
    return _gather([
        function(*_select(list(args), index), **{key: _select(value, index) for key, value in kwargs.items()})
        for index in range(size)
    ])  # fmt: skip


def _sizes(value: Any) -> Iterator[int]:
    if isinstance(value, Several):
        yield len(value.parts)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sizes(item)


def _select(value: Any, index: int) -> Any:
    if isinstance(value, Several):
        return value.parts[index]
    if type(value) in (list, tuple):
        return type(value)(_select(item, index) for item in value)
    return value


def _gather(found: Sequence[Any]) -> Any:
    """Return tensors as one value, and other results only if they are equal for all members."""
    first = found[0]
    if isinstance(first, Tensor):
        return Several(found)
    if isinstance(first, list | tuple) and any(isinstance(item, Tensor) for item in first):
        return tuple(_gather(items) for items in zip(*found, strict=True))
    if any(other != first for other in found[1:]):
        raise TypeError("members differ in a value that is not a tensor")
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
    """Compute F.batch_norm of all members together."""
    given = running_mean, running_var, weight, bias
    if not training:
        return Several([F.batch_norm(part, *given, False, momentum, eps) for part in inputs.parts])
    if any(isinstance(tensor, Several) for tensor in given):
        raise TypeError("each member has its own batch norm")
    return Several(joint_batch_norm(inputs.parts, *given, momentum, eps))


class SideBySide:
    """An engine that runs M tensors in place of one; `own` are the names of the tensors in which members differ."""

    def __init__(self, skeleton: Skeleton, own: Collection[str]) -> None:
        self.skeleton, self.own = skeleton, set(own)
        self.channels_last = runs_channels_last(skeleton.network)

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        num_members = len(next(iter(state.values())))
        if each:
            rows = Several([arrange_images(own, self.channels_last) for own in inputs])
        elif self.skeleton.writes_inputs:
            rows = Several([arrange_images(inputs, self.channels_last, copy=True) for _ in range(num_members)])
        else:
            rows = Several([arrange_images(inputs, self.channels_last)] * num_members)
        values: dict[str, Any] = {
            name: Several(tensor.unbind(0)) if name in self.own else tensor[0] for name, tensor in state.items()
        }
        with self.skeleton.use_values(values) as network:
            outputs = network(rows)
        if not isinstance(outputs, Several):
            raise CannotRun("it does not return one tensor")
        return torch.stack(outputs.parts)


def choose_joint_engine(merged: Merged, own: Collection[str], state: State, inputs: Any) -> Engine:
    """Return the faster engine for such inputs: `Merged`, or `SideBySide` for large values.

    `SideBySide` must give the same outputs, statistics and gradients as `Merged`, in train and in eval mode, for a few
    examples and members that differ. It runs networks that take one tensor.

    Args:
        merged: The engine for all other inputs.
        own: Names of the values that differ between members.
        state: Stacked values, (M, *shape).
        inputs: A batch (B, ...).
    """
    skeleton = merged.skeleton
    if not isinstance(inputs, Tensor) or inputs.device.type != "cpu" or skeleton.network._compiled_call_impl:
        return merged
    state = vary_own(state, own, set(skeleton.parameters))
    few = inputs[:EXAMPLES]
    size = _largest(merged, state, few) * len(inputs) * len(next(iter(state.values()))) * inputs.element_size()
    if size < LARGE:
        return merged
    beside = SideBySide(skeleton, own)
    try:
        for training in (False, True):
            with torch.random.fork_rng(devices=[]), disable_dropout(skeleton.network, training):
                expected, found = (run_once(one, skeleton, state, few, grad=training) for one in (merged, beside))
            first = {f"'{name}'" for name in state if name not in own}  # of which all members use the first
            compare_results(*({k: v[0] if k in first else v for k, v in one.items()} for one in (expected, found)))
    except Exception:  # the user's forward may need a tensor
        return merged
    return beside


@torch.no_grad()
def _largest(merged: Merged, state: State, inputs: Tensor) -> int:
    """Return the largest number of values in the output of a layer, for one example of one member."""
    sizes = [0]

    def record(layer: nn.Module, args: object, output: object) -> None:
        sizes.append(output.numel() // len(output) if isinstance(output, Tensor) and len(output) else 0)

    hooks = [layer.register_forward_hook(record) for layer, _ in merged.layers]
    try:
        with torch.random.fork_rng(devices=[]), disable_dropout(merged.skeleton.network, False):
            merged({name: tensor.clone() for name, tensor in state.items()}, inputs, False)
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes)


def joint_batch_norm(
    parts: Sequence[Tensor],
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> list[Tensor]:
    """Compute (1) for batches of one shape in train mode; running statistics are updated in place.

    Args:
        parts: The inputs of the members.
        running_mean: Running mean, (C,); None without.
        running_var: Running variance, (C,); None without.
        weight: Scale, (C,); None without.
        bias: Shift, (C,); None without.
        momentum: Weight of this batch in the running statistics.
        eps: Constant added to the variance.
    """
    first = parts[0]
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64):
        rows = F.batch_norm(torch.cat(list(parts)), running_mean, running_var, weight, bias, True, momentum, eps)
        return list(rows.chunk(len(parts)))
    with torch.no_grad():
        stats = [torch.batch_norm_update_stats(part, None, None, 0.0) for part in parts]
        means, variances = (torch.stack(values) for values in zip(*stats, strict=True))  # (M, C)
        mean = means.mean(0)
        variance = variances.mean(0) + means.var(0, correction=0)
        count = len(parts) * first.numel() // len(mean)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean), momentum)
            running_var.lerp_((variance * (count / (count - 1))).to(running_var), momentum)
    outputs: tuple[Tensor, ...] = _Joint.apply(weight, bias, mean, variance, count, eps, *parts)  # type: ignore[no-untyped-call]
    return list(outputs)


class _Joint(torch.autograd.Function):
    """Compute the last equations of (1), with the gradients (2)."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: int,
        eps: float,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, mean, variance, *parts)
        ctx.count, ctx.eps = count, eps
        return tuple(torch.native_batch_norm(part, weight, bias, mean, variance, False, 0.0, eps)[0] for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, variance, *parts = ctx.saved_tensors
        backward, every = torch.ops.aten.native_batch_norm_backward, [True, True, True]
        scale = (variance + ctx.eps).rsqrt()  # 1 / σ
        weight = torch.ones_like(scale) if weight is None else weight
        found = [
            backward(grad, part, weight, mean, variance, None, None, False, ctx.eps, every)  # (γ / σ) dy, dγ_m, dβ_m
            for grad, part in zip(grads, parts, strict=True)
        ]
        of_weight, of_bias = (torch.stack([one[k] for one in found]).sum(0) for k in (1, 2))
        slope = -weight * scale.square() * of_weight / ctx.count
        shift = -weight * scale * of_bias / ctx.count - slope * mean
        shape = (-1, *(1,) * (parts[0].ndim - 2))
        # (2) is the gradient with constant statistics, plus a linear function of x
        of_parts = [
            one[0].addcmul_(part, slope.view(shape)).add_(shift.view(shape))
            for one, part in zip(found, parts, strict=True)
        ]
        needed = [
            given if wanted else None for given, wanted in zip((of_weight, of_bias), ctx.needs_input_grad, strict=False)
        ]
        return *needed, None, None, None, None, *of_parts
