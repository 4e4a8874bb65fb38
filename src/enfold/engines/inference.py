"""Inference of convolutional networks in a loop: images in pieces, and batch norms fused into convolutions.

Both are used only if a call with three examples shows that the output of a convolution is used by its batch norm alone,
and that no control flow depends on values; and only if they give the outputs of the network for varied examples and
parameters. For four networks 32-64-128 and 128 images pieces take 0.60 of the time, and 0.52 together with fusion.

For a single image, most of the time would be spent on preparing kernels. Fused kernels are then stored in the layout of
oneDNN until a tensor that they are computed from changes, and ReLU is part of the convolution: 0.5 of the time.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves

from enfold.engines.compare import precision
from enfold.engines.examples import choose_rows, preserve_rng, vary
from enfold.engines.outputs import get_logits
from enfold.engines.skeleton import Skeleton, State

PIECE = 64  # images in one call
READ = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
}  # operations that pass a value to Python


@dataclass(frozen=True)
class _Prepared:
    """The kernel and bias of a fusion in the layout of oneDNN, and the tensors that they were computed from."""

    sources: list[Tensor]  # retained, so that no other tensor gets the same address
    stamps: list[tuple[int, int]]
    kernel: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Fusion:
    """A convolution, the batch norm that alone uses its output, and the ReLU that alone uses the output of that."""

    convolution: nn.Conv2d
    has_bias: bool  # whether the convolution has a bias of its own
    norm: nn.BatchNorm2d
    relu: nn.ReLU | None
    prepared: dict[int, _Prepared] = field(default_factory=dict, compare=False, repr=False)  # by member
    is_verified: bool = field(default=False, compare=False)  # whether `convolve` gave the outputs of the layers

    def fuse(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the kernel and the bias that give normalised outputs.

        g (W * x + b - mean) + shift = (g W) * x + g (b - mean) + shift,  g = scale / sqrt(variance + eps)
        """
        statistics: dict[str, Any] = self.norm._buffers
        scale, shift = self.norm.weight, self.norm.bias
        gain = (statistics["running_var"] + self.norm.eps).rsqrt()
        gain = gain if scale is None else gain * scale
        moved = gain * ((0.0 if bias is None else bias) - statistics["running_mean"])
        return gain[:, None, None, None] * weight, moved if shift is None else moved + shift

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Let the convolution return normalised outputs, the batch norm return its input, and ReLU work in place."""
        own: dict[str, Any] = self.convolution._parameters
        weight, bias = own["weight"], own["bias"] if self.has_bias else None
        fused = self.fuse(weight, bias)
        with ExitStack() as stack:
            stack.callback(own.update, weight=weight, bias=bias)
            own.update(weight=fused[0], bias=fused[1])
            stack.enter_context(_replace_forward(self.norm, _return_input))
            if self.relu is not None:
                stack.enter_context(_replace_forward(self.relu, torch.relu_))
            yield

    def prepare(self, member: int) -> _Prepared:
        """Return the stored kernel of a member, or a new one if a tensor that it is computed from changed."""
        own: dict[str, Any] = self.convolution._parameters
        weight, bias = own["weight"], own["bias"] if self.has_bias else None
        statistics = (self.norm._buffers["running_mean"], self.norm._buffers["running_var"])
        used = [each for each in (weight, bias, self.norm.weight, self.norm.bias, *statistics) if each is not None]
        stamps = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in used]
        found = self.prepared.get(member)
        if found is None or found.stamps != stamps:
            kernel, moved = self.fuse(weight, bias)
            layer = self.convolution
            packed = torch.ops.mkldnn._reorder_convolution_weight(
                kernel, layer.padding, layer.stride, layer.dilation, layer.groups
            )
            found = self.prepared[member] = _Prepared(used, stamps, packed, moved)
        return found

    def convolve(self, member: int, rows: Tensor) -> Tensor:
        """Return the normalised outputs of the convolution, rectified if a ReLU follows."""
        own, layer = self.prepare(member), self.convolution
        after = "none" if self.relu is None else "relu"
        outputs: Tensor = torch.ops.mkldnn._convolution_pointwise(
            rows, own.kernel, own.bias, layer.padding, layer.stride, layer.dilation, layer.groups, after, [], ""
        )
        return outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Fusion:
        convolution, norm = copy.deepcopy(self.convolution, memo), copy.deepcopy(self.norm, memo)
        relu = copy.deepcopy(self.relu, memo)
        return Fusion(convolution, self.has_bias, norm, relu, is_verified=self.is_verified)


@contextmanager
def fuse_all(fusions: Sequence[Fusion], member: int | None = None) -> Iterator[None]:
    """Apply all fusions inside the block; with the index of a member, by its stored kernels."""
    if member is None:
        with ExitStack() as stack:
            for fusion in fusions:
                stack.enter_context(fusion.apply())
            yield
        return
    forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    for fusion in fusions:
        forwards[fusion.convolution] = partial(fusion.convolve, member)
        forwards[fusion.norm] = _return_input
        if fusion.relu is not None:
            forwards[fusion.relu] = _return_input
    try:  # one context for all layers: a context for each would take as long as a small convolution
        for layer, forward in forwards.items():
            layer.__dict__["forward"] = forward
        yield
    finally:
        for layer in forwards:
            layer.__dict__.pop("forward", None)


def can_prepare(fusions: Sequence[Fusion], state: State) -> bool:
    """Return whether all fusions may run by stored kernels.

    Changes of the values must be counted, and nothing may follow or transform the operations: counters of operations,
    tracing, `torch.vmap` and forward-mode derivatives know the usual convolutions only.
    """
    if not fusions or torch.is_autocast_enabled("cpu") or any(tensor.is_inference() for tensor in state.values()):
        return False
    is_followed = (
        is_in_torch_dispatch_mode() or torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0
    )
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    return not (is_followed or is_transformed) and all(fusion.is_verified for fusion in fusions)


def _verify_prepared(network: nn.Module, rows: Tensor, expected: Tensor, found: list[Fusion]) -> list[Fusion]:
    """Return the fusions, marked if their stored kernels give these outputs as well."""
    layers = [fusion.convolution for fusion in found]
    if any(layer.padding_mode != "zeros" or isinstance(layer.padding, str) for layer in layers):
        return found
    try:
        with fuse_all(found, 0):
            outputs = get_logits(network(rows), network)
    except (AttributeError, NotImplementedError, RuntimeError):  # a build without oneDNN, or another dtype
        return found
    finally:
        for fusion in found:
            fusion.prepared.clear()
    return [replace(fusion, is_verified=True) for fusion in found] if _is_close(outputs, expected) else found


def is_plain_eval(network: nn.Module) -> bool:
    """Return whether all modules are in eval mode and none has a forward hook."""
    if _has_global_hooks():
        return False
    return not any(layer.training or layer._forward_hooks or layer._forward_pre_hooks for layer in network.modules())


def _has_global_hooks() -> bool:
    return bool(global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks)


def find_fusions(skeleton: Skeleton, values: State, rows: Tensor) -> list[Fusion] | None:
    """Return the fusions of a network in eval mode, or None if pieces of a batch give other outputs than the batch."""
    stacked = vary({name: tensor.unsqueeze(0) for name, tensor in values.items()}, set(skeleton.parameters))
    own = {name: tensor[0].clone() for name, tensor in stacked.items()}
    before = {name: own[name].clone() for name in skeleton.buffers}
    rows = choose_rows(rows, 1)[0]
    try:
        with preserve_rng(rows), skeleton.use_values(own) as network:
            with _record_calls(network) as seen:
                complete = get_logits(network(rows), network)
            pieces = torch.cat([get_logits(network(rows[:1]), network), get_logits(network(rows[1:]), network)])
            found = seen.find_fusions(skeleton)
            fused = _run_fused(network, rows, found)
            if fused is not None and not torch.is_autocast_enabled("cpu"):
                found = _verify_prepared(network, rows, complete, found)
    except Exception:  # the network does not accept so few rows, e.g. because it squeezes its output
        return None
    unchanged = all(torch.equal(own[name], tensor) for name, tensor in before.items())
    if seen.uses.has_reads or not unchanged or not _is_close(pieces, complete):
        return None
    return found if fused is not None and _is_close(fused, complete) else []


def _run_fused(network: nn.Module, rows: Tensor, fusions: Sequence[Fusion]) -> Tensor | None:
    try:
        with fuse_all(fusions):
            return get_logits(network(rows), network)
    except RuntimeError:  # e.g. layers of different precision
        return None


def _is_close(found: Tensor, expected: Tensor) -> bool:
    scale = max(1e-3, 8 * precision(expected)) * expected.abs().max().clamp_min(1e-6)
    return found.shape == expected.shape and bool(((found - expected).abs() <= scale).all())


class _Uses(TorchDispatchMode):
    """Count how often a tensor is used by an operation, and record whether a value is passed to Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.times: Counter[int] = Counter()
        self.has_reads = False
        self._references: list[Tensor] = []  # so that no other tensor gets the same id

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        self.times.update(map(id, tensors))
        self._references += tensors
        self.has_reads |= func in READ
        return func(*args, **(kwargs or {}))


