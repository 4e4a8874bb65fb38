"""Out-of-distribution (OOD) detection: scores that are higher for OOD inputs, and metrics of detection.

With p̄ the mean of the members' probabilities p_m, z_m their logits and C classes:

    max_probability      1 - max_c p̄_c                                                      (1)
    entropy              H[p̄]                                                               (2)
    mutual_information   (1/M) Σ_m KL(p_m ‖ p̄)                                              (3)
    epkl                 (1/M²) Σ_ij KL(p_i ‖ p_j)                                          (4)
    rmi                  (1/M) Σ_m KL(p̄ ‖ p_m)                                              (5)
    variation_ratio      1 - (members that vote for the class with most votes) / M          (6)
    dempster_shafer      (1/M) Σ_m C / (C + Σ_c exp z_mc)                                   (7)
    energy               -(1/M) Σ_m log Σ_c exp z_mc                                        (8)

(3) to (6) compare members and are undefined for a single network, except (3) to (5) for a Dirichlet student. (7) and
(8) need logits, as they depend on the normalizer that log-probabilities lack.

(1) Hendrycks, Gimpel, ICLR 2017, arXiv 1610.02136. (4), (5) Malinin, Gales, ICLR 2021, arXiv 2002.07650.
(7) Sensoy, Kaplan, Kandemir, NeurIPS 2018, arXiv 1806.01768. (8) Liu et al., NeurIPS 2020, arXiv 2010.03759.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from enfold.errors import EnfoldError, closest
from enfold.metrics.distributions import ensemble_log_probs, member_log_probs
from enfold.metrics.predictions import Predictions
from enfold.metrics.ranks import average_ranks
from enfold.metrics.uncertainty import decomposition, of_concentrations
from enfold.metrics.weights import Weights, weighted_mean

Side = Literal["outside", "inside"]

OF_PROBABILITIES = ("max_probability", "entropy")
OF_MEMBERS = ("mutual_information", "epkl", "rmi", "variation_ratio")
OF_LOGITS = ("dempster_shafer", "energy")
SCORES = (*OF_PROBABILITIES, *OF_MEMBERS, *OF_LOGITS)

NORMALISED = 1e-3  # tolerance of logsumexp below which logits are considered log-probabilities


def ood_scores(p: Predictions, logits: Tensor | None = None, alphas: Tensor | None = None) -> dict[str, Tensor]:
    """Return all scores that these predictions allow.

    Args:
        p: Predictions of an ensemble or a single network.
        logits: Unnormalized logits (M, N, C), or (N, C) of one network, for the scores (7) and (8).
        alphas: Concentrations (N, C) of a Dirichlet student, for its scores (3) to (5).

    Returns:
        Scores by name, each of shape (N,).

    Raises:
        EnfoldError: If `logits` or `alphas` do not fit the predictions.
    """
    u = decomposition(p)
    found = {"max_probability": max_probability_score(p), "entropy": u.total}  # (1), (2)
    if alphas is not None:
        u = of_concentrations(_as_float64(alphas, p, "alphas")[0])
    if p.num_members > 1 or alphas is not None:
        found |= {"mutual_information": u.epistemic, "epkl": u.epkl, "rmi": u.rmi}  # (3), (4), (5)
    if p.num_members > 1:
        found["variation_ratio"] = _variation_ratio(p)
    if logits is not None:
        found |= _logit_scores(_as_float64(logits, p, "logits"), p.weights)
    return found


def ood_score(name: str, p: Predictions, logits: Tensor | None = None, alphas: Tensor | None = None) -> Tensor:
    """Return one score of each example (N,).

    Args:
        name: Name of the score, one of `SCORES`.
        p: Predictions of an ensemble or a single network.
        logits: Unnormalized logits, see `ood_scores`.
        alphas: Concentrations of a Dirichlet student, see `ood_scores`.

    Raises:
        EnfoldError: If the score is unknown or these predictions do not allow it.
    """
    if name not in SCORES:
        close = closest(name, SCORES)
        remedy = f"did you mean '{close}'?" if close else "choose one of these"
        raise EnfoldError(f"name must be one of {', '.join(SCORES)}, got '{name}': {remedy}")
    if name in OF_LOGITS and logits is None:
        raise EnfoldError(f"logits must be given for {name}, got None: pass logits=, the outputs of the network")
    found = ood_scores(p, logits, alphas)
    if name not in found:
        raise EnfoldError(
            f"{name} compares members and needs at least 2, got {p.num_members}: "
            "pass the predictions of all members or choose another score"
        )
    return found[name]


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the area under the ROC curve, P(outside > inside) + P(equal) / 2: 0.5 is chance level.

    Args:
        inside: Scores of in-distribution examples (N,).
        outside: Scores of OOD examples (K,).
    """
    inside, outside = _scores(inside, outside)
    n_in, n_out = len(inside), len(outside)
    ranks = average_ranks(torch.cat([inside, outside]))[n_in:]
    return float((ranks.sum() - n_out * (n_out + 1) / 2) / (n_in * n_out))


