"""Outputs of the networks of a run: the number of outputs, checks of networks, and the loss of each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.data.convert import first_batch
from enfold.data.dataset import evaluation_batches
from enfold.data.tree import first_examples, map_tensors
from enfold.data.unpack import Unpacked
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits
from enfold.metrics import (
    GaussianPredictions,
    MultilabelPredictions,
    PointPredictions,
    Predictions,
    QuantilePredictions,
    RowPredictions,
    example_density_nll,
    example_nll,
    example_pinball,
    example_squared_error,
)
from enfold.tasks import Binary, Classification, Multilabel, Regression, Task, as_task
from enfold.tasks.infer import task_from_dict

FEW = 256  # examples from which a task is inferred


def make_task(spec: str | dict[str, Any] | None) -> Task | None:
    """Return the task of a recipe: a name, or a mapping of `name` and the options of the task.

    Raises:
        EnfoldError: If there is no such task, or an option is invalid.
    """
    if spec is None:
        return None
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", None)
    return task_from_dict({"name": name, "options": options})


def has_classes(data: Data, task: Task | None) -> bool:
    """Return whether a run has one class per example and a known number of classes."""
    return data.num_classes is not None and (task is None or task == Classification())


def count_outputs(data: Data, task: Task | None) -> int | None:
    """Return how many outputs a network needs for each example or position; None if it is unknown."""
    if data.num_classes is not None:
        return data.num_classes
    targets = _targets(data)
    if targets is None:
        return None
    if type(task) is Classification:
        return int(targets.max()) + 1 if not targets.is_floating_point() else None
    if isinstance(task, Binary):
        return 1
    columns = 1 if targets.ndim == 1 else targets.shape[1]
    if isinstance(task, Multilabel):
        return columns
    is_number = isinstance(task, Regression) or (task is None and targets.is_floating_point())
    width = task.width if isinstance(task, Regression) else 1
    return width * columns if is_number and targets.ndim <= 2 else None


def _targets(data: Data) -> Tensor | None:
    if isinstance(data.train, Split):
        return data.train.targets
    batch = first_batch(data.train)
    return batch.target if batch is not None and isinstance(batch.target, Tensor) else None


def first_of(data: Data, number: int = FEW) -> Unpacked:
    """Return the first training examples, prepared; those of the first batch of a loader."""
    if isinstance(data.train, Split):
        few = data.train[:number]
        return Unpacked(data.prepare(few.inputs), few.targets)
    found = cast("Unpacked | None", first_batch(data.train))
    if found is None:
        raise EnfoldError(f"the training data of '{data.source}' must have examples, got none: check the function")
    return found


def check_outputs(what: str, make: Callable[[], nn.Module], data: Data, task: Task | None) -> None:
    """Run a network on a few examples and compare its outputs with their targets.

    Args:
        what: The name of the network in errors.
        make: A function that returns the network.
        data: The data.
        task: The task; None if it is inferred.

    Raises:
        EnfoldError: If they do not fit the task.
    """
    inputs, targets, _ = first_of(data)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = member_logits(make().eval(), inputs)
    try:
        known = as_task(task).resolve(outputs, targets)
        if not known.is_ignored(outputs, targets):
            known.flatten(outputs, targets)
    except EnfoldError as error:
        raise EnfoldError(f"{what} must return outputs for the targets of the data: {error}") from error


def example_of(data: Data) -> Any | None:
    """Return one prepared test input without the batch axis; None if examples of a batch cannot be told apart."""
    found = next(iter(evaluation_batches(data.test, 2)))
    one = first_examples(found.inputs, 1)
    return None if one is None else map_tensors(lambda tensor: tensor[0], one)


def example_losses(p: RowPredictions) -> Tensor:
    """Return the criterion of the task for each target, (N,)."""
    if isinstance(p, MultilabelPredictions):
        return example_nll(p.known())
    if isinstance(p, Predictions):
        return example_nll(p)
    if isinstance(p, GaussianPredictions):
        return example_density_nll(p)
    if isinstance(p, QuantilePredictions):
        return example_pinball(p)
    assert isinstance(p, PointPredictions)  # noqa: S101 - there is no other kind
    return example_squared_error(p)


def shared_criterion(*names: Any) -> str:
    """Return the first metric by which all models can be compared, of the names of their scores; lower is better."""
    found = next((name for name in ("nll", "pinball", "mse") if all(name in each for each in names)), None)
    if found is None:
        raise EnfoldError("the models of a run must have a metric in common, got none: use one task for all steps")
    return found
