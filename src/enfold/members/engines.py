"""Engines: three ways to run M networks whose parameters are stacked; all give the same numbers.

On two CPU cores stacked products win for linear layers, and a loop in channels-last for convolutions, where vmap and
grouped convolution lose to a plain loop; `make bench` measures it (results/bench-members.json).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from enfold.errors import EnfoldError
from enfold.members.layout import runs_channels_last
from enfold.members.skeleton import Skeleton, State
from enfold.members.trial import examples_of, same_draws, varied

PIECE = 64  # images of one convolution at a time

EngineName = Literal["auto", "measure", "stacked", "loop", "vmap"]
Engine = Callable[[State, Tensor, bool], Tensor]  # (state, inputs, each) -> (M, B, C)


def logits_of(output: Any) -> Tensor:
    """The logits in what a network returns: a tensor, or an object or dictionary with `logits`."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise EnfoldError(
            f"a network must return a tensor of logits or an object with `logits`, got {type(output).__name__}: "
            "wrap it in a module that returns the logits"
        )
    return logits


def image_layout(network: nn.Module, inputs: Tensor) -> Tensor:
    """Images in channels-last where the network convolves on a CPU: there it is up to twice as fast."""
    return laid_out(inputs, inputs.ndim == 4 and runs_channels_last(network))


def laid_out(inputs: Tensor, channels_last: bool) -> Tensor:
    """Images on a CPU in channels-last if wanted; anything else as it is."""
    if channels_last and inputs.ndim == 4 and inputs.device.type == "cpu":
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs


class Loop:
    """One network after the other, each with its slice of the stacked state.

    Images are taken in pieces of 64 where no gradient is wanted: what a convolution gives for more of them is too large
    to be kept by the allocator, and is fetched from the system again, page by page, in each call. That took as long as
    the arithmetic, and came and went with what else the process had allocated.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.channels_last = runs_channels_last(skeleton.network)
        self._divides: bool | None = None  # whether pieces give what the whole batch gives; found when first needed

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        slices = {name: tensor.unbind(0) for name, tensor in state.items()}
        num_members = len(next(iter(slices.values())))
        shared = None if each else laid_out(inputs, self.channels_last)
        size = self._piece(state, inputs[0] if each else inputs)
        outputs = []
        for index in range(num_members):
            own = laid_out(inputs[index], self.channels_last) if shared is None else shared
            with self.skeleton.holding({name: tensors[index] for name, tensors in slices.items()}) as network:
                parts = [logits_of(network(rows)) for rows in own.split(size)] if size else [logits_of(network(own))]
            outputs.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return torch.stack(outputs)

    def _piece(self, state: State, rows: Tensor) -> int | None:
        """How many rows to take at a time; None: all."""
        small = len(rows) <= PIECE or rows.ndim != 4 or rows.device.type != "cpu"
        if small or not self.channels_last or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if any(part.training for part in self.skeleton.network.modules()):
            return None
        if self._divides is None:
            self._divides = divides(self.skeleton, {name: tensor[0] for name, tensor in state.items()}, rows[:3])
        return PIECE if self._divides else None


def divides(skeleton: Skeleton, values: State, rows: Tensor) -> bool:
    """Whether a network gives for one row and the others what it gives for all, and leaves its buffers alone.

    Rows and parameters are varied, so that nothing hides behind equal rows or a layer of zeros.
    """
    stacked = varied({name: tensor.unsqueeze(0) for name, tensor in values.items()}, set(skeleton.parameters))
    own = {name: tensor[0].clone() for name, tensor in stacked.items()}
    before = {name: own[name].clone() for name in skeleton.buffers}
    rows = examples_of(rows, 1)[0]
    try:
        with same_draws(rows), skeleton.holding(own) as network:
            whole = logits_of(network(rows))
            parts = torch.cat([logits_of(network(rows[:1])), logits_of(network(rows[1:]))])
    except Exception:  # it does not take so few, as networks that squeeze or that need whole groups of rows
        return False
    scale = whole.abs().max().clamp_min(1e-6)
    same = parts.shape == whole.shape and bool(((parts - whole).abs() <= 1e-3 * scale).all())
    return same and all(torch.equal(own[name], tensor) for name, tensor in before.items())


class Vmap:
    """All networks at once by torch.vmap; dropout draws differ between members."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""

        def one(values: State, own: Tensor) -> Tensor:
            with self.skeleton.holding(values) as network:
                return logits_of(network(own))

        in_dims = (0, 0 if each else None)
        outputs: Tensor = torch.vmap(one, in_dims=in_dims, randomness="different")(state, inputs)
        return outputs