def aupr(inside: Tensor, outside: Tensor, positive: Side = "outside") -> float:
    """Return the area under the precision-recall curve, Σ_t (recall_t - recall_t-1) precision_t over thresholds.

    Chance level is the fraction of positives, so that only values for data sets of the same sizes are comparable.

    Args:
        inside: Scores of in-distribution examples (N,).
        outside: Scores of OOD examples (K,).
        positive: Which side is the positive class.
    """
    found, false = _curve(inside, outside, positive)
    recall = torch.cat([found.new_zeros(1), found / found[-1]])
    return float((recall.diff() * found / (found + false)).sum())


def fpr95(inside: Tensor, outside: Tensor, positive: Side = "outside", recall: float = 0.95) -> float:
    """Return the false positive rate at the highest threshold with a recall of 95 %.

    Args:
        inside: Scores of in-distribution examples (N,).
        outside: Scores of OOD examples (K,).
        positive: Which side is the positive class; papers differ in this choice.
        recall: The recall to reach.

    Raises:
        EnfoldError: If `recall` is out of range or the scores are invalid.
    """
    if not 0 < recall <= 1:
        raise EnfoldError(f"recall must be above 0 and at most 1, got {recall}: use for example recall=0.95")
    found, false = _curve(inside, outside, positive)
    first = int((found >= recall * found[-1] * (1 - 1e-12)).nonzero()[0])
    return float(false[first] / false[-1])


def roc(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Return false and true positive rates of the ROC curve, from (0, 0) to (1, 1); OOD examples are positive.

    Args:
        inside: Scores of the examples of the distribution, higher is less certain.
        outside: Scores of the OOD examples.
    """
    found, false = _curve(inside, outside, "outside")
    start = found.new_zeros(1)
    return torch.cat([start, false / false[-1]]), torch.cat([start, found / found[-1]])


def detection(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """Return AUROC, AUPR and FPR95 by name, with OOD examples as positives; "..._inside" has the reverse.

    Args:
        inside: Scores of the examples of the distribution, higher is less certain.
        outside: Scores of the OOD examples.
    """
    return {
        "auroc": auroc(inside, outside),
        "aupr": aupr(inside, outside),
        "aupr_inside": aupr(inside, outside, "inside"),
        "fpr95": fpr95(inside, outside),
        "fpr95_inside": fpr95(inside, outside, "inside"),
    }


def is_normalised(logits: Tensor) -> bool:
    """Return whether these are log-probabilities, whose exponentials sum to 1 for every example."""
    return bool((logits.logsumexp(-1).abs() < NORMALISED).all())


def max_probability_score(p: Predictions) -> Tensor:
    """Return 1 - max_c p̄_c (N,), computed as the sum over the other classes, which is exact close to 0."""
    probs = ensemble_log_probs(p).exp()  # (N, C)
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0.0).sum(-1)  # (1)


def _variation_ratio(p: Predictions) -> Tensor:
    each = torch.nn.functional.one_hot(member_log_probs(p).argmax(-1), p.num_classes)  # (M, N, C)
    if p.weights is not None:
        return 1.0 - weighted_mean(each.double(), p.weights).max(-1).values
    return 1.0 - each.sum(0).max(-1).values.double() / p.num_members  # (6)


def _logit_scores(logits: Tensor, weights: Weights) -> dict[str, Tensor]:
    if is_normalised(logits):
        raise EnfoldError(
            "logits must be unnormalised for energy and dempster_shafer, got log-probabilities: pass the outputs of "
            "the network, or logits=None"
        )
    size = logits.logsumexp(-1)  # (M, N)
    classes = torch.tensor(logits.shape[-1], dtype=torch.float64)
    return {
        "dempster_shafer": weighted_mean(
            torch.sigmoid(classes.log() - size), weights
        ),  # (7): C / (C + S) without overflow
        "energy": -weighted_mean(size, weights),  # (8)
    }


def _as_float64(given: Tensor, p: Predictions, what: str) -> Tensor:
    """Return a tensor of shape (M, N, C) in float64, checked against the predictions."""
    values = given if given.ndim == 3 else given[None]
    if values.shape != p.log_probs.shape:
        raise EnfoldError(
            f"{what} must have the shape {tuple(p.log_probs.shape)} of the predictions, got {tuple(given.shape)}: "
            "pass both for the same members and examples"
        )
    return values.detach().to("cpu", torch.float64)


def _scores(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    pair = []
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1 or not len(scores) or bool(scores.isnan().any()):
            raise EnfoldError(
                f"{name} must be a non-empty tensor of shape (N,) without NaN, got shape {tuple(scores.shape)}: "
                "pass one score per example"
            )
        pair.append(scores.detach().to("cpu", torch.float64))
    return pair[0], pair[1]


def _curve(inside: Tensor, outside: Tensor, positive: Side) -> tuple[Tensor, Tensor]:
    """Return the numbers of positives and negatives that reach each threshold, from the highest threshold down."""
    if positive not in get_args(Side):
        raise EnfoldError(f"positive must be one of {get_args(Side)}, got {positive!r}: choose one of these")
    inside, outside = _scores(inside, outside)
    yes, no = (outside, inside) if positive == "outside" else (-inside, -outside)
    values, index = torch.cat([yes, no]).unique(return_inverse=True)
    found = torch.bincount(index[: len(yes)], minlength=len(values)).flip(0).cumsum(0)
    false = torch.bincount(index[len(yes) :], minlength=len(values)).flip(0).cumsum(0)
    return found.double(), false.double()
