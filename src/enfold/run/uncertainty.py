"""Uncertainty of the models of a run: selective prediction, correlation with the members', and OOD detection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from enfold.analysis.ood import Detection, compute_logits, score_ood
from enfold.distill.dirichlet import Dirichlet
from enfold.ensemble import Ensemble
from enfold.io.files import atomic_path
from enfold.metrics import Uncertainty, decomposition, of_concentrations, selective, uncertainty_correlation
from enfold.metrics.dirichlet import concentrations
from enfold.metrics.predictions import Predictions
from enfold.run.seed_run import SeedRun

ONE = "mean member"
OF_ONE = ("entropy", "mutual_information")  # for a network without epistemic uncertainty of its own


def uncertainty_row(test: Predictions, members: Predictions, own: Uncertainty | None = None) -> dict[str, Any]:
    """Return selective prediction, mean uncertainties, and their correlations with those of the members.

    Args:
        test: The predictions of the model on test data.
        members: Those of the members it is compared with.
        own: The uncertainty of a Dirichlet student; any other single network has its entropy only.
    """
    has_epistemic = own is not None or test.num_members > 1
    found = own or decomposition(test)
    names = ("total", "aleatoric", "epistemic") if has_epistemic else ("total",)
    parts: dict[str, Any] = {name: getattr(found, name).mean().item() for name in names}
    if members.num_members > 1:
        correlations = asdict(uncertainty_correlation(found, members))
        parts["kept"] = correlations if has_epistemic else {key: correlations[key] for key in OF_ONE}
    return {"selective": _finite(selective(test)), "uncertainty": _finite(parts)}


def dirichlet_uncertainties(run: SeedRun, model: nn.Module) -> Uncertainty | None:
    """Return the uncertainty of a Dirichlet student, which is more than its mean prediction; None for other models."""
    if not isinstance(model, Dirichlet) or isinstance(model.network, Ensemble):
        return None
    return of_concentrations(concentrations(compute_logits(model.to(run.device), run.data, run.data.test)[0]))


def mean_uncertainty(members: Predictions) -> dict[str, Any]:
    """Return the mean of `uncertainty_row` over single members."""
    found: dict[str, Any] = _mean(
        [uncertainty_row(members.member(index), members) for index in range(members.num_members)]
    )
    return found


def ood_rows(run: SeedRun, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return for every row and OOD set how well each score detects it; stored beside the results."""
    if not run.recipe.ood:
        return {}
    table: dict[str, Any] = {"spec": [each.model_dump(mode="json") for each in run.recipe.ood], "rows": {}}
    if (run.run.path / "ood.json").is_file():
        stored = run.run.read_json("ood.json")
        table = stored if stored["spec"] == table["spec"] else table
    if any(label not in table["rows"] for label in models):
        content = {each.name: each.digests[0] for each in run.ood_sets}
        if table.get("content") != content:  # all rows are of the same images
            table = {"spec": table["spec"], "content": content, "rows": {}}
    missing = {label: model.to(run.device) for label, model in models.items() if label not in table["rows"]}
    if missing:
        members_of = "ensemble" if "ensemble" in missing else None
        found, mean_member = score_ood(missing, run.data, run.ood_sets, members_of=members_of)
        for label, result in found.items():
            _write_scores(run, label, result)
            table["rows"][label] = result.detected
        if mean_member is not None:
            table["rows"][ONE] = mean_member
        table["sets"] = {each.name: {"examples": len(each), "adapted": each.adapted} for each in run.ood_sets}
        run.run.write_json("ood.json", table)
    return {
        label: {name: {**table["sets"][name], "scores": scores} for name, scores in table["rows"][label].items()}
        for label in (ONE, *models)
    }


def _write_scores(run: SeedRun, label: str, result: Detection) -> None:
    tensors = {
        f"{name}/{score}": values.to(torch.float32).contiguous()
        for name, scores in result.scores.items()
        for score, values in scores.items()
    }
    with atomic_path(run.run.path / "ood" / f"{label}.safetensors") as temporary:
        save_file(tensors, temporary)


def _finite(tree: Any) -> Any:
    """Return the tree with None for values that are not finite, such as those of a model without errors."""
    if isinstance(tree, Mapping):
        return {key: _finite(value) for key, value in tree.items()}
    return tree if math.isfinite(tree) else None


def _mean(trees: list[Any]) -> Any:
    if isinstance(trees[0], Mapping):
        return {key: _mean([tree[key] for tree in trees]) for key in trees[0]}
    return None if None in trees else fmean(trees)
