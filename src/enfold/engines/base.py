"""Engines: three ways to run M networks whose parameters are stacked; all give the same numbers.

On two CPU cores stacked products win for linear layers, and a loop in channels-last for convolutions, where vmap and
grouped convolution lose to a plain loop; `make bench` measures it (results/bench-members.json).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.engines.inference import PIECE, Shortcut, all_folded, is_watched, shortcuts_of
from enfold.engines.layout import runs_channels_last
from enfold.engines.outputs import logits_of
from enfold.engines.skeleton import Skeleton, State
from enfold.engines.usage import unbind_watched

EngineName = Literal["auto", "measure", "stacked", "loop", "vmap"]
Engine = Callable[[State, Tensor, bool], Tensor]  # (state, inputs, each) -> (M, B, C)


def image_layout(network: nn.Module, inputs: Tensor) -> Tensor:
    """Images in channels-last where the network convolves on a CPU: there it is up to twice as fast."""
    return laid_out(inputs, inputs.ndim == 4 and runs_channels_last(network))


def laid_out(inputs: Tensor, channels_last: bool, *, copy: bool = False) -> Tensor:
    """Images on a CPU in channels-last if wanted; anything else as it is, or a copy for code that writes to it."""
    if channels_last and inputs.ndim == 4 and inputs.device.type == "cpu":
        arranged = inputs.contiguous(memory_format=torch.channels_last)
        return arranged.clone() if copy and arranged is inputs else arranged
    return inputs.clone() if copy else inputs


class Loop:
    """One network after the other, each with its slice of the stacked state.

    All run the code of the first network, or each its own: separate modules.

    Images are taken in pieces of 64 where no gradient is wanted: what a convolution gives for more of them is too large
    to be kept by the allocator, and is fetched from the system again, page by page, in each call. That took as long as
    the arithmetic, and came and went with what else the process had allocated. Batch norms in eval mode are then taken
    into the convolutions before them.
    """

    def __init__(self, codes: Skeleton | Sequence[Skeleton]) -> None:
        self.codes = [codes] if isinstance(codes, Skeleton) else list(codes)
        self.skeleton = self.codes[0]
        self.channels_last = runs_channels_last(self.skeleton.network)
        self._shortcuts: dict[object, list[Shortcut] | None] = {}  # by shape and kind of images; None: take all at once

    def code(self, index: int) -> Skeleton:
        """Return the code that member `index` runs."""
        return self.codes[index] if len(self.codes) > 1 else self.skeleton

    def given(self, inputs: Tensor) -> Tensor:
        """Return inputs as a member takes them: laid out, and its own where the code writes to them."""
        return laid_out(inputs, self.channels_last, copy=self.writes_inputs)

    @property
    def writes_inputs(self) -> bool:
        """Whether a member works in place on its inputs."""
        return any(code.writes_inputs for code in self.codes)

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        slices = {name: self.slices(name, tensor) for name, tensor in state.items()}
        num_members = len(next(iter(slices.values())))
        shared = None if each or self.writes_inputs else self.given(inputs)
        shortcuts = self._allowed(state, inputs[0] if each else inputs)
        outputs = []
        for index in range(num_members):
            own = self.given(inputs[index] if each else inputs) if shared is None else shared
            with self.code(index).holding({name: tensors[index] for name, tensors in slices.items()}) as network:
                if shortcuts is None:
                    outputs.append(logits_of(network(own)))
                    continue
                with all_folded(shortcuts):
                    outputs.append(torch.cat([logits_of(network(rows)) for rows in own.split(PIECE)]))
        return torch.stack(outputs)

    def slices(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Return every member's own tensor of that name."""
        # Torch lets nobody write to what `unbind` gives, and prediction changes nothing.
        if any(name in code.written for code in self.codes):
            own = [tensor[index] for index in range(len(tensor))]
            return own if torch.is_grad_enabled() else [each.clone() for each in own]
        return unbind_watched(name, tensor, self.skeleton)

    def _allowed(self, state: State, rows: Tensor) -> list[Shortcut] | None:
        """What to shorten if the rows are taken in pieces; None: they are taken at once, and nothing is shortened."""
        small = len(rows) <= PIECE or rows.ndim != 4 or rows.device.type != "cpu" or len(self.codes) > 1
        if small or not self.channels_last or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        network = self.skeleton.network
        if any(part.training for part in network.modules()) or is_watched(network):
            return None
        kind = (rows.shape[1:], rows.dtype, torch.is_autocast_enabled("cpu"))
        if kind not in self._shortcuts:
            first = {name: tensor[0] for name, tensor in state.items()}
            self._shortcuts[kind] = shortcuts_of(self.skeleton, first, rows[:3])
        return self._shortcuts[kind]


class Vmap:
    """All networks at once by torch.vmap; dropout draws differ between members."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""

        def one(values: State, own: Tensor) -> Tensor:
            with self.skeleton.holding(values, again=False) as network:
                return logits_of(network(own))

        in_dims = (0, 0 if each else None)
        outputs: Tensor = torch.vmap(one, in_dims=in_dims, randomness="different")(state, inputs)
        return outputs
