"""torchmetrics: metrics of ensembles that are updated batch by batch and synchronized between processes.

    metrics = make_collection("accuracy", "nll", "ece", disagreement=enfold.metrics.disagreement)
    for inputs, targets in loader:
        metrics.update(ensemble(inputs), targets)             # outputs (M, B, C)
    metrics.compute()                                         # as enfold.metrics of all examples at once

Most of these metrics are not means over batches, so the state contains the outputs of all members for all examples.
The metrics of one collection share their state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from enfold.engines.outputs import at_least_float32
from enfold.errors import EnfoldError, MissingExtra, closest
from enfold.metrics import TABLES, Metric, RowPredictions, metrics_for
from enfold.tasks import Rows, TaskLike, current_task, first_batch_task

try:
    import torchmetrics
    from torchmetrics.utilities.data import dim_zero_cat
    from torchmetrics.wrappers.abstract import WrapperMetric
except ImportError as error:
    raise MissingExtra("torchmetrics", "torchmetrics", "enfold.integrations.torchmetrics") from error

Function = Callable[[Any], Any]
"""From predictions, such as `enfold.Predictions`, to a number or a tensor."""


class EnsembleMetric(torchmetrics.Metric):  # type: ignore[misc]
    """A metric of enfold of the outputs of an ensemble or a network.

    Args:
        metric: The name of a metric of the task, such as "nll" (`enfold.metrics.TABLES` has all of them), or a function
            of predictions, such as `enfold.metrics.disagreement`.
        task: What the outputs mean, as for `enfold.fit`; None to infer it from the first batch.
        members: Whether outputs have a leading member axis, (M, B, ...); false for the outputs of a network.
        **options: Options of `torchmetrics.Metric`, such as `dist_sync_on_step`.

    Raises:
        EnfoldError: If there is no metric of that name.
    """

    full_state_update = False
    is_differentiable = False
    values: list[Tensor]
    targets: list[Tensor]

    def __init__(self, metric: str | Function, *, task: TaskLike = None, members: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._direction = _find_direction(metric)
        self.metric, self.task, self.members = metric, first_batch_task(task), members
        self.add_state("values", default=[], dist_reduce_fx="cat")  # (N, M, K): joined along the first axis
        self.add_state("targets", default=[], dist_reduce_fx="cat")

    @property
    def higher_is_better(self) -> bool | None:
        """Return whether higher values are better; None for functions, of which it is unknown."""
        return self._direction

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch.

        Args:
            preds: Outputs of all members, (M, B, ...), or of a network, (B, ...), before softmax.
            target: Targets, (B, ...).
        """
        rows = _to_rows(self, preds, target)
        self.values.append(rows.values.transpose(0, 1))
        self.targets.append(rows.targets)

    def compute(self) -> Tensor:
        """Return the metric of all examples since the last `reset`."""
        if not len(self.values):
            raise EnfoldError(f"{self.metric!r} needs examples, got none since the last reset: call update first")
        values, targets = dim_zero_cat(self.values), dim_zero_cat(self.targets)
        rows = Rows(values.transpose(0, 1).cpu(), targets.cpu())
        predictions = current_task(self.task).predictions(rows)
        found = _find_function(self.metric, predictions)(predictions)
        return torch.as_tensor(found, dtype=torch.get_default_dtype(), device=self.device)

    def extra_repr(self) -> str:
        """Return the name of the metric."""
        return repr(self.metric)


