"""All members in one pass over the merged batch, (M * B, ...): what they share, they share also as batch statistics.

A layer in which members differ takes its rows member by member; every other layer sees the rows of all members at
once. So a batch norm that all members share normalises in training by the statistics of all members together, as in
implementations that repeat the batch M times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from enfold.engines.base import Loop, laid_out
from enfold.engines.layout import runs_channels_last
from enfold.engines.modes import evaluating
from enfold.engines.outputs import logits_of
from enfold.engines.program import CannotRun, unmerged
from enfold.engines.recompute import repeated
from enfold.engines.skeleton import Skeleton, State


class Merged:
    """The engine; `own` names the tensors in which members differ."""

    def __init__(self, skeleton: Skeleton, own: Collection[str]) -> None:
        self.skeleton = skeleton
        self.channels_last = runs_channels_last(skeleton.network)
        self.layers: list[tuple[nn.Module, dict[str, str]]] = []
        for path, module in skeleton.network.named_modules():
            names = {key: name for key, name in skeleton.names_in(module).items() if name in own}
            if not names:
                continue
            if any(True for _ in module.children()) or _is_used_by_its_parent(skeleton.network, path):
                raise CannotRun(f"members differ in '{path}', which is no layer of its own")
            self.layers.append((module, names))

    def __call__(self, state: State, inputs: Tensor, each: bool) -> Tensor:
        """(B, ...) or, with `each`, (M, B, ...) -> (M, B, C)."""
        num_members = len(next(iter(state.values())))
        rows = inputs.flatten(0, 1) if each else inputs.repeat(num_members, *(1,) * (inputs.ndim - 1))
        first = {name: tensor[0] for name, tensor in state.items()}
        with self.skeleton.holding(first) as network, repeated(partial(self._divided, state, num_members)):
            outputs = logits_of(network(laid_out(rows, self.channels_last)))
        if len(outputs) != len(rows):
            raise CannotRun("it does not give one output an example")
        return unmerged(outputs, num_members)

    @contextmanager
    def _divided(self, state: State, num_members: int) -> Iterator[None]:
        """Layers in which members differ take their rows member by member."""
        with ExitStack() as stack:
            for layer, names in self.layers:
                stack.enter_context(_member_by_member(layer, names, state, num_members))
            yield

    @torch.no_grad()
    def passed(self, state: State, inputs: Tensor) -> Merged:
        """The engine, if in eval mode it gives what the members give one by one."""
        with evaluating(self.skeleton.network):
            self.skeleton.network.eval()
            few = inputs[:3]
            values = {name: tensor.detach().clone() for name, tensor in state.items()}
            try:
                same = torch.allclose(self(values, few, False), Loop(self.skeleton)(values, few, False), 1e-3, 1e-4)
            except (RuntimeError, ValueError, TypeError) as error:
                raise CannotRun(f"it does not run on a merged batch ({error})") from error
        if not same:
            raise CannotRun("it does not give on a merged batch what the members give one by one")
        return self


@contextmanager
def _member_by_member(layer: nn.Module, names: dict[str, str], state: State, num_members: int) -> Iterator[None]:
    """The layer with each member's own tensors for that member's rows."""
    places: list[tuple[dict[str, Any], str]] = [
        (layer._parameters if key in layer._parameters else layer._buffers, key) for key in names
    ]
    slices = [state[name].unbind(0) for name in names.values()]
    original = layer.forward

    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        outputs = []
        for index, part in enumerate(rows.chunk(num_members)):
            for (held, key), tensors in zip(places, slices, strict=True):
                held[key] = tensors[index]
            outputs.append(original(part, *args, **kwargs))
        for (held, key), tensors in zip(places, slices, strict=True):
            held[key] = tensors[0]  # what `holding` expects to find
        return torch.cat(outputs)

    layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def _is_used_by_its_parent(network: nn.Module, path: str) -> bool:
    """Attention reads its output layer's weights without calling it."""
    parent = network.get_submodule(path.rpartition(".")[0]) if path else network
    return isinstance(parent, nn.MultiheadAttention | nn.TransformerEncoderLayer)
