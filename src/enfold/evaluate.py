"""Evaluate: compute predictions once and all metrics from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from enfold.data.convert import Examples, as_data, as_split, require
from enfold.data.dataset import Data, evaluation_batches, has_examples
from enfold.data.tree import to_device
from enfold.data.unpack import Unpack
from enfold.display import html_table
from enfold.engines.call import require_network
from enfold.engines.inputs import call_protected, refuse_shape
from enfold.engines.modes import eval_mode, without_gradients
from enfold.engines.precision import Precision, autocast
from enfold.engines.runner import MemberView, network_logits
from enfold.ensemble import Ensemble, called_network, with_member_weights
from enfold.errors import EnfoldError
from enfold.metrics import TABLES, calibrated_scores, gain_recovered, metrics_for, per_member
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.metrics.theory_scores import theory_scores
from enfold.tasks import Rows, StudentTask, TaskLike, as_task, task_of


def member_logits(model: nn.Module, inputs: Any) -> Tensor:
    """Return the outputs of every member, (M, B, ...); a single network is M = 1. The inputs are left unchanged."""
    outputs: Tensor
    if isinstance(model, Ensemble):
        converted = model.convert_inputs(inputs)
        outputs = model(converted) if model.is_expandable else call_protected(model, converted)
    elif isinstance(model, MemberView):
        outputs = model(inputs)
    else:
        outputs = network_logits(model, inputs)
    return outputs


def predict(
    model: nn.Module,
    examples: Examples,
    batch_size: int = 1024,
    *,
    task: TaskLike = None,
    unpack: Unpack | None = None,
    precision: Precision = "float32",
) -> Any:
    """Return the predictions of every member for every example, in eval mode.

    Args:
        model: A network or an ensemble.
        examples: Examples with targets: a DataLoader, a Dataset, a pair (inputs, targets), or a data set of
            `enfold.data.load`, of which the test split is used.
        batch_size: Examples per forward pass, where `examples` is not a loader; about 1,000 are fastest.
        task: What the outputs mean; None for the task that the model was trained for, or to infer it.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.
        precision: The precision of the forward passes: "float32", "bf16" or "fp16".

    Returns:
        The input of the metrics of the task: `metrics.Predictions` for classes.
    """
    require_network(model)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    with without_gradients(model), autocast(precision, device):
        return _predict(model, examples, batch_size, task, unpack)


def _predict(model: nn.Module, examples: Examples, batch_size: int, task: TaskLike, unpack: Unpack | None) -> Any:
    part = as_split(examples, "test", batch_size, unpack=unpack, network=called_network(model))
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    known = as_task(task if task is not None else task_of(model))
    values: list[Tensor] = []
    targets: list[Tensor] = []
    ignored = 0
    with eval_mode(model):
        for inputs, batch_targets, _ in evaluation_batches(part, batch_size):
            try:
                outputs = member_logits(model, to_device(inputs, device)).float()
            except Exception as error:
                if not values:
                    refuse_shape(model, inputs, error)
                raise
            known = known.resolve(outputs, batch_targets)
            if known.is_ignored(outputs, batch_targets):
                ignored += 1
                continue
            rows = known.flatten(outputs, to_device(batch_targets, device))
            values.append(rows.values.cpu())
            targets.append(rows.targets.cpu())
    if not values and ignored:
        raise EnfoldError(
            f"examples must have a target that is not ignored, got {ignored} batches in which all are: check "
            f"ignore_index of task='{known.name}'"
        )
    if not values:
        raise EnfoldError(
            "there must be examples to predict, got none: "
            "pass a DataLoader, a list or tensors, not a generator that is used up"
        )
    found = known.predictions(Rows(torch.cat(values, dim=1), torch.cat(targets)))
    return with_member_weights(model, found)


def score(test: RowPredictions, validation: RowPredictions | None = None) -> dict[str, float]:
    """Return every metric of the mean prediction by name.

    Args:
        test: Predictions on test examples.
        validation: Predictions on validation examples; adds the metrics at the temperature, or the scale of a
            regression, fitted there.
    """
    scores = {name: metric(test) for name, metric in metrics_for(test).items()}
    return scores if validation is None else scores | calibrated_scores(test, validation)


def mean_member_score(test: RowPredictions, validation: RowPredictions | None = None) -> dict[str, float]:
    """Compute the mean over members of each member's own scores."""
    rows = []
    for index in range(test.num_members):
        rows.append(score(test.member(index), None if validation is None else validation.member(index)))
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def recovered_fraction(
    one: Mapping[str, float],
    mean_member: Mapping[str, float],
    ensemble: Mapping[str, float],
    criterion: str = "nll",
) -> float:
    """Return the fraction of the ensemble's gain that a network recovers: 0 is the mean member, 1 the ensemble.

    Args:
        one: Scores of the network.
        mean_member: Mean scores of the members.
        ensemble: Scores of the ensemble.
        criterion: The metric, lower is better.
    """
    return gain_recovered(one[criterion], mean_member[criterion], ensemble[criterion], higher_is_better=False)


