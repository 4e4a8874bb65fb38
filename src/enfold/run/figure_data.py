"""Data of the uncertainty figures of a run: reliability bands, risk-coverage and ROC curves of one seed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from safetensors import SafetensorError, safe_open
from torch import Tensor

from enfold.analysis.ood import INSIDE
from enfold.errors import EnfoldError
from enfold.metrics import reliability_band, risk_coverage, roc
from enfold.metrics.predictions import Predictions
from enfold.report.content import ONE_MEMBER, Headline, Seed, Uncertainty

SCORE = "entropy"  # every model has it


def uncertainty_figures(seeds: Sequence[Seed], headline: Headline | None) -> Uncertainty | None:
    """Return the curves of one member, the ensemble, the headline's model and its control, if they are evaluated."""
    seed = next((seed for seed in seeds if "ensemble" in seed.predictions), None)
    if seed is None or type(seed.predictions["ensemble"]["test"]) is not Predictions:  # of one class per example
        return None
    labels = ["ensemble", *([headline.label, headline.control or ""] if headline else [])]
    predictions: dict[str, Predictions] = {ONE_MEMBER: seed.predictions["ensemble"]["test"].member(0)}
    predictions |= {label: seed.predictions[label]["test"] for label in labels if label in seed.predictions}
    with warnings.catch_warnings(action="ignore"):  # of few examples: shown when they were scored
        bands = {label: reliability_band(each) for label, each in predictions.items()}
    outside = _outside(seed, [label for label in predictions if label != ONE_MEMBER])
    return Uncertainty(
        seed=seed.seed,
        bands=bands,
        coverage={label: risk_coverage(each) for label, each in predictions.items()},
        score=SCORE,
        ood=outside,
        roc={name: {label: roc(*pair) for label, pair in models.items()} for name, models in outside.items()},
    )


def _outside(seed: Seed, labels: Sequence[str]) -> Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]:
    """Return the scores of test images and of OOD images, by set and model."""
    found: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for label in labels:
        file = seed.folder / "ood" / f"{label}.safetensors"
        if seed.ood is None or not file.is_file():
            continue
        try:
            with safe_open(file, "pt") as stored:
                kept = {name: stored.get_tensor(name) for name in stored.keys() if name.endswith(f"/{SCORE}")}  # noqa: SIM118
        except SafetensorError as error:
            raise EnfoldError(
                f"'{file}' must contain scores, but it is damaged ({error}): delete it and ood.json, and run  "
                "enfold evaluate"
            ) from error
        for name, values in kept.items():
            outside = name.removesuffix(f"/{SCORE}")
            if outside != INSIDE:
                found.setdefault(outside, {})[label] = (kept[f"{INSIDE}/{SCORE}"], values)
    return found
