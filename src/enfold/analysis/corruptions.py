"""Under shift: what models score where test inputs are corrupted, by kind and severity.

    c-metric = mean over kinds and severities of the metric on the corrupted test part                         (1)
    mCE = mean over kinds of Σ_severities error of the model / Σ_severities error of a reference model          (2)

D. Hendrycks, T. Dietterich: Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR 2019,
arXiv:1903.12261. The prefix c of (1) is not that of calibrated metrics, so rows say "corrupted",
or "CIFAR-10-C" where the official images were taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import nn

from enfold.data import Corrupted, Data, Split, corrupted, read_cifar_c
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


def corrupted_scores(
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
    """The scores of every model on corrupted copies of the test part, or of so many `examples` of it.

    With `folder` the copies are those of the official CIFAR-10-C or CIFAR-100-C there. With `members_of`, the mean over
    the members of that model, each alone, is a row "mean member".
    """
    whole = images_of(data)
    chosen = some(whole.labels, examples)
    few = data.replace(test=whole[chosen])
    found: dict[str, ByKind] = {label: {} for label in (*models, *([MEAN_MEMBER] if members_of else []))}
    with progress("corruptions", len(kinds) * len(severities) * len(models)) as bar:
        for kind in kinds:
            for severity in severities:
                if folder is None:
                    moved = few.replace(test=corrupted(few, kind, severity, seed=seed))
                else:
                    moved = few.replace(test=official(data, folder, kind, severity)[chosen])
                for label, model in models.items():
                    said = predict(model, moved.test)
                    found[label].setdefault(kind, {})[str(severity)] = _scores(said)
                    if label == members_of:
                        found[MEAN_MEMBER].setdefault(kind, {})[str(severity)] = _mean_member(said)
                    bar.advance(1)
    return found


def mean_scores(by_kind: ByKind) -> dict[str, float]:
    """Equation (1) for each metric."""
    cells = [scores for severities in by_kind.values() for scores in severities.values()]
    return {name: fmean(scores[name] for scores in cells) for name in MEASURED}


def corruption_error(by_kind: ByKind, reference: ByKind) -> float:
    """Equation (2), mCE, as a fraction: 1 is as bad as the reference model, less is better.

    It weighs kinds equally that a mean error would not: those that every model fails at count no more than others.
    """
    if {kind: set(each) for kind, each in by_kind.items()} != {kind: set(each) for kind, each in reference.items()}:
        raise EnfoldError(
            "a corruption error compares two models on the same kinds and severities, but these differ: "
            "score both with one call of corrupted_scores"
        )
    ratios = []
    for kind, severities in by_kind.items():
        errors, theirs = (sum(1 - each["accuracy"] for each in s.values()) for s in (severities, reference[kind]))
        if not theirs:
            raise EnfoldError(
                f"a reference model must make errors to divide by, got none for {kind}: choose another one"
            )
        ratios.append(errors / theirs)
    return fmean(ratios)  # (2)


@dataclass(frozen=True)
class Over:
    """One figure over seeds."""

    mean: float
    deviation: float | None  # None of one seed
    values: tuple[float, ...]


def by_kind(seeds: Sequence[ByKind], metric: str = "accuracy") -> dict[str, dict[str, Over]]:
    """A metric of one model by kind and severity over seeds; under "mean" the mean over severities of each seed."""
    if metric not in MEASURED:
        raise EnfoldError(f"a corrupted score must be one of {', '.join(MEASURED)}, got '{metric}': choose one")
    if not seeds:
        raise EnfoldError("scores by kind need at least one seed, got none: pass the rows of one model, one a seed")
    found: dict[str, dict[str, Over]] = {}
    for kind, severities in seeds[0].items():
        values = {severity: [seed[kind][severity][metric] for seed in seeds] for severity in severities}
        values["mean"] = [fmean(each) for each in zip(*values.values(), strict=True)]
        found[kind] = {
            severity: Over(fmean(each), stdev(each) if len(each) > 1 else None, tuple(each))
            for severity, each in values.items()
        }
    return found


def images_of(data: Data) -> Split:
    """The test images that are corrupted; other data are refused."""
    if not isinstance(data.test, Split) or not has_examples(data.test) or data.test.inputs.ndim != 4:
        raise EnfoldError(
            "corruptions are of images in memory, (N, C, H, W), but the test part is something else: pass a Split of "
            "images, or leave corruptions out"
        )
    return data.test


def official(data: Data, folder: str | Path, kind: str, severity: int) -> Corrupted:
    """The official corrupted copies of the test part, which must be that of CIFAR-10 or CIFAR-100."""
    test = images_of(data)
    found = read_cifar_c(folder, kind, severity)
    if found.inputs.shape != test.inputs.shape or not torch.equal(found.labels, test.labels.cpu()):
        raise EnfoldError(
            f"{found.source} holds the test images of {found.source.removesuffix('-C')} in their order, but the test "
            "part has other labels or shapes: take that data without exclude_classes, or leave the folder out"
        )
    return found


def _scores(said: Predictions) -> dict[str, float]:
    return {name: METRICS[name].function(said) for name in MEASURED}


def _mean_member(said: Predictions) -> dict[str, float]:
    return {name: float(per_member(METRICS[name].function, said).mean()) for name in MEASURED}
