"""Evaluate: compute predictions once and all metrics from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from enfold.data.convert import Examples, as_data, as_split, require
from enfold.data.dataset import Data, evaluation_batches, has_examples
from enfold.engines.inputs import call_protected, refuse_shape
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import require_classes
from enfold.engines.runner import MemberView, network_logits
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.metrics import TABLES, calibrated_scores, gain_recovered, metrics_for, per_member
from enfold.metrics.predictions import Predictions, RowPredictions


def member_logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the logits of every member, (M, B, C); a single network is M = 1. The inputs are left unchanged."""
    outputs: Tensor
    if isinstance(model, Ensemble):
        converted = model.convert_inputs(inputs)
        outputs = model(converted) if model.is_expandable else call_protected(model, converted)
    elif isinstance(model, MemberView):
        outputs = model(inputs)
    else:
        outputs = network_logits(model, inputs)
    return outputs


@torch.inference_mode()
def predict(model: nn.Module, examples: Examples, batch_size: int = 1024) -> Predictions:
    """Return the predictions of every member for every example, in eval mode.

    Args:
        model: A network or an ensemble.
        examples: Labelled examples: a DataLoader, a Dataset, a pair (inputs, labels), or a data set of
            `enfold.data.load`, of which the test split is used.
        batch_size: Examples per forward pass, where `examples` is no loader; about 1,000 are fastest.
    """
    part = as_split(examples, "test", batch_size)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    log_probs: list[Tensor] = []
    labels: list[Tensor] = []
    with eval_mode(model):
        for inputs, batch_labels in evaluation_batches(part, batch_size):
            try:
                logits = require_classes(member_logits(model, inputs.to(device)), "an evaluation").float()
            except Exception as error:
                if not labels:
                    refuse_shape(model, inputs, error)
                raise
            log_probs.append(torch.log_softmax(logits, dim=-1).cpu())
            labels.append(batch_labels.cpu())
    if not labels:
        raise EnfoldError(
            "there must be examples to predict, got none: "
            "pass a DataLoader, a list or tensors, not a generator that is used up"
        )
    return Predictions(torch.cat(log_probs, dim=1), torch.cat(labels))


def score(test: RowPredictions, validation: RowPredictions | None = None) -> dict[str, float]:
    """Compute every metric of the mean prediction.

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


def recovered(
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

    def __str__(self) -> str:
        parts = [f"{name} {shown(name, self.scores[name])}" for name in self.headline]
        if self.gain_recovered is not None:
            parts.append(f"gain recovered {shown_gain(self.gain_recovered)}")
        return f"{self.name}: " + "  ".join(parts)


def shown(name: str, value: float) -> str:
    """Format a score with its unit."""
    return f"{100 * value:.2f} %" if _UNITS[name] == "%" else f"{value:.4f}"


_UNITS = {name: metric.unit for table in TABLES.values() for name, metric in table.items()}


def shown_gain(gain: float) -> str:
    """Format the gain recovered in percent; a dash if the ensemble has no gain."""
    return f"{100 * gain:.0f} %" if math.isfinite(gain) else "-"


def evaluate(
    model: nn.Module,
    test: Examples,
    val: Examples | None = None,
    *,
    reference: nn.Module | None = None,
    name: str | None = None,
) -> Row:
    """Score a model on test examples.

    Args:
        model: A network or an ensemble.
        test: Test examples: a DataLoader, a Dataset, a pair (inputs, labels), or a data set of `enfold.data.load`.
        val: Validation examples, on which a temperature or a scale is fitted for the calibrated scores (`cnll`).
        reference: The ensemble that the model was made from; the row then has the gain recovered.
        name: The name of the row; the default is the class of the model.

    Returns:
        All scores, and the fraction of the ensemble's gain in the criterion that the model recovers.
    """
    require(test, "test", "evaluate")
    data = as_data(test, val) if isinstance(test, Data) else as_data(None, val, test)
    own = predict(model, data.test)
    validation = predict(model, data.val) if has_examples(data.val) else None
    scores = score(own, validation)
    gain = None
    if reference is not None:
        gain = _gain(scores, predict(reference, data.test), own.criterion)
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


def best_member(members: nn.Module, data: Data) -> int:
    """Return the index of the member with the lowest criterion, NLL for classes, on validation examples."""
    found = predict(members, data.val)
    return int(per_member(metrics_for(found)[found.criterion], found).argmin())
