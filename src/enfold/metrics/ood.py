"""Out of distribution: scores that are higher where an input is unlike the data learnt from, and how well they tell.

With p̄ the mean of the members' probabilities p_m, z_m their logits and C classes:

    max_probability      1 - max_c p̄_c                                                      (1)
    entropy              H[p̄]                                                               (2)
    mutual_information   (1/M) Σ_m KL(p_m ‖ p̄)                                              (3)
    epkl                 (1/M²) Σ_ij KL(p_i ‖ p_j)                                          (4)
    rmi                  (1/M) Σ_m KL(p̄ ‖ p_m)                                              (5)
    variation_ratio      1 - (members that vote for the class with most votes) / M          (6)
    dempster_shafer      (1/M) Σ_m C / (C + Σ_c exp z_mc)                                   (7)
    energy               -(1/M) Σ_m log Σ_c exp z_mc                                        (8)

(3) to (6) ask how members differ, so one network has none, unless it is a Dirichlet student, whose own (3) to (5) are
those of the ensemble it stands for. (7) and (8) live in the size of the logits, which log-probabilities have lost.

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

Side = Literal["outside", "inside"]

OF_PROBABILITIES = ("max_probability", "entropy")
OF_MEMBERS = ("mutual_information", "epkl", "rmi", "variation_ratio")
OF_LOGITS = ("dempster_shafer", "energy")
SCORES = (*OF_PROBABILITIES, *OF_MEMBERS, *OF_LOGITS)

NORMALISED = 1e-3  # logits whose exponentials all sum to 1 within this are log-probabilities


def ood_scores(p: Predictions, logits: Tensor | None = None, alphas: Tensor | None = None) -> dict[str, Tensor]:
    """Every score that these predictions have, each (N,): (1), (2), of members (3) to (6), of logits (7), (8).

    `logits` are the unnormalised ones that the predictions were made from, (M, N, C), or (N, C) of one network.
    `alphas` are the concentrations (N, C) of a Dirichlet student, which has (3) to (5) of its own.
    """
    u = decomposition(p)
    found = {"max_probability": doubt(p), "entropy": u.total}  # (1), (2)
    if alphas is not None:
        u = of_concentrations(_checked(alphas, p, "alphas")[0])
    if p.num_members > 1 or alphas is not None:
        found |= {"mutual_information": u.epistemic, "epkl": u.epkl, "rmi": u.rmi}  # (3), (4), (5)
    if p.num_members > 1:
        found["variation_ratio"] = _variation_ratio(p)
    if logits is not None:
        found |= _of_logits(_checked(logits, p, "logits"))
    return found


def ood_score(name: str, p: Predictions, logits: Tensor | None = None, alphas: Tensor | None = None) -> Tensor:
    """One score (N,), or why these predictions do not have it."""
    if name not in SCORES:
        close = closest(name, SCORES)
        remedy = f"did you mean '{close}'?" if close else "choose one"
        raise EnfoldError(f"a score must be one of {', '.join(SCORES)}, got '{name}': {remedy}")
    if name in OF_LOGITS and logits is None:
        raise EnfoldError(
            f"{name} needs unnormalised logits, which log-probabilities do not hold, got none: "
            "pass logits=, the network's own outputs"
        )
    found = ood_scores(p, logits, alphas)
    if name not in found:
        raise EnfoldError(
            f"{name} asks how members differ and needs at least 2, got {p.num_members}: "
            "pass the predictions of all members, or choose another score"
        )
    return found[name]


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(outside > inside) + P(equal) / 2 for scores of examples inside and outside: 0.5 is chance, 1 is perfect.

    It is the same whichever side is called positive.
    """
    inside, outside = _scores(inside, outside)
    n_in, n_out = len(inside), len(outside)
    ranks = average_ranks(torch.cat([inside, outside]))[n_in:]
    return float((ranks.sum() - n_out * (n_out + 1) / 2) / (n_in * n_out))


def aupr(inside: Tensor, outside: Tensor, positive: Side = "outside") -> float:
    """Area under precision and recall, Σ_t (recall_t - recall_t-1) precision_t over distinct thresholds.

    Chance is the fraction of positives, so it can only be compared between sets of the same two sizes.
    """
    found, false = _curve(inside, outside, positive)
    recall = torch.cat([found.new_zeros(1), found / found[-1]])
    return float((recall.diff() * found / (found + false)).sum())


