"""The inputs of an exported graph: named tensors in place of a batch of any structure, and batches to compare with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.tree import count_examples, describe, is_container, map_tensors, tensors
from enfold.engines.inputs import from_arrays
from enfold.ensemble import called_network
from enfold.errors import EnfoldError

PARTS = (0.5, 0.75, 1.0)  # of the lengths of axes that vary
SHORTEST = 4  # length of an axis that varies
NOISE = 0.1  # of examples that are repeated, in standard deviations
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Signature:
    """The structure of the inputs of a model, and the names of its tensors in the graph.

    Args:
        example: A batch as the network takes it; tensors in half precision are float32 in the graph.
        names: The name of each tensor, in the order of `data.tree.tensors`.
        axes: By the name of a tensor, the names of its axes that vary beside that of the examples.
    """

    example: Any
    names: tuple[str, ...]
    axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    def rebuild(self, values: Sequence[Tensor]) -> Any:
        """Return a batch in the structure of the example from its tensors."""
        remaining: Iterator[Tensor] = iter(values)
        return map_tensors(lambda _: next(remaining), self.example)

    def batch(self, size: int, step: int | None = None) -> list[Tensor]:
        """Return the tensors of a batch of a size: examples, and then examples with noise.

        Integers are repeated unchanged, as other values may be outside of a vocabulary.

        Args:
            size: The number of examples.
            step: A number for other lengths of the axes that vary; None for those of the example.
        """
        source = torch.Generator().manual_seed(size)
        found = [_resize(tensor.detach().cpu(), size, source) for tensor in tensors(self.example)]
        if step is None:
            return found
        return [self._shorten(name, tensor, step) for name, tensor in zip(self.names, found, strict=True)]

    def _shorten(self, name: str, tensor: Tensor, step: int) -> Tensor:
        labels = list(dict.fromkeys(label for axes in self.axes.values() for label in axes.values()))
        for axis, label in self.axes.get(name, {}).items():
            part = PARTS[(step + labels.index(label)) % len(PARTS)]
            tensor = tensor.narrow(axis, 0, int(part * tensor.shape[axis]))
        return tensor.contiguous()

    def lengths(self, values: Sequence[Tensor]) -> dict[str, int]:
        """Return the lengths of the named axes in a batch."""
        named = dict(zip(self.names, values, strict=True))
        return {name: named[tensor].shape[axis] for tensor, axes in self.axes.items() for axis, name in axes.items()}

    def describe(self, values: Sequence[Tensor]) -> dict[str, dict[str, Any]]:
        """Return the type and the shape of each input, with the names of axes that vary."""
        return {name: spec(tensor, self.axes.get(name)) for name, tensor in zip(self.names, values, strict=True)}


def spec(tensor: Tensor, axes: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return the type and the shape of a tensor, with "batch" for the first axis, and the names of other axes."""
    names = {0: "batch", **(axes or {})}
    shape = [names.get(axis, size) for axis, size in enumerate(tensor.shape)]
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}


def make_signature(model: nn.Module, example: Any, axes: Any = None) -> Signature:
    """Return the signature of a model for a batch of examples.

    Args:
        model: The model.
        example: The batch, of tensors or numpy arrays.
        axes: Axes that vary beside the first, by the name of the input: ``{"input_ids": {1: "tokens"}}``.

    Raises:
        EnfoldError: If the example is missing, or not tensors with one row per example, or an axis does not exist.
    """
    if example is None:
        raise EnfoldError(
            "example must be a batch of inputs, on which the file is compared with the model, got None: pass example=x"
        )
    example = from_arrays(model, example)
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
    return Signature(example, names, _check_axes(axes, dict(zip(names, tensors(example), strict=True))))


def _check_axes(given: Any, inputs: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Return the axes that vary, after a check of their form."""
    if given is None:
        return {}
    form = 'pass for example dynamic_axes={"input_ids": {1: "tokens"}}'
    if not isinstance(given, Mapping) or not all(isinstance(each, Mapping) for each in given.values()):
        raise EnfoldError(f"dynamic_axes must have the names of axes by input and number, got {given!r}: {form}")
    lengths: dict[str, int] = {}
    for name, axes in given.items():
        if name not in inputs:
            raise EnfoldError(f"dynamic_axes must have names of inputs, {', '.join(inputs)}, got {name!r}: {form}")
        for axis, label in axes.items():
            if not isinstance(axis, int) or not 0 < axis < inputs[name].ndim:
                last = inputs[name].ndim - 1
                raise EnfoldError(f"dynamic_axes must have axes of '{name}' from 1 to {last}, got {axis!r}: {form}")
            if not str(label).isidentifier() or label == "batch":
                raise EnfoldError(f"dynamic_axes must have names such as 'tokens', got {label!r}: {form}")
            length = inputs[name].shape[axis]
            if length < SHORTEST or lengths.setdefault(label, length) != length:
                raise EnfoldError(
                    f"example must have the same length of at least {SHORTEST} for '{label}' in all inputs, got "
                    f"{length} in '{name}': pass longer examples, or another name for the axis"
                )
    return {name: dict(axes) for name, axes in given.items()}


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
