"""Split the batches of a user's loader into inputs, target and weights.

(x, y)   ((ids, mask), y)   ({...}, y)       inputs are the first element
(x1, x2, y)                                  for a network that takes two inputs
(x, y, weight)                               for a network that takes one input
{"image": x, ..., "label": y}                a dictionary, named tuple or dataclass with a field for the target
batch.y                                      an object, such as a batch of graphs, which is the input itself

Where targets may be missing, as in a distillation, they are then a tensor without columns, (B, 0):

x   (x,)   (x1, x2) for a network that takes two inputs   (x, None)   {...} or an object without a target
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from enfold.data.tree import count_examples, describe
from enfold.errors import EnfoldError

TARGETS = ("labels", "label", "targets", "target", "y")
WEIGHTS = ("weight", "weights", "sample_weight")

Unpack = Callable[[Any], tuple[Any, ...]]
"""From a batch to (inputs, target) or (inputs, target, weights)."""


class Unpacked(NamedTuple):
    """A batch as inputs, target and weights of the examples."""

    inputs: Any
    target: Any
    weights: Tensor | None = None


def no_targets(inputs: Any) -> Tensor:
    """Return the targets of a batch without targets: a tensor without columns, (B, 0)."""
    return torch.empty(count_examples(inputs) or 1, 0)


def are_targets(targets: Any) -> bool:
    """Return whether these are targets, and not what `no_targets` returned."""
    return not (isinstance(targets, Tensor) and targets.ndim > 1 and targets.shape[-1] == 0)


class Batches:
    """The batches of a loader, each as inputs, target and weights.

    Args:
        loader: A DataLoader or another iterable of batches.
        unpack: Function that splits a batch; None for the rules above.
        num_inputs: The number of inputs that the network takes; None if unknown.
        needs_targets: Whether batches without targets are refused.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        unpack: Unpack | None = None,
        num_inputs: int | None = None,
        *,
        needs_targets: bool = True,
    ) -> None:
        self.loader, self.unpack, self.num_inputs, self.needs_targets = loader, unpack, num_inputs, needs_targets

    def __iter__(self) -> Iterator[Unpacked]:
        for batch in self.loader:
            yield unpack_batch(batch, self.unpack, self.num_inputs, needs_targets=self.needs_targets)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


def unpack_batch(
    batch: Any, unpack: Unpack | None = None, num_inputs: int | None = None, *, needs_targets: bool = True
) -> Unpacked:
    """Return a batch as inputs, target and weights.

    Args:
        batch: What a loader yielded.
        unpack: Function that splits it; None for the rules of this file.
        num_inputs: The number of inputs that the network takes; None if unknown.
        needs_targets: Whether a batch without targets is refused; otherwise its target is a tensor without columns.

    Raises:
        EnfoldError: If the batch has no target, or it is not clear which part is the target.
    """
    if isinstance(batch, Unpacked) and unpack is None:
        return batch
    found = _from_function(batch, unpack) if unpack is not None else None
    if not needs_targets:
        found = found or _without_target(batch, num_inputs)
    found = found or _by_structure(batch, num_inputs)
    if found.target is not None:
        return found
    if needs_targets:
        raise _no_target(batch)
    return found._replace(target=no_targets(found.inputs))


def _from_function(batch: Any, unpack: Unpack) -> Unpacked:
    found = unpack(batch)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise EnfoldError(
            f"unpack must return (inputs, target) or (inputs, target, weights), got {describe(found)}: change the "
            "function passed as unpack="
        )
    return Unpacked(*found)


def _without_target(batch: Any, num_inputs: int | None) -> Unpacked | None:
    """Return a batch that has no target; None if it has one."""
    if isinstance(batch, Tensor):
        return Unpacked(batch, None)
    fields = _fields(batch)
    if fields is not None:
        return None if any(fields.get(name) is not None for name in TARGETS) else Unpacked(fields, None)
    if isinstance(batch, list | tuple):
        is_inputs = len(batch) == 1 or (num_inputs == len(batch) and all(isinstance(each, Tensor) for each in batch))
        return Unpacked(batch[0] if len(batch) == 1 else tuple(batch), None) if is_inputs else None
    return None if isinstance(getattr(batch, "y", None), Tensor) else Unpacked(batch, None)


def _by_structure(batch: Any, num_inputs: int | None) -> Unpacked:
    fields = _fields(batch)
    if fields is not None:
        return _from_fields(batch, fields)
    if isinstance(batch, list | tuple):
        return _from_sequence(batch, num_inputs)
    if isinstance(getattr(batch, "y", None), Tensor):
        return Unpacked(batch, batch.y)
    raise _no_target(batch)


def _fields(batch: Any) -> dict[str, Any] | None:
    """Return the named parts of a batch; None if it has no names."""
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _from_fields(batch: Any, fields: dict[str, Any]) -> Unpacked:
    target = next((name for name in TARGETS if fields.get(name) is not None), None)
    if target is None:
        raise _no_target(batch)
    weight = next((name for name in WEIGHTS if isinstance(fields.get(name), Tensor)), None)
    inputs = {name: value for name, value in fields.items() if name not in (target, weight)}
    if all(value is None for value in inputs.values()):
        raise EnfoldError(f"a batch must have inputs beside '{target}', got {describe(batch)}: add the inputs")
    return Unpacked(inputs, fields[target], None if weight is None else fields[weight])


def _from_sequence(batch: Any, num_inputs: int | None) -> Unpacked:
    if len(batch) < 2:
        raise _no_target(batch)
    if len(batch) == 2:
        return Unpacked(*batch)
    if num_inputs == len(batch) - 1:
        return Unpacked(tuple(batch[:-1]), batch[-1])
    if num_inputs == len(batch) - 2 and _is_weight(batch[-1], batch[-2]):
        inputs = batch[0] if num_inputs == 1 else tuple(batch[:-2])
        return Unpacked(inputs, batch[-2], batch[-1])
    takes = "an unknown number of inputs" if num_inputs is None else f"{num_inputs} inputs"
    raise EnfoldError(
        f"a batch of {len(batch)} elements must be the inputs of the network, a target and, at most, weights of shape "
        f"(B,), got {describe(batch)} for a network that takes {takes}: pass unpack=, a function that returns (inputs, "
        "target)"
    )


def _is_weight(weight: Any, target: Any) -> bool:
    is_vector = isinstance(weight, Tensor) and weight.ndim == 1 and weight.is_floating_point()
    return is_vector and isinstance(target, Tensor) and len(weight) == len(target)


def _no_target(batch: Any) -> EnfoldError:
    return EnfoldError(
        f"a batch must have a target, got {describe(batch)}: yield (inputs, target), a dict with "
        f"{', '.join(repr(name) for name in TARGETS[:3])}, or an object with `y`, or pass unpack=, a function that "
        "returns (inputs, target)"
    )


def count_inputs(network: nn.Module) -> int | None:
    """Return how many inputs the forward pass of a network needs; None if it takes any number."""
    try:
        parameters = inspect.signature(network.forward).parameters.values()
    except (TypeError, ValueError):  # a forward of compiled code
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters if each.kind in positional and each.default is each.empty]
    return max(1, len(required))
