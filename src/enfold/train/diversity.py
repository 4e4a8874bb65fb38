"""After training: members that are nearly the same function are no ensemble, and the user is told so."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import nn

from enfold.data import Data, Split
from enfold.data.dataset import has_examples
from enfold.ensemble import Ensemble
from enfold.errors import UnsupportedOutput, level_outside
from enfold.evaluate import predict
from enfold.metrics import accuracy, disagreement, pairwise_kl, per_member
from enfold.metrics.predictions import Predictions

ALIKE = 0.1  # disagreement as a fraction of a member's errors; deep ensembles have about 0.9, BatchEnsemble 0.4
CLOSE = 0.01  # nats of pairwise KL
SAME = 1e-6
SOME = 1024  # examples


class LowDiversityWarning(UserWarning):
    """Members are nearly identical functions."""


def alike(p: Predictions) -> str | None:
    """What shows that members are nearly one function: they disagree on few examples, and say the same about all."""
    if p.num_members < 2:
        return None
    error = 1 - float(per_member(accuracy, p).mean())
    differ, nats = disagreement(p), pairwise_kl(p)
    solved = error == 0 and nats > SAME  # where nobody errs, agreement says little
    if differ > ALIKE * error or nats > CLOSE or solved:
        return None
    return (
        f"the {p.num_members} members are nearly one function: two of them disagree on {100 * differ:.2f} % of the "
        f"examples, where a member is wrong on {100 * error:.2f} %, and their predictions are "
        f"{nats:.1e} nats apart"
    )


def warn_if_alike(model: nn.Module, data: Data) -> None:
    """The check on validation data, or on some training examples where there are none."""
    if not isinstance(model, Ensemble) or model.num_members < 2:
        return
    if not has_examples(data.val):
        if not isinstance(data.train, Split):
            return
        data = dataclasses.replace(data, val=data.train[torch.arange(min(len(data.train), SOME))])
    try:
        found = alike(predict(model, data.val))
    except UnsupportedOutput:  # an objective of the user's own may be about anything
        return
    if found:
        warnings.warn(
            f"{found}: averaging them gains next to nothing; start them further apart, train longer, or share less",
            LowDiversityWarning,
            stacklevel=level_outside(),
        )