@dataclass
class _Seen:
    """One call: convolutions, batch norms and ReLUs with their inputs and outputs, and the uses of all tensors."""

    uses: _Uses = field(default_factory=_Uses)
    calls: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)

    def find_fusions(self, skeleton: Skeleton) -> list[Fusion]:
        """Return layers that are called once, and of which one alone uses the output of another."""
        times = Counter(layer for layer, _, _ in self.calls)
        once = [call for call in self.calls if times[call[0]] == 1]
        by_output = {id(output): layer for layer, _, output in once if self.uses.times[id(output)] == 1}
        by_input = {id(given): layer for layer, given, _ in once if self.uses.times[id(given)] == 1}
        found = []
        for norm, given, output in once:
            before, after = by_output.get(id(given)), by_input.get(id(output))
            if isinstance(norm, nn.BatchNorm2d) and isinstance(before, nn.Conv2d) and _can_fuse(before, norm):
                relu = after if isinstance(after, nn.ReLU) else None
                found.append(Fusion(before, "bias" in skeleton.names_in(before), norm, relu))
        return found


@contextmanager
def _record_calls(network: nn.Module) -> Iterator[_Seen]:
    seen = _Seen()

    def record(layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        seen.calls.append((layer, given[0] if given else None, output))  # None: a keyword argument

    with ExitStack() as stack:
        for layer in network.modules():
            if type(layer) in (nn.Conv2d, nn.BatchNorm2d, nn.ReLU) and "forward" not in vars(layer):
                stack.callback(layer.register_forward_hook(record).remove)
        stack.enter_context(seen.uses)
        yield seen


def _can_fuse(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> bool:
    """Return whether both layers have the tensors of the equation, not computed from others."""
    return convolution._parameters.get("weight") is not None and norm._buffers.get("running_var") is not None


@contextmanager
def _replace_forward(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        layer.__dict__.pop("forward", None)


def _return_input(rows: Tensor) -> Tensor:
    return rows
