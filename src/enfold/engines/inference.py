"""What a loop may do where no gradient is wanted: take images in pieces, and batch norms into convolutions.

Both are used only where one call with three examples showed that nothing but the next layer takes what lies between a
convolution and its batch norm, and that nothing is decided by values; and only after they gave what the network gives,
for varied examples and parameters, so that nothing hides behind equal rows or a layer of zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from enfold.engines.outputs import logits_of
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.trial import examples_of, same_draws, varied

PIECE = 64  # images of one convolution at a time
READ = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}  # a value goes to Python


@dataclass(frozen=True)
class Shortcut:
    """A convolution, the batch norm that alone takes its outputs, and the rectifier that alone takes that one's."""

    convolution: nn.Conv2d
    has_bias: bool  # of its own, when nothing is folded
    norm: nn.BatchNorm2d
    rectifier: nn.ReLU | None

    @contextmanager
    def folded(self) -> Iterator[None]:
        """The convolution gives normalised outputs, the batch norm passes them on, the rectifier works in place.

        g (W * x + b - mean) + shift = (g W) * x + g (b - mean) + shift,  g = scale / sqrt(variance + eps)
        """
        held: dict[str, Any] = self.convolution._parameters
        statistics: dict[str, Any] = self.norm._buffers
        weight, bias = held["weight"], held["bias"] if self.has_bias else None
        scale, shift = self.norm.weight, self.norm.bias
        gain = (statistics["running_var"] + self.norm.eps).rsqrt()
        gain = gain if scale is None else gain * scale
        moved = gain * ((0.0 if bias is None else bias) - statistics["running_mean"])
        with ExitStack() as stack:
            stack.callback(held.update, weight=weight, bias=bias)
            held.update(weight=gain[:, None, None, None] * weight, bias=moved if shift is None else moved + shift)
            stack.enter_context(_with_forward(self.norm, _as_it_is))
            if self.rectifier is not None:
                stack.enter_context(_with_forward(self.rectifier, torch.relu_))
            yield


@contextmanager
def all_folded(shortcuts: Sequence[Shortcut]) -> Iterator[None]:
    """All of them."""
    with ExitStack() as stack:
        for shortcut in shortcuts:
            stack.enter_context(shortcut.folded())
        yield


def is_watched(network: nn.Module) -> bool:
    """Whether someone's hook looks at what layers are given or give, and would see something else."""
    everywhere = hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks
    return bool(everywhere) or any(part._forward_hooks or part._forward_pre_hooks for part in network.modules())


def shortcuts_of(skeleton: Skeleton, values: State, rows: Tensor) -> list[Shortcut] | None:
    """The shortcuts of a network in eval mode; None where even pieces of a batch do not give what the batch gives."""
    stacked = varied({name: tensor.unsqueeze(0) for name, tensor in values.items()}, set(skeleton.parameters))
    own = {name: tensor[0].clone() for name, tensor in stacked.items()}
    before = {name: own[name].clone() for name in skeleton.buffers}
    rows = examples_of(rows, 1)[0]
    try:
        with same_draws(rows), skeleton.holding(own) as network:
            with _watching(network) as seen:
                whole = logits_of(network(rows))
            parts = torch.cat([logits_of(network(rows[:1])), logits_of(network(rows[1:]))])
            found = seen.shortcuts(skeleton)
            shorter = _shortened(network, rows, found)
    except Exception:  # it does not take so few, as networks that squeeze or that need whole groups of rows
        return None
    unchanged = all(torch.equal(own[name], tensor) for name, tensor in before.items())
    if seen.uses.are_read or not unchanged or not _same(parts, whole):
        return None
    return found if shorter is not None and _same(shorter, whole) else []


def _shortened(network: nn.Module, rows: Tensor, shortcuts: Sequence[Shortcut]) -> Tensor | None:
    try:
        with all_folded(shortcuts):
            return logits_of(network(rows))
    except RuntimeError:  # as layers of different precision
        return None


def _same(found: Tensor, expected: Tensor) -> bool:
    scale = expected.abs().max().clamp_min(1e-6)
    return found.shape == expected.shape and bool(((found - expected).abs() <= 1e-3 * scale).all())


class _Uses(TorchDispatchMode):
    """Counts how often an operation takes a tensor, and notes whether a value is read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.times: Counter[int] = Counter()
        self.are_read = False
        self._kept: list[Tensor] = []  # so that no other tensor gets the same id

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to be skipped by a compiler takes importing it, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        self.times.update(map(id, tensors))
        self._kept += tensors
        self.are_read |= func in READ
        return func(*args, **(kwargs or {}))


@dataclass
class _Seen:
    """One call: the layers that could be shortened with what each was given and gave, and the uses of all tensors."""

    uses: _Uses = field(default_factory=_Uses)
    calls: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)

    def shortcuts(self, skeleton: Skeleton) -> list[Shortcut]:
        """Layers called once, of which one alone takes what another gave."""
        times = Counter(layer for layer, _, _ in self.calls)
        once = [call for call in self.calls if times[call[0]] == 1]
        gave = {id(output): layer for layer, _, output in once if self.uses.times[id(output)] == 1}
        takes = {id(given): layer for layer, given, _ in once if self.uses.times[id(given)] == 1}
        found = []
        for norm, given, output in once:
            before, after = gave.get(id(given)), takes.get(id(output))
            if isinstance(norm, nn.BatchNorm2d) and isinstance(before, nn.Conv2d) and _can_fold(before, norm):
                rectifier = after if isinstance(after, nn.ReLU) else None
                found.append(Shortcut(before, "bias" in skeleton.names_in(before), norm, rectifier))
        return found


@contextmanager
def _watching(network: nn.Module) -> Iterator[_Seen]:
    seen = _Seen()

    def note(layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        seen.calls.append((layer, given[0] if given else None, output))  # None: it was given by name

    with ExitStack() as stack:
        for layer in network.modules():
            if type(layer) in (nn.Conv2d, nn.BatchNorm2d, nn.ReLU) and "forward" not in vars(layer):
                stack.callback(layer.register_forward_hook(note).remove)
        stack.enter_context(seen.uses)
        yield seen


def _can_fold(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> bool:
    """Whether both have what the equation needs, and hold it themselves."""
    return convolution._parameters.get("weight") is not None and norm._buffers.get("running_var") is not None


@contextmanager
def _with_forward(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        layer.__dict__.pop("forward", None)


def _as_it_is(rows: Tensor) -> Tensor:
    return rows
