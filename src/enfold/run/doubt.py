"""What rows say of their own doubt: selective prediction, uncertainty kept, and sets from outside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from enfold.analysis.ood import Told, answers, outside_scores
from enfold.distill.dirichlet import Dirichlet
from enfold.io.files import atomic_path
from enfold.metrics import Uncertainty, decomposition, kept, of_concentrations, selective
from enfold.metrics.dirichlet import concentrations
from enfold.metrics.predictions import Predictions
from enfold.run.stages import Cell

ONE = "mean member"
OF_ONE = ("entropy", "mutual_information")  # what a network without an epistemic part of its own can keep


def doubts(test: Predictions, members: Predictions, own: Uncertainty | None = None) -> dict[str, Any]:
    """How well a model's confidence orders its answers, its uncertainty, and how that goes with the members'.

    `own` is the uncertainty of a Dirichlet student; any other single network has its entropy alone.
    """
    several = own is not None or test.num_members > 1
    found = own or decomposition(test)
    names = ("total", "aleatoric", "epistemic") if several else ("total",)
    parts: dict[str, Any] = {name: getattr(found, name).mean().item() for name in names}
    if members.num_members > 1:
        correlations = asdict(kept(found, members))
        parts["kept"] = correlations if several else {key: correlations[key] for key in OF_ONE}
    return {"selective": _known(selective(test)), "uncertainty": _known(parts)}


def own_uncertainty(cell: Cell, model: nn.Module) -> Uncertainty | None:
    """What a Dirichlet student says of itself, which its mean prediction does not hold; None of any other model."""
    if not isinstance(model, Dirichlet) or hasattr(model, "num_members"):
        return None
    return of_concentrations(concentrations(answers(model.to(cell.device), cell.data, cell.data.test)[0]))


def mean_doubts(members: Predictions) -> dict[str, Any]:
    """The mean over members, each alone."""
    found: dict[str, Any] = _mean([doubts(members.member(index), members) for index in range(members.num_members)])
    return found


def outside_rows(cell: Cell, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """For every row, by set: how it was adapted, and what each score detects; kept beside the results."""
    if not cell.recipe.ood:
        return {}
    asked: dict[str, Any] = {"spec": [each.model_dump(mode="json") for each in cell.recipe.ood], "rows": {}}
    if (cell.run.path / "ood.json").is_file():
        stored = cell.run.read_json("ood.json")
        asked = stored if stored["spec"] == asked["spec"] else asked
    if any(label not in asked["rows"] for label in models):
        content = {each.name: each.digests[0] for each in cell.outside}
        if asked.get("content") != content:  # all rows are of the same images
            asked = {"spec": asked["spec"], "content": content, "rows": {}}
    missing = {label: model.to(cell.device) for label, model in models.items() if label not in asked["rows"]}
    if missing:
        members_of = "ensemble" if "ensemble" in missing else None
        found, mean_member = outside_scores(missing, cell.data, cell.outside, members_of=members_of)
        for label, told in found.items():
            _write_scores(cell, label, told)
            asked["rows"][label] = told.detected
        if mean_member is not None:
            asked["rows"][ONE] = mean_member
        asked["sets"] = {each.name: {"examples": len(each), "adapted": each.adapted} for each in cell.outside}
        cell.run.write_json("ood.json", asked)
    return {
        label: {name: {**asked["sets"][name], "scores": scores} for name, scores in asked["rows"][label].items()}
        for label in (ONE, *models)
    }


def _write_scores(cell: Cell, label: str, told: Told) -> None:
    tensors = {
        f"{name}/{score}": values.to(torch.float32).contiguous()
        for name, scores in told.scores.items()
        for score, values in scores.items()
    }
    with atomic_path(cell.run.path / "ood" / f"{label}.safetensors") as temporary:
        save_file(tensors, temporary)


def _known(tree: Any) -> Any:
    """The same with None for what is not a number: without errors nothing can be told from them."""
    if isinstance(tree, Mapping):
        return {key: _known(value) for key, value in tree.items()}
    return tree if math.isfinite(tree) else None


def _mean(trees: list[Any]) -> Any:
    if isinstance(trees[0], Mapping):
        return {key: _mean([tree[key] for tree in trees]) for key in trees[0]}
    return None if None in trees else fmean(trees)
