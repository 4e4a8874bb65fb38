"""Warn after training if the members of an ensemble are nearly identical functions."""

from __future__ import annotations

import dataclasses
import math
import warnings

import torch
from torch import nn

from enfold.data import Data, Split
from enfold.data.convert import has_targets
from enfold.data.dataset import has_examples
from enfold.ensemble import Ensemble
from enfold.errors import UnsupportedOutput, level_outside
from enfold.evaluate import predict
from enfold.metrics import RegressionPredictions, accuracy, disagreement, gibbs_mse, pairwise_kl, per_member
from enfold.metrics.predictions import Predictions, RowPredictions

ALIKE = 0.1  # disagreement relative to a member's error rate; deep ensembles have about 0.9, BatchEnsemble 0.4
CLOSE = 0.01  # nats of pairwise KL
SAME = 1e-6
NEAR = 0.01  # spread of the members' means relative to their error
SOME = 1024  # examples


class LowDiversityWarning(UserWarning):
    """Members are nearly identical functions."""


def describe_similarity(p: RowPredictions) -> str | None:
    """Return a message if members are nearly identical: they rarely disagree and their distributions are close."""
    if p.num_members < 2:
        return None
    if isinstance(p, RegressionPredictions):
        return _describe_spread(p)
    if not isinstance(p, Predictions):
        return None
    p = p.known()
    error = 1 - float(per_member(accuracy, p).mean())
    differ, nats = disagreement(p), pairwise_kl(p)
    solved = error == 0 and nats > SAME  # without errors, agreement is not informative
    if differ > ALIKE * error or nats > CLOSE or solved:
        return None
    return (
        f"the {p.num_members} members are nearly identical: two of them disagree on {100 * differ:.2f} % of the "
        f"examples (error rate of a member: {100 * error:.2f} %), and their mean KL divergence is {nats:.1e} nats"
    )


def _describe_spread(p: RegressionPredictions) -> str | None:
    """Return a message if the means of the members differ by a small fraction of their error."""
    error = math.sqrt(gibbs_mse(p))
    spread = math.sqrt(p.means.var(0, correction=0).mean().item())
    if spread > NEAR * error or error == 0:
        return None
    return (
        f"the {p.num_members} members are nearly identical: the standard deviation between their predictions is "
        f"{spread:.1e}, that of their errors {error:.1e}"
    )


def warn_if_similar(model: nn.Module, data: Data) -> None:
    """Check the members on validation examples, or on training examples if there are none."""
    if not isinstance(model, Ensemble) or model.num_members < 2:
        return
    if not has_examples(data.val):
        if not isinstance(data.train, Split):
            return
        data = dataclasses.replace(data, val=data.train[torch.arange(min(len(data.train), SOME))])
    if not has_targets(data.val):  # their errors are unknown
        return
    try:
        found = describe_similarity(predict(model, data.val))
    except UnsupportedOutput:  # a custom objective may train other kinds of outputs
        return
    if found:
        warnings.warn(
            f"{found}: averaging them has almost no effect; use different initialisations, train longer, or give "
            "members more parameters of their own",
            LowDiversityWarning,
            stacklevel=level_outside(),
        )
