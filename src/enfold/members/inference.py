"""What a loop may do where no gradient is wanted: take images in pieces, and batch norms into convolutions.

Both are used only after they gave what the network gives, for a few varied examples and varied parameters, so that
nothing hides behind equal rows or a layer of zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enfold.members.outputs import logits_of
from enfold.members.skeleton import Skeleton, State
from enfold.members.trial import examples_of, same_draws, varied

PIECE = 64  # images of one convolution at a time


@dataclass(frozen=True)
class Shortcut:
    """A convolution, the batch norm that alone takes its outputs, and the rectifier that alone takes that one's."""

    convolution: nn.Conv2d
    norm: nn.BatchNorm2d
    rectifier: nn.ReLU | None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The normalised convolution; the batch norm passes it on, and the rectifier works in place.

        g (W * x + b - mean) + shift = (g W) * x + g (b - mean) + shift,  g = scale / sqrt(variance + eps)
        """
        norm = self.norm
        held: dict[str, Any] = self.convolution._parameters
        weight, bias = held["weight"], held["bias"]
        mean, variance = norm._buffers["running_mean"], norm._buffers["running_var"]
        assert mean is not None  # noqa: S101 - so it was chosen
        assert variance is not None  # noqa: S101
        gain = (variance + norm.eps).rsqrt()
        gain = gain if norm.weight is None else gain * norm.weight
        centred = -mean if bias is None else bias - mean
        shift = gain * centred if norm.bias is None else torch.addcmul(norm.bias, gain, centred)
        with ExitStack() as stack:
            stack.callback(held.update, weight=weight, bias=bias)
            held.update(weight=weight * gain[:, None, None, None], bias=shift)
            stack.enter_context(_forward(norm, _as_it_is))
            if self.rectifier is not None:
                stack.enter_context(_forward(self.rectifier, torch.relu_))
            yield

    @property
    def is_watched(self) -> bool:
        """Whether someone's hook would see other values than the layer's own."""
        parts = (self.convolution, self.norm, self.rectifier)
        return any(part is not None and (part._forward_hooks or part._forward_pre_hooks) for part in parts)


@contextmanager
def taking(shortcuts: Sequence[Shortcut]) -> Iterator[None]:
    """All of them, where nobody watches the layers."""
    with ExitStack() as stack:
        for shortcut in shortcuts:
            if not shortcut.is_watched:
                stack.enter_context(shortcut.taken())
        yield


def shortcuts_of(skeleton: Skeleton, values: State, rows: Tensor) -> list[Shortcut] | None:
    """The shortcuts of a network in eval mode; None where even pieces of a batch do not give what the batch gives."""
    stacked = varied({name: tensor.unsqueeze(0) for name, tensor in values.items()}, set(skeleton.parameters))
    own = {name: tensor[0].clone() for name, tensor in stacked.items()}
    before = {name: own[name].clone() for name in skeleton.buffers}
    rows = examples_of(rows, 1)[0]
    try:
        with same_draws(rows), skeleton.holding(own) as network:
            found: list[Shortcut] = []
            with _watching(network, found):
                whole = logits_of(network(rows))
            parts = torch.cat([logits_of(network(rows[:1])), logits_of(network(rows[1:]))])
            with taking(found):
                shorter = logits_of(network(rows))
    except Exception:  # it does not take so few, as networks that squeeze or that need whole groups of rows
        return None
    if not _same(parts, whole) or not all(torch.equal(own[name], tensor) for name, tensor in before.items()):
        return None
    return found if _same(shorter, whole) else []


def _same(found: Tensor, expected: Tensor) -> bool:
    scale = expected.abs().max().clamp_min(1e-6)
    return found.shape == expected.shape and bool(((found - expected).abs() <= 1e-3 * scale).all())


@contextmanager
def _watching(network: nn.Module, found: list[Shortcut]) -> Iterator[None]:
    """Fills `found` with what could be shortened: layers called once, of which one takes what another gave."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls.append((module, inputs[0] if inputs else output, output))

    with ExitStack() as stack:
        for module in network.modules():
            if type(module) in (nn.Conv2d, nn.BatchNorm2d, nn.ReLU) and "forward" not in vars(module):
                stack.callback(module.register_forward_hook(note).remove)
        yield
    times = Counter(module for module, _, _ in calls)
    once = [call for call in calls if times[call[0]] == 1]
    convolutions = {id(output): module for module, _, output in once if isinstance(module, nn.Conv2d)}
    rectifiers = {id(taken): module for module, taken, _ in once if isinstance(module, nn.ReLU)}
    for norm, taken, output in once:
        convolution = convolutions.get(id(taken))
        if isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None and convolution is not None:
            found.append(Shortcut(convolution, norm, rectifiers.get(id(output))))


@contextmanager
def _forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]


def _as_it_is(rows: Tensor) -> Tensor:
    return rows
