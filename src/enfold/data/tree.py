"""Inputs of any structure: tensors, and containers and objects with tensors in them.

Tuples, lists, dictionaries, dataclasses and named tuples are containers. Other objects, such as a batch of graphs, are
copied with their tensors replaced; objects with a method `to` move themselves to a device.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from enfold.errors import EnfoldError

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a copy of the tree with the function applied to each tensor; the tree is unchanged.

    Args:
        function: Function from a tensor to a tensor.
        tree: Inputs of any structure. A mapping becomes a dictionary.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, PLAIN):
        return tree
    if isinstance(tree, Mapping):
        return {name: map_tensors(function, value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [map_tensors(function, value) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if callable(getattr(tree, "apply", None)) and not isinstance(tree, type):  # graphs and tensor dictionaries
        return copy.copy(tree).apply(function)
    return _map_attributes(function, tree)


def _map_attributes(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    found = _attributes(tree)
    if not any(tensors(value) for value in found.values()):
        return tree
    twin = copy.copy(tree)
    for name, value in found.items():
        object.__setattr__(twin, name, map_tensors(function, value))
    return twin


def _attributes(tree: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return dict(vars(tree)) if hasattr(tree, "__dict__") and not isinstance(tree, type) else {}


def tensors(tree: Any) -> list[Tensor]:
    """Return all tensors of a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    if isinstance(tree, Mapping):
        return [tensor for value in tree.values() for tensor in tensors(value)]
    if isinstance(tree, list | tuple):
        return [tensor for value in tree for tensor in tensors(value)]
    if isinstance(tree, PLAIN):
        return []
    if callable(getattr(tree, "apply", None)) and not isinstance(tree, type):
        copy.copy(tree).apply(record)
        return found
    return [tensor for value in _attributes(tree).values() for tensor in tensors(value)]


def is_container(tree: Any) -> bool:
    """Return whether a tree consists of containers of tensors and None alone, so that its structure is known."""
    if isinstance(tree, Mapping):
        return all(is_container(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return all(is_container(value) for value in tree)
    return tree is None or isinstance(tree, Tensor)


def clone(tree: Any) -> Any:
    """Return a copy of a tree with its own tensors."""
    return map_tensors(torch.clone, tree)


def detach(tree: Any) -> Any:
    """Return a tree with detached tensors."""
    return map_tensors(Tensor.detach, tree)


def to_device(tree: Any, device: torch.device | str) -> Any:
    """Return a tree on a device; objects with a method `to` move themselves."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True)
    if isinstance(tree, PLAIN):
        return tree
    if hasattr(tree, "to") and callable(tree.to):
        return copy.copy(tree).to(device)
    if isinstance(tree, Mapping):
        return {name: to_device(value, device) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [to_device(value, device) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)


def named_tensors(tree: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors of containers with their names, such as "image" or "0.mask"; of other objects none."""
    if isinstance(tree, Tensor):
        return [(name, tree)]
    items: Any = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    return [found for key, value in items for found in named_tensors(value, f"{name}.{key}" if name else str(key))]


def device_of(tree: Any) -> torch.device:
    """Return the device of the first tensor of a tree; the CPU if it has none."""
    if isinstance(tree, Tensor):
        return tree.device
    return next((tensor.device for tensor in tensors(tree)), torch.device("cpu"))


def count_examples(tree: Any) -> int | None:
    """Return the number of examples in a batch: the length that all its tensors have in common; None if unknown."""
    if isinstance(tree, Tensor):
        return len(tree) if tree.ndim else None
    if not is_container(tree):
        return None
    lengths = {len(tensor) if tensor.ndim else None for tensor in tensors(tree)}
    return lengths.pop() if len(lengths) == 1 else None


def first_examples(tree: Any, number: int) -> Any | None:
    """Return the first examples of a batch; None if its examples cannot be told apart, as in a batch of graphs."""
    if isinstance(tree, Tensor):
        return tree[:number]
    size = count_examples(tree)
    return None if size is None else map_tensors(lambda tensor: tensor[:number], tree)


def describe_structure(tree: Any) -> object:
    """Return an object that is equal for trees with tensors and other values at the same places."""
    if isinstance(tree, Tensor):
        return Tensor
    if isinstance(tree, Mapping):
        return dict, tuple((name, describe_structure(value)) for name, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree), tuple(describe_structure(value) for value in tree)
    return type(tree)


def layout(tree: Any) -> Any:
    """Return the structure of a batch with the shape and type of one example; equal for batches that can be joined."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape[1:]), tree.dtype
    if isinstance(tree, Mapping):
        return tuple((name, layout(value)) for name, value in tree.items())
    return [type(tree), *(layout(value) for value in tree)]


def join_examples(batches: Sequence[Any]) -> Any:
    """Return batches of one `layout` as one batch, one after the other."""
    if len(batches) == 1:
        return batches[0]
    others = [iter(tensors(batch)) for batch in batches]
    return map_tensors(lambda _: torch.cat([next(each) for each in others]), batches[0])


def split_examples(tree: Any, number: int) -> list[Any]:
    """Return a batch in parts of at most a number of examples; in one part if its examples cannot be told apart."""
    size = count_examples(tree)
    if size is None or size <= number:
        return [tree]
    return [map_tensors(lambda t, k=start: t[k : k + number], tree) for start in range(0, size, number)]  # type: ignore[misc]


def repeat_examples(tree: Any, times: int) -> Any:
    """Return a batch several times, one after the other; its tensors are copies."""
    return map_tensors(lambda tensor: tensor.repeat(times, *(1,) * (tensor.ndim - 1)), tree)


def select_examples(tree: Any, index: Tensor) -> Any:
    """Return the examples of a batch with these indices; a batch whose examples cannot be told apart is refused.

    Raises:
        EnfoldError: If examples cannot be selected.
    """
    if isinstance(tree, Tensor):
        return tree[index.to(tree.device)]
    if count_examples(tree) is None:
        raise EnfoldError(
            f"inputs must be tensors with one row per example where examples are selected, got {describe(tree)}: pass "
            "tensors, or a tuple or dict of tensors"
        )
    return map_tensors(lambda tensor: tensor[index.to(tensor.device)], tree)


def describe(tree: Any) -> str:
    """Return the structure of a tree in a few words, for error messages."""
    if isinstance(tree, Tensor):
        return f"a tensor of shape {tuple(tree.shape)}"
    if isinstance(tree, Mapping):
        return f"a dict with {', '.join(repr(str(name)) for name in tree)}" if tree else "an empty dict"
    if isinstance(tree, list | tuple):
        inner = ", ".join(type(value).__name__ for value in tree)
        return (
            f"a {type(tree).__name__} of {len(tree)} elements ({inner})" if tree else f"an empty {type(tree).__name__}"
        )
    return "None" if tree is None else f"a {type(tree).__name__}"
