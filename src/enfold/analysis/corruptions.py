"""Scores on corrupted test images, by kind and severity.

    c-metric = mean over kinds and severities of the metric on the corrupted test split                        (1)
    mCE = mean over kinds of Σ_severities error of the model / Σ_severities error of a reference model          (2)

D. Hendrycks, T. Dietterich: Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
arXiv:1903.12261. Rows are named "corrupted", or "CIFAR-10-C" for the official images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import nn

from enfold.data import Corrupted, Data, Split, corrupt_split, read_cifar_c
from enfold.data.corruptions import SEVERITIES, STANDARD
from enfold.data.dataset import has_examples, some
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import METRICS, per_member
from enfold.metrics.predictions import Predictions
from enfold.progress import progress

MEASURED = ("accuracy", "nll", "ece", "brier")
MEAN_MEMBER = "mean member"
ByKind = dict[str, dict[str, dict[str, float]]]  # kind -> severity -> metric -> value


def score_corruptions(
    models: Mapping[str, nn.Module],
    data: Data,
    kinds: Sequence[str] = STANDARD,
    severities: Sequence[int] = SEVERITIES,
    *,
    examples: int | None = None,
    seed: int = 0,
    members_of: str | None = None,
    folder: str | Path | None = None,
) -> dict[str, ByKind]:
    """Return the scores of every model on corrupted copies of the test images.

    Args:
        models: Networks or ensembles by name.
        data: Data with test images in memory.
        kinds: Names of corruptions.
        severities: From 1 to 5.
        examples: The number of test images; None for all.
        seed: The seed of the corruptions.
        members_of: The name of an ensemble; the mean score of its members is added as "mean member".
        folder: The folder of the official CIFAR-10-C or CIFAR-100-C; None to compute the corruptions.

    Returns:
        For each model: kind -> severity -> metric -> value.
    """
    images = require_images(data)
    chosen = some(images.labels, examples)
    subset = data.replace(test=images[chosen])
    found: dict[str, ByKind] = {label: {} for label in (*models, *([MEAN_MEMBER] if members_of else []))}
    with progress("corruptions", len(kinds) * len(severities) * len(models)) as bar:
        for kind in kinds:
            for severity in severities:
                if folder is None:
                    moved = subset.replace(test=corrupt_split(subset, kind, severity, seed=seed))
                else:
                    moved = subset.replace(test=load_official(data, folder, kind, severity)[chosen])
                for label, model in models.items():
                    predictions = predict(model, moved.test)
                    found[label].setdefault(kind, {})[str(severity)] = _scores(predictions)
                    if label == members_of:
                        found[MEAN_MEMBER].setdefault(kind, {})[str(severity)] = _mean_member(predictions)
                    bar.advance(1)
    return found


def average_scores_over_kinds(by_kind: ByKind) -> dict[str, float]:
    """Return equation (1) for each metric."""
    cells = [scores for severities in by_kind.values() for scores in severities.values()]
    return {name: fmean(scores[name] for scores in cells) for name in MEASURED}


def compute_mce(by_kind: ByKind, reference: ByKind) -> float:
    """Return equation (2), the mCE, as a fraction: 1 equals the reference model, lower is better.

    Args:
        by_kind: Error rate by kind and severity.
        reference: The same of the reference model.

    Raises:
        EnfoldError: If kinds or severities differ, or the reference model has no errors for a kind.
    """
    if {kind: set(each) for kind, each in by_kind.items()} != {kind: set(each) for kind, each in reference.items()}:
        raise EnfoldError(
            "by_kind and reference must have the same kinds and severities, but they differ: "
            "score both with one call of corrupted_scores"
        )
    ratios = []
    for kind, severities in by_kind.items():
        errors, theirs = (sum(1 - each["accuracy"] for each in s.values()) for s in (severities, reference[kind]))
        if not theirs:
            raise EnfoldError(f"reference must have errors for every kind, got none for {kind}: choose another model")
        ratios.append(errors / theirs)
    return fmean(ratios)  # (2)


@dataclass(frozen=True)
class SeedScores:
    """A score over seeds."""

    mean: float
    deviation: float | None  # None for one seed
    values: tuple[float, ...]


def summarize_by_kind(seeds: Sequence[ByKind], metric: str = "accuracy") -> dict[str, dict[str, SeedScores]]:
    """Return a metric of one model by kind and severity over seeds; "mean" is the mean over severities."""
    if metric not in MEASURED:
        raise EnfoldError(f"metric must be one of {', '.join(MEASURED)}, got '{metric}': pass one of them")
    if not seeds:
        raise EnfoldError("seeds must contain the scores of at least one seed, got none: pass those of one model")
    found: dict[str, dict[str, SeedScores]] = {}
    for kind, severities in seeds[0].items():
        values = {severity: [seed[kind][severity][metric] for seed in seeds] for severity in severities}
        values["mean"] = [fmean(each) for each in zip(*values.values(), strict=True)]
        found[kind] = {
            severity: SeedScores(fmean(each), stdev(each) if len(each) > 1 else None, tuple(each))
            for severity, each in values.items()
        }
    return found


def require_images(data: Data) -> Split:
    """Return the test images in memory, or raise an error for other data."""
    if not isinstance(data.test, Split) or not has_examples(data.test) or data.test.inputs.ndim != 4:
        raise EnfoldError(
            "the test split must be images in memory, (N, C, H, W), to be corrupted: pass a Split of images, or omit "
            "corruptions"
        )
    return data.test


def load_official(data: Data, folder: str | Path, kind: str, severity: int) -> Corrupted:
    """Return the official corrupted copies of the test split, which must be that of CIFAR-10 or CIFAR-100.

    Args:
        data: The data whose test split is replaced.
        folder: The folder of the official files.
        kind: The kind of corruption.
        severity: The severity, 1 to 5.
    """
    test = require_images(data)
    found = read_cifar_c(folder, kind, severity)
    if found.inputs.shape != test.inputs.shape or not torch.equal(found.labels, test.labels.cpu()):
        raise EnfoldError(
            f"{found.source} contains the test images of {found.source.removesuffix('-C')} in order, but the test "
            "split has other labels or shapes: use these data without exclude_classes, or omit folder"
        )
    return found


def _scores(predictions: Predictions) -> dict[str, float]:
    return {name: METRICS[name].function(predictions) for name in MEASURED}


def _mean_member(predictions: Predictions) -> dict[str, float]:
    return {name: float(per_member(METRICS[name].function, predictions).mean()) for name in MEASURED}
