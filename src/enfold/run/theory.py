"""The theory of averaging for the ensembles of a run: scores of their predictions, and Theorem 1 for their weights."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

from torch import nn

from enfold.ensemble import Ensemble
from enfold.ensembles.rank_one.representable import representable
from enfold.errors import EnfoldError
from enfold.metrics.theory_scores import theory_scores
from enfold.run.directory import RunDirectory
from enfold.run.execute import list_unfinished, seed_runs
from enfold.run.recipe import Recipe
from enfold.run.results import predict_stored

FILE = "theory.json"
RANK_ONE = "rank_one_defect"  # the largest over layers; 0 for members that form a BatchEnsemble


def theory_rows(run: RunDirectory, recipe: Recipe, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Return the scores of each ensemble of a run, mean and deviation over seeds, and write them to theory.json.

    Args:
        run: An evaluated run.
        recipe: Its recipe.
        device: The device on which missing predictions are computed.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for seed in seed_runs(run, recipe, device):
        for label, model in seed.models(without=list_unfinished(run, recipe)).items():
            scores = theory_scores(predict_stored(seed, label, model)["test"]) | _rank_one(model)
            for name, value in scores.items():
                found.setdefault(label, {}).setdefault(name, []).append(value)
    rows = {label: {name: _spread(values) for name, values in each.items()} for label, each in found.items()}
    run.write_json(FILE, {"rows": rows})
    return rows


def _rank_one(model: nn.Module) -> dict[str, float]:
    """Return the largest rank-one defect of a layer, by Theorem 1; nothing where members are not networks."""
    if not isinstance(model, Ensemble) or not model.is_expandable or model.num_members < 2:
        return {}
    try:
        layers = representable(model).layers
    except EnfoldError:  # no layers that a BatchEnsemble has
        return {}
    return {RANK_ONE: max(layer.defect for layer in layers)} if layers else {}


def _spread(values: list[float]) -> dict[str, Any]:
    return {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None, "values": values}
