"""The metrics of each kind of predictions, with what tables and reports need to display them."""

from __future__ import annotations

from enfold.metrics.calibration import adaptive_ece, classwise_ece, ece, mce
from enfold.metrics.metric import Metric
from enfold.metrics.multilabel import (
    MultilabelPredictions,
    exact_match,
    f1,
    gibbs_label_nll,
    label_accuracy,
    label_brier,
    label_ece,
    label_nll,
    mean_average_precision,
    micro_average_precision,
    micro_f1,
)
from enfold.metrics.predictions import DensePredictions, Predictions, RowPredictions
from enfold.metrics.regression import (
    coverage_90,
    coverage_95,
    crps,
    density_nll,
    gibbs_density_nll,
    gibbs_mse,
    gibbs_pinball,
    mae,
    mse,
    outer_coverage,
    outer_width,
    pinball,
    quantile_error,
    r2,
    rmse,
    sharpness,
    width_90,
    width_95,
)
from enfold.metrics.regression_predictions import GaussianPredictions, PointPredictions, QuantilePredictions
from enfold.metrics.scores import accuracy, brier, gibbs_nll, nll
from enfold.metrics.segmentation import dice, mean_iou


def _table(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS: dict[str, Metric] = _table(
    Metric("accuracy", accuracy, "%", True, "fraction of examples whose most probable class is the label"),
    Metric("nll", nll, "nats", False, "negative log-likelihood of the labels under the mean probabilities"),
    Metric("gibbs_nll", gibbs_nll, "nats", False, "mean of the members' negative log-likelihoods"),
    Metric("brier", brier, "", False, "squared distance between probabilities and one-hot label, from 0 to 2"),
    Metric("ece", ece, "%", False, "gap between confidence and accuracy, mean over 15 bins of equal width"),
    Metric("adaptive_ece", adaptive_ece, "%", False, "gap between confidence and accuracy over bins of equal mass"),
    Metric("classwise_ece", classwise_ece, "%", False, "gap between probability and frequency, mean over classes"),
    Metric("mce", mce, "%", False, "largest gap between confidence and accuracy in any of 15 bins"),
)
"""The metrics of classes by name."""

_DENSE = METRICS | _table(
    Metric("miou", mean_iou, "%", True, "intersection over union of predicted and true regions, mean over classes"),
    Metric("dice", dice, "%", True, "Dice coefficient of predicted and true regions, mean over classes"),
)

_MULTILABEL = _table(
    Metric("map", mean_average_precision, "%", True, "average precision, mean over labels"),
    Metric("micro_map", micro_average_precision, "%", True, "average precision of all labels as one"),
    Metric("nll", label_nll, "nats", False, "negative log-likelihood of a label under the mean probabilities"),
    Metric("gibbs_nll", gibbs_label_nll, "nats", False, "mean of the members' negative log-likelihoods"),
    Metric("brier", label_brier, "", False, "squared distance between probability and label, from 0 to 1"),
    Metric("ece", label_ece, "%", False, "gap between probability and frequency of a label, mean over labels"),
    Metric("label_accuracy", label_accuracy, "%", True, "fraction of labels that are predicted"),
    Metric("exact_match", exact_match, "%", True, "fraction of examples of which all labels are predicted"),
    Metric("f1", f1, "%", True, "F1 at the threshold 1/2, mean over labels"),
    Metric("micro_f1", micro_f1, "%", True, "F1 at the threshold 1/2 of all labels as one"),
)

_MEAN = _table(
    Metric("rmse", rmse, "", False, "root of the mean squared error"),
    Metric("mae", mae, "", False, "mean absolute error"),
    Metric("mse", mse, "", False, "mean squared error"),
    Metric("gibbs_mse", gibbs_mse, "", False, "mean of the members' squared errors"),
    Metric("r2", r2, "", True, "fraction of the variance of the targets that the mean explains"),
)

_POINT = _MEAN | _table(
    Metric("crps", crps, "", False, "continuous ranked probability score, with the members as a sample"),
)

_GAUSSIAN = _MEAN | _table(
    Metric("nll", density_nll, "nats", False, "negative log-density of the targets under the mixture of members"),
    Metric("gibbs_nll", gibbs_density_nll, "nats", False, "mean of the members' negative log-densities"),
    Metric("crps", crps, "", False, "continuous ranked probability score of the mixture of members"),
    Metric("coverage_90", coverage_90, "%", True, "targets in their 90 % interval; 90 % if calibrated"),
    Metric("coverage_95", coverage_95, "%", True, "targets in their 95 % interval; 95 % if calibrated"),
    Metric("width_90", width_90, "", False, "mean width of the 90 % interval"),
    Metric("width_95", width_95, "", False, "mean width of the 95 % interval"),
    Metric("quantile_error", quantile_error, "%", False, "gap between level and frequency of quantiles, mean of 19"),
    Metric("sharpness", sharpness, "", False, "mean predictive standard deviation"),
)

_QUANTILE = _MEAN | _table(
    Metric("pinball", pinball, "", False, "pinball loss of the mean quantiles, mean over levels"),
    Metric("gibbs_pinball", gibbs_pinball, "", False, "mean of the members' pinball losses"),
    Metric(
        "quantile_error", quantile_error, "%", False, "gap between level and frequency of quantiles, mean of levels"
    ),
    Metric("coverage", outer_coverage, "%", True, "targets between the lowest and the highest quantile"),
    Metric("width", outer_width, "", False, "mean distance of the lowest and the highest quantile"),
    Metric("sharpness", sharpness, "", False, "mean standard deviation of the closest normal distribution"),
)

TABLES: dict[type[RowPredictions], dict[str, Metric]] = {
    Predictions: METRICS,
    DensePredictions: _DENSE,
    MultilabelPredictions: _MULTILABEL,
    PointPredictions: _POINT,
    GaussianPredictions: _GAUSSIAN,
    QuantilePredictions: _QUANTILE,
}
"""The metrics of each kind of predictions by name."""
"""The metrics of each kind of predictions."""


def metrics_for(p: RowPredictions) -> dict[str, Metric]:
    """Return the metrics of these predictions by name.

    Args:
        p: Predictions of the members.
    """
    return next(TABLES[kind] for kind in type(p).__mro__ if kind in TABLES)
