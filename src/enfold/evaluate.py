"""Evaluate: run a model once, measure often."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from enfold.data.dataset import Data, evaluation_batches, has_examples
from enfold.errors import EnfoldError
from enfold.members.base import Members, Mixed
from enfold.members.engines import image_layout
from enfold.members.inputs import call_protected, in_type_of
from enfold.members.outputs import logits_of, require_classes
from enfold.members.shapes import refuse_shape
from enfold.metrics import METRICS, calibrated, fit_temperature, gain_recovered, gibbs_nll, nll, per_member
from enfold.modes import evaluating
from enfold.predictions import Predictions

PartName = Literal["train", "validation", "test"]


def member_logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """(M, B, C) of any model, of inputs in its own type: a predictor gives it, a plain network is M = 1."""
    given = inputs
    if not isinstance(model, Mixed):  # each of its networks may have its own
        given = in_type_of(model, inputs)
    if not hasattr(model, "num_members"):
        given = image_layout(model, given)
        return logits_of(call_protected(model, given) if given is inputs else model(given))[None]
    outputs: Tensor = model(given) if isinstance(model, Members) else call_protected(model, given)
    return outputs


@torch.inference_mode()
def predict(model: nn.Module, data: Data, part: PartName = "test", batch_size: int = 1024) -> Predictions:
    """What every member says about every example of one part, in eval mode; chunks of about 1,000 rows run fastest."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    log_probs: list[Tensor] = []
    labels: list[Tensor] = []
    with evaluating(model):
        for inputs, batch_labels in evaluation_batches(data, getattr(data, part), batch_size):
            try:
                logits = require_classes(member_logits(model, inputs.to(device)), "an evaluation").float()
            except Exception as error:
                if not labels:
                    refuse_shape(model, inputs, error)
                raise
            log_probs.append(torch.log_softmax(logits, dim=-1).cpu())
            labels.append(batch_labels.cpu())
    if not labels:
        raise EnfoldError(
            f"the {part} part must hold examples to predict, got none: "
            "pass a Split, a DataLoader or a list, not a generator that is used up"
        )
    return Predictions(torch.cat(log_probs, dim=1), torch.cat(labels))


def score(test: Predictions, validation: Predictions | None = None) -> dict[str, float]:
    """Every metric of the mean prediction; with validation predictions also those at the temperature fitted there."""
    scores = {name: metric.function(test) for name, metric in METRICS.items()}
    if validation is not None:
        scores["temperature"] = fit_temperature(validation)
        for name in ("nll", "ece", "brier"):
            scores[f"c{name}"] = calibrated(METRICS[name].function, test, validation)
    return scores


def mean_member_score(test: Predictions, validation: Predictions | None = None) -> dict[str, float]:
    """The mean over members of each member's own scores: what one of the networks alone gives you."""
    rows = []
    for index in range(test.num_members):
        rows.append(score(test.member(index), None if validation is None else validation.member(index)))
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def recovered(one: Mapping[str, float], mean_member: Mapping[str, float], ensemble: Mapping[str, float]) -> float:
    """How much of the ensemble's gain in NLL one network keeps: 0 is a mean member, 1 the ensemble."""
    return gain_recovered(one["nll"], mean_member["nll"], ensemble["nll"], higher_is_better=False)


@dataclass(frozen=True)
class Row:
    """One model's scores on test data, printable as one line."""

    name: str
    scores: dict[str, float]
    gain_recovered: float | None = None  # of the ensemble's NLL gain

    def __str__(self) -> str:
        parts = [f"{name} {shown(name, self.scores[name])}" for name in ("accuracy", "nll", "ece", "brier")]
        if self.gain_recovered is not None:
            parts.append(f"gain recovered {shown_gain(self.gain_recovered)}")
        return f"{self.name}: " + "  ".join(parts)


def shown(name: str, value: float) -> str:
    """A score with its unit, as people read it."""
    metric = METRICS[name]
    return f"{100 * value:.2f} %" if metric.unit == "%" else f"{value:.4f}"


def shown_gain(gain: float) -> str:
    """The gain recovered in per cent; a dash where the ensemble had none."""
    return f"{100 * gain:.0f} %" if math.isfinite(gain) else "-"


def evaluate(model: nn.Module, data: Data, *, members: nn.Module | None = None, name: str | None = None) -> Row:
    """Score a model on the test part; with the members it was folded from, also the share of their gain it keeps."""
    test = predict(model, data, "test")
    validation = predict(model, data, "validation") if has_examples(data.validation) else None
    scores = score(test, validation)
    gain = None
    if members is not None:
        theirs = predict(members, data, "test")
        gain = gain_recovered(scores["nll"], gibbs_nll(theirs), nll(theirs), higher_is_better=False)
    return Row(name or type(model).__name__, scores, gain)


def best_member(members: nn.Module, data: Data) -> int:
    """The member with the lowest NLL on validation data."""
    return int(per_member(nll, predict(members, data, "validation")).argmin())