class MeanPredictionMetric(WrapperMetric):  # type: ignore[misc]
    """A metric of torchmetrics of the mean prediction of an ensemble.

    ``MeanPredictionMetric(MulticlassF1Score(10))`` is updated by outputs (M, B, C) and sees their mean probabilities.

    Args:
        metric: A metric of torchmetrics that takes probabilities, or the numbers of a regression.
        task: What the outputs mean, as for `enfold.fit`; None to infer it from the first batch.
        **options: Options of `torchmetrics.Metric`.
    """

    members = True

    def __init__(self, metric: torchmetrics.Metric, *, task: TaskLike = None, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(metric, torchmetrics.Metric):
            raise EnfoldError(
                f"metric must be a metric of torchmetrics, got {metric!r}: pass for example MulticlassF1Score(10), or "
                "EnsembleMetric(name) for a metric of enfold"
            )
        self.metric, self.task = metric, first_batch_task(task)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: outputs of all members, (M, B, ...), and targets, (B, ...)."""
        self.metric.update(self._mean(preds, target), target)

    def forward(self, preds: Tensor, target: Tensor) -> Any:
        """Add a batch and return the metric of this batch."""
        return self.metric(self._mean(preds, target), target)

    def compute(self) -> Any:
        """Return the metric of all examples since the last `reset`."""
        return self.metric.compute()

    def reset(self) -> None:
        """Remove all examples."""
        super().reset()
        self.metric.reset()

    def _mean(self, preds: Tensor, target: Tensor) -> Tensor:
        _to_rows(self, preds, target)  # checks them
        task = self.task.resolve(preds, target)
        mean = task.predict(at_least_float32(preds.detach())).mean
        return mean if task.is_categorical or mean.numel() != target.numel() else mean.view_as(target)


def make_collection(
    *names: str, task: TaskLike = None, members: bool = True, prefix: str | None = None, **functions: Function
) -> torchmetrics.MetricCollection:
    """Return a collection of metrics of enfold, which have one state in common.

    Args:
        *names: Names of metrics of the task.
        task: What the outputs mean, as for `enfold.fit`; None to infer it from the first batch.
        members: Whether outputs have a leading member axis.
        prefix: A prefix of the names in the result, such as "val_".
        **functions: Functions of predictions by the name in the result.

    Raises:
        EnfoldError: If there is no metric of a name, or there are no names.
    """
    if not names and not functions:
        raise EnfoldError('make_collection needs names of metrics, got none: pass for example "accuracy", "nll"')
    wanted: dict[str, str | Function] = {**{name: name for name in names}, **functions}
    made = {key: EnsembleMetric(metric, task=task, members=members) for key, metric in wanted.items()}
    return torchmetrics.MetricCollection(made, prefix=prefix)


def _to_rows(metric: EnsembleMetric | MeanPredictionMetric, preds: Tensor, target: Tensor) -> Rows:
    """Return the rows of a batch, after checking that outputs have a member axis."""
    if not isinstance(preds, Tensor):
        raise EnfoldError(
            f"preds must be a tensor of outputs, got a {type(preds).__name__}: pass ensemble(inputs), with a leading "
            "member axis"
        )
    outputs = at_least_float32(preds.detach())
    outputs = outputs if metric.members else outputs[None]
    if isinstance(target, Tensor) and (outputs.ndim < 2 or outputs.shape[1] != len(target)):
        other = "members=False" if metric.members else "members=True"
        raise EnfoldError(
            f"preds must have one output per target, got outputs of shape {tuple(preds.shape)} for {len(target)} "
            f"targets: pass outputs with a leading member axis, or {other}"
        )
    return metric.task.resolve(outputs, target).flatten(outputs, target)


def _find_direction(metric: object) -> bool | None:
    """Return `higher_is_better`, after checking that there is such a metric."""
    if isinstance(metric, Metric):
        return metric.higher_is_better
    if callable(metric):
        return None
    known = {name: each for table in TABLES.values() for name, each in table.items()}
    if metric not in known:
        near = closest(str(metric), known)
        raise EnfoldError(
            f"metric must be a function of predictions or one of {', '.join(sorted(known))}, got {metric!r}: "
            + (f"did you mean {near!r}?" if near else "change metric")
        )
    return known[str(metric)].higher_is_better


def _find_function(metric: str | Function, predictions: RowPredictions) -> Function:
    if not isinstance(metric, str):
        return metric
    table = metrics_for(predictions)
    if metric not in table:
        raise EnfoldError(
            f"metric must be one of {', '.join(table)} for these outputs and targets, got {metric!r}: change metric, "
            "or task"
        )
    return table[metric]
