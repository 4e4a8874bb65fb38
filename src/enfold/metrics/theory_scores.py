"""Scores of an ensemble from the theory of averaging, beside its metrics.

    vote_accuracy              accuracy of the majority vote
    independent_vote_accuracy  that of M independent voters with the members' mean error
    jensen_gap                 mean member's NLL minus the ensemble's, at least 0
    masegosa_variance          V, the second-order term of the bound
    masegosa_bound             mean member's NLL minus V, at least the ensemble's NLL                  (1)
    bregman_variance           the members' divergence from their centroid
    ambiguity                  mean member's squared error minus the ensemble's, at least 0: numbers

(1) A. R. Masegosa: Learning under model misspecification, NeurIPS 2020, arXiv:1912.08335.
"""

from __future__ import annotations

from typing import Any

from enfold.metrics.averaging import member_log_likelihoods
from enfold.metrics.diversity import bregman_variance, masegosa_variance
from enfold.metrics.metric import Metric
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.metrics.regression_predictions import RegressionPredictions
from enfold.metrics.scores import accuracy, per_member
from enfold.metrics.theory import jensen_gap, majority_vote_accuracy
from enfold.metrics.vote import vote_accuracy
from enfold.metrics.weights import weighted_mean


def _independent(p: Predictions) -> float:
    return majority_vote_accuracy(p.num_members, 1 - float(per_member(accuracy, p).mean()))


def _bound(p: Predictions) -> float:
    return _mean_nll(p) - masegosa_variance(p)


def _mean_nll(p: Predictions) -> float:
    """Return the members' mean NLL, weighted if the members are."""
    return -weighted_mean(member_log_likelihoods(p), p.weights).mean().item()


def _mean_gap(p: Predictions) -> float:
    return jensen_gap(p).mean().item()


def _ambiguity(p: RegressionPredictions) -> float:
    centred = (p.means - weighted_mean(p.means, p.weights)).square()
    return weighted_mean(centred, p.weights).mean().item()


CLASSES = {
    metric.name: metric
    for metric in (
        Metric("vote_accuracy", vote_accuracy, "%", True, "accuracy of the majority vote"),
        Metric(
            "independent_vote_accuracy", _independent, "%", True, "that of as many independent voters of the same error"
        ),
        Metric("jensen_gap", _mean_gap, "nats", True, "mean member's NLL minus the ensemble's"),
        Metric("masegosa_variance", masegosa_variance, "", True, "second-order term that tightens Jensen's bound"),
        Metric("masegosa_bound", _bound, "nats", False, "mean member's NLL minus that term, at least the NLL"),
        Metric("bregman_variance", bregman_variance, "nats", True, "mean divergence of members from their centroid"),
    )
}
NUMBERS = {"ambiguity": Metric("ambiguity", _ambiguity, "", True, "mean member's squared error minus the ensemble's")}


def theory_metrics(p: RowPredictions) -> dict[str, Metric]:
    """Return the scores of the theory that are defined for these predictions, by name; none for multi-label."""
    if isinstance(p, RegressionPredictions):
        return NUMBERS
    return CLASSES if isinstance(p, Predictions) and p.known() is p else {}


def theory_scores(p: Any) -> dict[str, float]:
    """Return the scores of the theory of an ensemble; empty for a single network.

    Args:
        p: Predictions of an ensemble.
    """
    return {} if p.num_members < 2 else {name: metric(p) for name, metric in theory_metrics(p).items()}
