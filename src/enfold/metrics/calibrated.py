"""Scores of calibrated predictions: at the temperature or the scale that is fitted on validation data."""

from __future__ import annotations

from typing import Any

from enfold.errors import EnfoldError
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.metrics.regression_predictions import RegressionPredictions
from enfold.metrics.scale import apply_scale, fit_scale, require_other_targets
from enfold.metrics.tables import metrics_for
from enfold.metrics.temperature import apply_temperature, fit_temperature, require_other_examples

OF_CLASSES = ("nll", "ece", "brier")
OF_NUMBERS = ("nll", "crps", "coverage_90")


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
