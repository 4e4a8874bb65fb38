"""Scores of calibrated predictions: at the temperature or the scale that is fitted on validation data."""

from __future__ import annotations

from typing import Any

import torch

from enfold.errors import EnfoldError
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.metrics.regression_predictions import RegressionPredictions
from enfold.metrics.scale import apply_scale, fit_scale, require_other_targets
from enfold.metrics.tables import metrics_for
from enfold.metrics.temperature import apply_temperature, fit_temperature, require_other_examples

OF_CLASSES = ("nll", "ece", "brier")
OF_NUMBERS = ("nll", "crps", "coverage_90")
FEWEST = 100  # examples to fit a temperature on one half of them


def calibrated_scores(test: RowPredictions, validation: RowPredictions) -> dict[str, float]:
    """Return the calibrated scores of test predictions, with the temperature (classes) or the scale (numbers).

    Args:
        test: Predictions on test data.
        validation: Predictions of the same members on other examples.

    Returns:
        "temperature", "cnll", "cece" and "cbrier" for classes; "scale", "cnll", "ccrps" and "ccoverage_90" for numbers.

    Raises:
        EnfoldError: If the predictions have different members or are of the same examples.
    """
    name, fitted, calibrated = fit_and_apply(test, validation)
    metrics = metrics_for(calibrated)
    chosen = OF_CLASSES if name == "temperature" else OF_NUMBERS
    return {name: fitted, **{f"c{metric}": metrics[metric](calibrated) for metric in chosen}}


def fit_and_apply(test: RowPredictions, validation: RowPredictions) -> tuple[str, float, Any]:
    """Return "temperature" or "scale", its value fitted on validation data, and the calibrated test predictions."""
    if isinstance(test, Predictions) and isinstance(validation, Predictions):
        temperature = fit_temperature(validation)
        require_other_examples(test, validation)
        return "temperature", temperature, apply_temperature(test, temperature)
    if isinstance(test, RegressionPredictions) and isinstance(validation, RegressionPredictions):
        require_other_targets(test, validation)
        scale = fit_scale(validation)
        return "scale", scale, apply_scale(test, scale)
    raise EnfoldError(
        f"test and validation must be predictions of one task, got {type(test).__name__} and "
        f"{type(validation).__name__}: use the same model and task for both"
    )


def calibrated_nll(found: RowPredictions) -> float | None:
    """Return the NLL at a temperature, or a scale, that is fitted on the other half of the examples.

    Args:
        found: The predictions.

    Returns:
        The mean of both halves; None for tasks without an NLL, and for fewer than `FEWEST` examples.
    """
    if len(found) < FEWEST or not isinstance(found, (Predictions, RegressionPredictions)):
        return None
    if "nll" not in metrics_for(found):
        return None
    halves = [found.select(torch.arange(start, len(found), 2)) for start in (0, 1)]
    try:
        both = [calibrated_scores(*pair)["cnll"] for pair in (halves, halves[::-1])]
    except EnfoldError:  # a half with the targets of the other, or without a scale
        return None
    weights = [len(half) / len(found) for half in halves]
    return sum(weight * value for weight, value in zip(weights, both, strict=True))