def fpr95(inside: Tensor, outside: Tensor, positive: Side = "outside", recall: float = 0.95) -> float:
    """The fraction of negatives taken for positives at the first threshold that finds 95 % of the positives.

    Papers differ in which side is positive, and the figures with it: here those outside, unless you say "inside".
    """
    if not 0 < recall <= 1:
        raise EnfoldError(f"a recall must be above 0 and at most 1, got {recall}: 0.95 is usual")
    found, false = _curve(inside, outside, positive)
    first = int((found >= recall * found[-1] * (1 - 1e-12)).nonzero()[0])
    return float(false[first] / false[-1])


def roc(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """The ROC curve with those outside as positives: false and true positive rates, from (0, 0) to (1, 1)."""
    found, false = _curve(inside, outside, "outside")
    start = found.new_zeros(1)
    return torch.cat([start, false / false[-1]]), torch.cat([start, found / found[-1]])


def detection(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """AUROC, and AUPR and FPR95 with those outside as positives; with those inside under "..._inside"."""
    return {
        "auroc": auroc(inside, outside),
        "aupr": aupr(inside, outside),
        "aupr_inside": aupr(inside, outside, "inside"),
        "fpr95": fpr95(inside, outside),
        "fpr95_inside": fpr95(inside, outside, "inside"),
    }


def normalised(logits: Tensor) -> bool:
    """Whether these are log-probabilities, whose exponentials sum to 1 for every example."""
    return bool((logits.logsumexp(-1).abs() < NORMALISED).all())


def doubt(p: Predictions) -> Tensor:
    """1 - max_c p̄_c (N,), as the sum of the other classes: near-certain answers keep their order."""
    probs = ensemble_log_probs(p).exp()  # (N, C)
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0.0).sum(-1)  # (1)


def _variation_ratio(p: Predictions) -> Tensor:
    votes = torch.nn.functional.one_hot(member_log_probs(p).argmax(-1), p.num_classes).sum(0)  # (N, C)
    return 1.0 - votes.max(-1).values.double() / p.num_members  # (6)


def _of_logits(logits: Tensor) -> dict[str, Tensor]:
    if normalised(logits):
        raise EnfoldError(
            "energy and dempster_shafer need unnormalised logits, got log-probabilities, whose exponentials sum to 1: "
            "pass the network's own outputs, or leave logits out"
        )
    size = logits.logsumexp(-1)  # (M, N)
    classes = torch.tensor(logits.shape[-1], dtype=torch.float64)
    return {
        "dempster_shafer": torch.sigmoid(classes.log() - size).mean(0),  # (7): C / (C + S) without overflow
        "energy": -size.mean(0),  # (8)
    }


def _checked(given: Tensor, p: Predictions, what: str) -> Tensor:
    """(M, N, C) in float64."""
    values = given if given.ndim == 3 else given[None]
    if values.shape != p.log_probs.shape:
        raise EnfoldError(
            f"{what} must be those of the predictions, of shape {tuple(p.log_probs.shape)}, got {tuple(given.shape)}: "
            "pass both for the same members and examples"
        )
    return values.detach().to("cpu", torch.float64)


def _scores(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    pair = []
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1 or not len(scores) or bool(scores.isnan().any()):
            raise EnfoldError(
                f"scores {name} must be numbers of shape (N,), at least one and no NaN, got the shape "
                f"{tuple(scores.shape)}: pass one score an example"
            )
        pair.append(scores.detach().to("cpu", torch.float64))
    return pair[0], pair[1]


def _curve(inside: Tensor, outside: Tensor, positive: Side) -> tuple[Tensor, Tensor]:
    """How many positives and negatives score at least each distinct threshold, from the highest down."""
    if positive not in get_args(Side):
        raise EnfoldError(f"the positive side must be one of {get_args(Side)}, got {positive!r}: choose one")
    inside, outside = _scores(inside, outside)
    yes, no = (outside, inside) if positive == "outside" else (-inside, -outside)
    values, index = torch.cat([yes, no]).unique(return_inverse=True)
    found = torch.bincount(index[: len(yes)], minlength=len(values)).flip(0).cumsum(0)
    false = torch.bincount(index[len(yes) :], minlength=len(values)).flip(0).cumsum(0)
    return found.double(), false.double()
