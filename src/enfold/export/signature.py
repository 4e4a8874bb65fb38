"""The inputs of an exported graph: named tensors in place of a batch of any structure, and batches to compare with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.tree import count_examples, describe, is_container, map_tensors, tensors
from enfold.ensemble import called_network
from enfold.errors import EnfoldError

NOISE = 0.1  # of examples that are repeated, in standard deviations
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Signature:
    """The structure of the inputs of a model, and the names of its tensors in the graph.

    Args:
        example: A batch as the network takes it; tensors in half precision are float32 in the graph.
        names: The name of each tensor, in the order of `data.tree.tensors`.
    """

    example: Any
    names: tuple[str, ...]

    def rebuild(self, values: Sequence[Tensor]) -> Any:
        """Return a batch in the structure of the example from its tensors."""
        remaining: Iterator[Tensor] = iter(values)
        return map_tensors(lambda _: next(remaining), self.example)

    def batch(self, size: int) -> list[Tensor]:
        """Return the tensors of a batch of a size: examples, and then examples with noise.

        Integers are repeated unchanged, as other values may be outside of a vocabulary.
        """
        source = torch.Generator().manual_seed(size)
        return [_resize(tensor.detach().cpu(), size, source) for tensor in tensors(self.example)]

    def describe(self, values: Sequence[Tensor]) -> dict[str, dict[str, Any]]:
        """Return the type and the shape of each input; the axis of the batch is "batch"."""
        return {name: spec(tensor) for name, tensor in zip(self.names, values, strict=True)}


def spec(tensor: Tensor, batch_axis: int = 0) -> dict[str, Any]:
    """Return the type and the shape of a tensor, with "batch" for the axis of the batch."""
    shape: list[int | str] = list(tensor.shape)
    if shape:
        shape[batch_axis] = "batch"
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}


def make_signature(model: nn.Module, example: Any) -> Signature:
    """Return the signature of a model for a batch of examples.

    Raises:
        EnfoldError: If the example is missing, or not tensors with one row per example.
    """
    if example is None:
        raise EnfoldError(
            "example must be a batch of inputs, on which the file is compared with the model, got None: pass example=x"
        )
    if isinstance(example, Mapping):
        example = {name: value for name, value in example.items() if value is not None}
    if not is_container(example) or not tensors(example):
        raise EnfoldError(
            f"example must be a tensor, or a tuple, list or dict of tensors, got {describe(example)}: pass the inputs "
            "as the network takes them; networks of other objects, such as graphs, cannot be exported"
        )
    if not count_examples(example):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors(example))
        raise EnfoldError(
            f"example must have tensors with one row per example and at least one example, got shapes {shapes}: pass a "
            "batch of inputs (B, ...)"
        )
    example = map_tensors(lambda each: each.float() if each.dtype in HALF else each, example)
    names = _names(called_network(model), example)
    if len(set(names)) < len(names):
        raise EnfoldError(f"the inputs must have different names, got {', '.join(names)}: rename the keys of example")
    return Signature(example, names)


def _names(network: nn.Module, example: Any) -> tuple[str, ...]:
    if isinstance(example, Tensor):
        return ("input",)
    if isinstance(example, Mapping):
        return tuple(name for key, value in example.items() for name in _expand_names(str(key), value))
    arguments = [each.name for each in _positional(network)]
    own = arguments if len(arguments) >= len(example) else [f"input_{index}" for index in range(len(example))]
    return tuple(name for key, value in zip(own, example, strict=False) for name in _expand_names(key, value))


def _expand_names(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [name]
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [inner for key, each in items for inner in _expand_names(f"{name}_{key}", each)]


def _positional(network: nn.Module) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(network.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _resize(tensor: Tensor, size: int, source: torch.Generator) -> Tensor:
    """Return the first examples, and, if there are fewer, examples again with noise."""
    rows = tensor[torch.arange(size) % len(tensor)].clone(memory_format=torch.contiguous_format)
    if size > len(tensor) and tensor.is_floating_point():
        spread = tensor.std(correction=0).clamp_min(1e-3)
        added = rows[len(tensor) :]
        added += NOISE * spread * torch.randn(added.shape, generator=source).to(added)
    return rows
