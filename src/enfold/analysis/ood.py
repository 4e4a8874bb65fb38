"""OOD detection: how well uncertainty scores separate test inputs from out-of-distribution inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from enfold.data.dataset import Data, Part, Split, evaluation_batches
from enfold.data.ood import Outside
from enfold.data.tree import to_device
from enfold.distill.dirichlet import Dirichlet
from enfold.engines.modes import eval_mode
from enfold.engines.outputs import require_classes
from enfold.evaluate import member_logits
from enfold.metrics.dirichlet import concentrations
from enfold.metrics.ood import detection, is_normalised, ood_scores
from enfold.metrics.predictions import Predictions
from enfold.progress import progress

INSIDE = "inside"  # the key of the test split among the names of OOD sets
Scores = dict[str, Tensor]  # score -> (N,)
Detected = dict[str, dict[str, dict[str, float]]]  # set -> score -> measure -> value


@dataclass(frozen=True)
class Detection:
    """OOD detection results of one model."""

    detected: Detected
    scores: Mapping[str, Scores]  # set -> score -> (N,), the test split under "inside"


def score_ood(
    models: Mapping[str, nn.Module], data: Data, sets: Sequence[Outside], *, members_of: str | None = None
) -> tuple[dict[str, Detection], Detected | None]:
    """Return AUROC, AUPR and FPR95 of every model, OOD set and uncertainty score.

    Args:
        models: Networks or ensembles by name.
        data: Data with the test split.
        sets: The OOD sets.
        members_of: The name of an ensemble of which the mean member is evaluated too.

    Returns:
        The results by model, and those of the mean member (or None). Energy and Dempster–Shafer scores are omitted for
        models that return log probabilities.
    """
    found: dict[str, Detection] = {}
    mean_member: Detected | None = None
    with progress("OOD sets", len(models) * (len(sets) + 1)) as bar:
        for label, model in models.items():
            outputs = {INSIDE: compute_logits(model, data, data.test)}
            bar.advance(1)
            for each in sets:
                outputs[each.name] = compute_logits(model, data, each)
                bar.advance(1)
            found[label] = detect(outputs, dirichlet=isinstance(model, Dirichlet))
            if label == members_of:
                single = [
                    detect({name: each[m : m + 1] for name, each in outputs.items()})
                    for m in range(len(outputs[INSIDE]))
                ]
                mean_member = average_detections([each.detected for each in single])
    return found, mean_member


@torch.inference_mode()
def compute_logits(model: nn.Module, data: Data, part: Part, batch_size: int = 1024) -> Tensor:
    """Return the logits of every member for every example, (M, N, C), in eval mode, normalized as in `data`.

    Args:
        model: The model.
        data: The data.
        part: The examples.
        batch_size: The number of examples in a batch.
    """
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    prepared = data.with_statistics(part) if isinstance(part, Split) else part
    with eval_mode(model):
        found = [
            require_classes(member_logits(model, to_device(inputs, device)), "OOD detection").float().cpu()
            for inputs, _, _ in evaluation_batches(prepared, batch_size)
        ]
    return torch.cat(found, dim=1)


def detect(outputs: Mapping[str, Tensor], *, dirichlet: bool = False) -> Detection:
    """Return the results from logits (M, N, C) by set; those of a Dirichlet student are ln α."""
    normalized = is_normalised(outputs[INSIDE])
    scores = {}
    for name, logits in outputs.items():
        p = Predictions.from_logits(logits, torch.zeros(logits.shape[1], dtype=torch.long))
        alphas = concentrations(logits[0]) if dirichlet and len(logits) == 1 else None
        scores[name] = ood_scores(p, None if normalized else logits, alphas)
    inside = scores[INSIDE]
    detected = {
        name: {score: detection(inside[score], values) for score, values in each.items()}
        for name, each in scores.items()
        if name != INSIDE
    }
    return Detection(detected, scores)


def average_detections(each: Sequence[Detected]) -> Detected:
    """Return the mean of every measure, for example over single members."""
    return {
        name: {
            score: {figure: fmean(one[name][score][figure] for one in each) for figure in figures}
            for score, figures in scores.items()
        }
        for name, scores in each[0].items()
    }