@dataclass(frozen=True)
class Row:
    """Scores of one model on test examples, printable as one line.

    Args:
        name: Name of the model.
        scores: Values by metric.
        gain_recovered: Fraction of the ensemble's gain in the criterion, NLL for classes; None without a reference.
        headline: The metrics that are printed.
    """

    name: str
    scores: dict[str, float]
    gain_recovered: float | None = None
    headline: tuple[str, ...] = Predictions.headline

    def _repr_html_(self) -> str:
        header, cells = ["", *self.scores], [self.name, *(shown(name, value) for name, value in self.scores.items())]
        if self.gain_recovered is not None:
            header, cells = [*header, "gain recovered"], [*cells, shown_gain(self.gain_recovered)]
        return html_table(header, [cells])

    def __str__(self) -> str:
        parts = [f"{name} {shown(name, self.scores[name])}" for name in self.headline]
        if self.gain_recovered is not None:
            parts.append(f"gain recovered {shown_gain(self.gain_recovered)}")
        return f"{self.name}: " + "  ".join(parts)


def shown(name: str, value: float) -> str:
    """Format a score with its unit."""
    return f"{100 * value:.2f} %" if _UNITS.get(name, _UNITS.get(name[1:])) == "%" else f"{value:.4f}"


_UNITS = {name: metric.unit for table in TABLES.values() for name, metric in table.items()}


LARGEST_GAIN = 10.0  # beyond it, the gain of the ensemble is small against differences between networks


def shown_gain(gain: float) -> str:
    """Format the gain recovered in percent; a dash if the ensemble has no gain, or next to none."""
    return f"{100 * gain:.0f} %" if abs(gain) <= LARGEST_GAIN else "-"


def evaluate(
    model: nn.Module,
    test: Examples,
    val: Examples | None = None,
    *,
    reference: nn.Module | None = None,
    name: str | None = None,
    theory: bool = False,
    task: TaskLike = None,
    unpack: Unpack | None = None,
    precision: Precision = "float32",
) -> Row:
    """Score a model on test examples.

    Args:
        model: A network or an ensemble.
        test: Test examples: a DataLoader, a Dataset, a pair (inputs, targets), or a data set of `enfold.data.load`.
        val: Validation examples, on which a temperature or a scale is fitted for the calibrated scores (`cnll`).
        reference: The ensemble that the model was made from; the row then has the gain recovered.
        name: The name of the row; the default is the class of the model.
        theory: Add what the theory of averaging says about an ensemble, such as the accuracy of the majority vote and
            Masegosa's variance; `enfold.metrics.theory_scores` has the list.
        task: What the outputs mean; None for the task that the model or the reference was trained for, or to infer it.
            A reference that was trained for a task has that one.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.
        precision: The precision of the forward passes, also of the reference: "float32", "bf16" or "fp16".

    Returns:
        All scores, and the fraction of the ensemble's gain in the criterion that the model recovers.
    """
    require(test, "test", "evaluate")
    require_network(model)
    read = partial(as_data, unpack=unpack, network=called_network(model))
    data = read(test, val) if isinstance(test, Data) else read(None, val, test)
    if task is None and task_of(model) is None:
        taught = task_of(reference)
        task = None if taught is None else StudentTask(teacher=taught)
    own = predict(model, data.test, task=task, precision=precision)
    validation = predict(model, data.val, task=task, precision=precision) if has_examples(data.val) else None
    scores = score(own, validation) | (theory_scores(own) if theory else {})
    gain = None
    if reference is not None:
        known = task_of(reference)
        theirs = predict(reference, data.test, task=task if known is None else known, precision=precision)
        gain = _gain(scores, theirs, own.criterion)
    return Row(name or type(model).__name__, scores, gain, own.headline)


def _gain(scores: Mapping[str, float], reference: RowPredictions, criterion: str) -> float:
    """Return the gain recovered in the first criterion that both have: a point prediction has no likelihood."""
    table = metrics_for(reference)
    shared = [name for name in (reference.criterion, criterion, "mse") if name in table and name in scores]
    if not shared:
        raise EnfoldError(
            f"reference must be an ensemble for the same task, got predictions with the metrics {', '.join(table)}: "
            "pass the ensemble that the model was made from"
        )
    members = table[f"gibbs_{shared[0]}"](reference)
    return gain_recovered(scores[shared[0]], members, table[shared[0]](reference), higher_is_better=False)


def best_member(members: nn.Module, data: Data, task: TaskLike = None) -> int:
    """Return the index of the member with the lowest criterion, NLL for classes, on validation examples."""
    found = predict(members, data.val, task=task)
    return int(per_member(metrics_for(found)[found.criterion], found).argmin())
