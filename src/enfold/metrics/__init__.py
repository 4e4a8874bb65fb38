"""Metrics: pure functions of `Predictions`, in float64.

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
from enfold.metrics.ood import aupr, auroc, detection, fpr95, ood_score, ood_scores, roc
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.metrics.recovered import beyond_noise, gain_interval, gain_recovered, paired_bootstrap
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

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy, "%", True, "fraction of examples whose most probable class is the label"),
        Metric("nll", nll, "nats", False, "negative log-likelihood of the labels under the mean probabilities"),
        Metric("gibbs_nll", gibbs_nll, "nats", False, "mean of the members' negative log-likelihoods"),
        Metric("brier", brier, "", False, "squared distance between probabilities and one-hot label, from 0 to 2"),
        Metric("ece", ece, "%", False, "gap between confidence and accuracy, mean over 15 bins of equal width"),
        Metric("adaptive_ece", adaptive_ece, "%", False, "gap between confidence and accuracy over bins of equal mass"),
        Metric("classwise_ece", classwise_ece, "%", False, "gap between probability and frequency, mean over classes"),
        Metric("mce", mce, "%", False, "largest gap between confidence and accuracy in any of 15 bins"),
    )
}

TABLES: dict[type[RowPredictions], dict[str, Metric]] = {Predictions: METRICS}
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
    "Difference",
    "FewExamplesWarning",
    "MatrixScaler",
    "Metric",
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
    "apply_temperature",
    "aupr",
    "aurc",
    "auroc",
    "beyond_noise",
    "bias_variance_covariance",
    "bregman_variance",
    "brier",
    "cka",
    "classwise_ece",
    "cosine_similarity",
    "debiased_ece",
    "decomposition",
    "detection",
    "disagreement",
    "disagreement_matrix",
    "double_fault",
    "draw_counts",
    "ece",
    "error_correlation",
    "evaluate_calibrated",
    "example_brier",
    "example_correct",
    "example_nll",
    "example_rank",
    "excess_aurc",
    "fit_temperature",
    "fpr95",
    "gain_interval",
    "gain_recovered",
    "gibbs_nll",
    "jensen_gap",
    "left_out_fraction",
    "linear_cka",
    "majority_vote",
    "majority_vote_accuracy",
    "masegosa_variance",
    "mce",
    "mean_member",
    "metric_value",
    "metrics_for",
    "misclassification_auroc",
    "nll",
    "normalised_disagreement",
    "of_concentrations",
    "ood_score",
    "ood_scores",
    "over_modes",
    "over_subsets",
    "paired_bootstrap",
    "paired_difference",
    "pairwise_kl",
    "per_member",
    "prr",
    "q_statistic",
    "reliability",
    "reliability_band",
    "replicates",
    "risk_coverage",
    "roc",
    "selective",
    "tace",
    "top_k_accuracy",
    "uncertainty_correlation",
    "vote_accuracy",
]
