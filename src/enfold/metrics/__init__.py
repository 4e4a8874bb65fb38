"""Metrics: pure functions of predictions, in float64; `metrics_for` has those of each kind of predictions.

Rates and calibration errors are fractions; where a metric's unit is "%", a table shows 100 times the value.
"""

from __future__ import annotations

from enfold.metrics.bands import ReliabilityBand, reliability_band
from enfold.metrics.bootstrap import Difference, draw_counts, metric_value, paired_difference, replicates
from enfold.metrics.calibration import (
    FewExamplesWarning,
    Reliability,
    ace,
    adaptive_ece,
    classwise_ece,
    debiased_ece,
    ece,
    mce,
    reliability,
    tace,
)
from enfold.metrics.calibrators import Calibrator, MatrixScaler, TemperatureScaler, VectorScaler
from enfold.metrics.diversity import (
    agreement,
    bregman_variance,
    cka,
    cosine_similarity,
    disagreement,
    disagreement_matrix,
    double_fault,
    error_correlation,
    linear_cka,
    masegosa_variance,
    normalised_disagreement,
    pairwise_kl,
    q_statistic,
)
from enfold.metrics.metric import Metric
from enfold.metrics.multilabel import (
    MultilabelPredictions,
    average_precision,
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
from enfold.metrics.ood import aupr, auroc, detection, fpr95, ood_score, ood_scores, roc
from enfold.metrics.predictions import DensePredictions, Predictions, RowPredictions
from enfold.metrics.recovered import beyond_noise, gain_interval, gain_recovered, paired_bootstrap
from enfold.metrics.regression import (
    coverage,
    coverage_90,
    coverage_95,
    crps,
    density_nll,
    example_crps,
    example_density_nll,
    example_pinball,
    example_squared_error,
    gibbs_density_nll,
    gibbs_mse,
    gibbs_pinball,
    interval,
    mae,
    mixture_quantile,
    moment_nll,
    mse,
    outer_coverage,
    outer_width,
    pinball,
    probability_below,
    quantile_error,
    r2,
    rmse,
    sharpness,
    width,
    width_90,
    width_95,
)
from enfold.metrics.regression_predictions import (
    GaussianPredictions,
    PointPredictions,
    QuantilePredictions,
    RegressionPredictions,
)
from enfold.metrics.scale import apply_scale, evaluate_scaled, fit_scale
from enfold.metrics.scores import (
    accuracy,
    brier,
    example_brier,
    example_correct,
    example_nll,
    example_rank,
    gibbs_nll,
    mean_member,
    nll,
    per_member,
    top_k_accuracy,
)
from enfold.metrics.segmentation import class_dice, class_iou, confusion, dice, mean_iou
from enfold.metrics.selective import (
    RiskCoverage,
    aurc,
    excess_aurc,
    misclassification_auroc,
    prr,
    risk_coverage,
    selective,
)
from enfold.metrics.subsets import over_modes, over_subsets
from enfold.metrics.temperature import apply_temperature, evaluate_calibrated, fit_temperature
from enfold.metrics.theory import (
    Ambiguity,
    BiasVarianceCovariance,
    ambiguity_decomposition,
    bias_variance_covariance,
    jensen_gap,
    left_out_fraction,
    majority_vote_accuracy,
)
from enfold.metrics.uncertainty import (
    Uncertainty,
    UncertaintyCorrelation,
    decomposition,
    of_concentrations,
    uncertainty_correlation,
)
from enfold.metrics.vote import majority_vote, vote_accuracy


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
"""The metrics of each kind of predictions."""


def metrics_for(p: RowPredictions) -> dict[str, Metric]:
    """Return the metrics of these predictions by name."""
    return next(TABLES[kind] for kind in type(p).__mro__ if kind in TABLES)


__all__ = [
    "METRICS",
    "TABLES",
    "Ambiguity",
    "BiasVarianceCovariance",
    "Calibrator",
    "DensePredictions",
    "Difference",
    "FewExamplesWarning",
    "GaussianPredictions",
    "MatrixScaler",
    "Metric",
    "MultilabelPredictions",
    "PointPredictions",
    "Predictions",
    "QuantilePredictions",
    "RegressionPredictions",
    "Reliability",
    "ReliabilityBand",
    "RiskCoverage",
    "RowPredictions",
    "TemperatureScaler",
    "Uncertainty",
    "UncertaintyCorrelation",
    "VectorScaler",
    "accuracy",
    "ace",
    "adaptive_ece",
    "agreement",
    "ambiguity_decomposition",
    "apply_scale",
    "apply_temperature",
    "aupr",
    "aurc",
    "auroc",
    "average_precision",
    "beyond_noise",
    "bias_variance_covariance",
    "bregman_variance",
    "brier",
    "cka",
    "class_dice",
    "class_iou",
    "classwise_ece",
    "confusion",
    "cosine_similarity",
    "coverage",
    "coverage_90",
    "coverage_95",
    "crps",
    "debiased_ece",
    "decomposition",
    "density_nll",
    "detection",
    "dice",
    "disagreement",
    "disagreement_matrix",
    "double_fault",
    "draw_counts",
    "ece",
    "error_correlation",
    "evaluate_calibrated",
    "evaluate_scaled",
    "exact_match",
    "example_brier",
    "example_correct",
    "example_crps",
    "example_density_nll",
    "example_nll",
    "example_pinball",
    "example_rank",
    "example_squared_error",
    "excess_aurc",
    "f1",
    "fit_scale",
    "fit_temperature",
    "fpr95",
    "gain_interval",
    "gain_recovered",
    "gibbs_density_nll",
    "gibbs_label_nll",
    "gibbs_mse",
    "gibbs_nll",
    "gibbs_pinball",
    "interval",
    "jensen_gap",
    "label_accuracy",
    "label_brier",
    "label_ece",
    "label_nll",
    "left_out_fraction",
    "linear_cka",
    "mae",
    "majority_vote",
    "majority_vote_accuracy",
    "masegosa_variance",
    "mce",
    "mean_average_precision",
    "mean_iou",
    "mean_member",
    "metric_value",
    "metrics_for",
    "micro_average_precision",
    "micro_f1",
    "misclassification_auroc",
    "mixture_quantile",
    "moment_nll",
    "mse",
    "nll",
    "normalised_disagreement",
    "of_concentrations",
    "ood_score",
    "ood_scores",
    "outer_coverage",
    "outer_width",
    "over_modes",
    "over_subsets",
    "paired_bootstrap",
    "paired_difference",
    "pairwise_kl",
    "per_member",
    "pinball",
    "probability_below",
    "prr",
    "q_statistic",
    "quantile_error",
    "r2",
    "reliability",
    "reliability_band",
    "replicates",
    "risk_coverage",
    "rmse",
    "roc",
    "selective",
    "sharpness",
    "tace",
    "top_k_accuracy",
    "uncertainty_correlation",
    "vote_accuracy",
    "width",
    "width_90",
    "width_95",
]
