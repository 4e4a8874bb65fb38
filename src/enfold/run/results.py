"""Results: what each model of a run scores and costs, computed from stored predictions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from enfold.analysis.shift import ByKind, corrupted_scores, corruption_error, mean_scores, official
from enfold.cost import measure
from enfold.ensemble import Ensemble
from enfold.evaluate import mean_member_score, predict, recovered, score
from enfold.metrics import accuracy, disagreement, nll, normalised_disagreement, pairwise_kl, per_member
from enfold.metrics.predictions import Predictions
from enfold.run.doubt import doubts, mean_doubts, outside_rows, own_uncertainty
from enfold.run.stages import Cell, example_input
from enfold.train.diversity import alike

ONE = "mean member"  # the row of one network, which costs are compared with
Results = dict[str, dict[str, Any]]  # row name -> its scores, gain recovered and cost


def evaluate_cell(cell: Cell, models: Mapping[str, nn.Module]) -> Results:
    """Predict where it was not done yet, score all models, measure their cost once, and store it all."""
    asked = {label: predictions_of(cell, label, model) for label, model in models.items()}
    members = asked["ensemble"]
    mean_member = mean_member_score(members["test"], members["validation"])
    rows: Results = {
        "mean member": {"scores": mean_member},
        "ensemble": {"scores": score(**members), **_spread_out(members, models["ensemble"])},
    }
    for size in cell.recipe.sizes:
        rows[f"ensemble of {size}"] = {
            "scores": score(**{part: said.subset(range(size)) for part, said in members.items()})
        }
    notices = {spec.label: cell.notice(spec) for spec in cell.recipe.shares}
    for label in list(models)[1:]:
        rows[label] = {"scores": score(**asked[label]), **_spread_out(asked[label], models[label], notices.get(label))}
        rows[label] |= _unchanged(rows[label], cell.start_kept(label))
    folded = {spec.label: spec.first for spec in cell.recipe.folds}  # a fold of some is compared with these
    for label in folded.keys() & models.keys():
        rows[label] |= _alone(rows[label], models[label], models["ensemble"])
    compared = {size: _compared(members["test"], size) for size in {None, *folded.values()}}
    for label, row in rows.items():
        gain = recovered(row["scores"], *compared[folded.get(label)])
        row["gain_recovered"] = None if math.isnan(gain) else gain
    said = {label: parts["test"] for label, parts in asked.items()}
    said |= {f"ensemble of {size}": said["ensemble"].subset(range(size)) for size in cell.recipe.sizes}
    rows[ONE] |= mean_doubts(said["ensemble"])
    for label, test in said.items():
        compared_with = said["ensemble"].subset(range(folded.get(label) or said["ensemble"].num_members))
        own = own_uncertainty(cell, models[label]) if label in models else None
        rows[label] |= doubts(test, compared_with, own)
    for label, scores in _corrupted(cell, models).items():
        rows[label]["corrupted"] = scores
    for label, told in outside_rows(cell, models).items():
        rows[label]["ood"] = told
    if cell.recipe.cost and cell.seed == cell.recipe.seeds[0]:  # what a model costs does not depend on the seed
        costs = _costs(cell, models)
        for label, row in rows.items():
            row["cost"] = costs.get(label)
    cell.run.write_json("results.json", {"seed": cell.seed, "rows": rows})
    return rows


def _compared(members: Predictions, size: int | None) -> tuple[dict[str, float], dict[str, float]]:
    """The scores of the mean member and of the ensemble of the first so many."""
    few = members if size is None else members.subset(range(size))
    return mean_member_score(few), score(few)


def _spread_out(asked: Mapping[str, Predictions], model: nn.Module, notice: str | None = None) -> dict[str, Any]:
    """How differently a model's members answer, what one alone gives, and what is to be told of them."""
    test = asked["test"]
    notices = [notice, getattr(model, "notice", None), alike(asked["validation"])]
    warning = "; ".join(each for each in notices if each)
    told = {"warning": warning} if warning else {}
    if test.num_members < 2:
        return told
    found: dict[str, Any] = {
        "diversity": {
            "disagreement": disagreement(test),
            "normalised_disagreement": _finite(normalised_disagreement(test)),
            "pairwise_kl": _finite(pairwise_kl(test)),
            "member_accuracy": float(per_member(accuracy, test).mean()),
            "member_nll": float(per_member(nll, test).mean()),
        }
    }
    return {**found, **told}


def _alone(row: Mapping[str, Any], model: nn.Module, members: nn.Module) -> dict[str, Any]:
    """Of a fold that has one member's weights, which one that is, and a warning."""
    own, known = (
        dict(model.named_parameters()),
        members.expand() if isinstance(members, Ensemble) and members.is_expandable else {},
    )
    if (
        not isinstance(members, Ensemble)
        or not members.is_expandable
        or own.keys() != members.skeleton.parameters.keys()
    ):
        return {}
    for index in range(members.num_members):
        if all(torch.equal(tensor, known[name][index]) for name, tensor in own.items()):
            if "unchanged" in row:  # which says so already
                return {"member": index}
            told = f"it is member {index} alone: its weights are that member's"
            return {"member": index, "warning": "; ".join([told, *filter(None, [row.get("warning")])])}
    return {}


def _unchanged(row: Mapping[str, Any], start: str | None) -> dict[str, Any]:
    """Of a training that returned its start, what that is, and a warning."""
    if start is None:
        return {}
    told = f"training returned its start, {start}, unchanged: no epoch had a lower NLL on validation data"
    return {"unchanged": start, "warning": "; ".join([told, *filter(None, [row.get("warning")])])}


def _finite(value: float) -> float | None:
    """None where members that make no error disagree, or where one gives a class no chance."""
    return value if math.isfinite(value) else None


def forget(cell: Cell, kind: str, label: str) -> None:
    """Remove a model of a cell and all that was found of it."""
    for name in ("results.json", "corrupted.json", "ood.json", "cost.json"):
        if (cell.run.path / name).is_file():
            content = cell.run.read_json(name)
            if (content if name == "cost.json" else content["rows"]).pop(label, None) is not None:
                cell.run.write_json(name, content)
    cell.run.discard(kind, label)
    cell.run.log("forgotten", stage=f"{kind}/{label}", seed=cell.seed)


def predictions_of(cell: Cell, label: str, model: nn.Module) -> dict[str, Predictions]:
    """What a model says of validation and test data, asked once."""
    stored = cell.run.read_predictions(label)
    if stored is None:
        stored = {
            "validation": predict(model.to(cell.device), cell.data.val),
            "test": predict(model, cell.data.test),
        }
        cell.run.write_predictions(label, stored)
    return stored


def _corrupted(cell: Cell, models: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """The mean scores on corrupted copies of the test part; those by kind and severity are kept beside the results."""
    spec = cell.recipe.corruptions
    if spec is None:
        return {}
    left_out = {"folder"} if spec.folder is None else None  # as before there were folders
    asked: dict[str, Any] = {"spec": spec.model_dump(mode="json", exclude=left_out), "rows": {}}
    if spec.folder is not None:
        asked["source"] = official(cell.data, spec.folder, spec.names[0], spec.severities[0]).source
    if (cell.run.path / "corrupted.json").is_file():
        stored = cell.run.read_json("corrupted.json")
        asked = stored if stored["spec"] == asked["spec"] else asked
    missing = {label: model for label, model in models.items() if label not in asked["rows"]}
    if missing:
        found = corrupted_scores(
            missing,
            cell.data,
            spec.names,
            spec.severities,
            examples=spec.examples,
            seed=spec.seed,
            members_of="ensemble" if "ensemble" in missing else None,
            folder=spec.folder,
        )
        asked["rows"] |= found
        cell.run.write_json("corrupted.json", asked)
    source = {"source": asked["source"]} if "source" in asked else {}
    return {label: source | _under_shift(asked["rows"][label], asked["rows"][ONE]) for label in (ONE, *models)}


def _under_shift(found: ByKind, one: ByKind) -> dict[str, float]:
    """The mean scores, and the error over that of one network where it makes errors of every kind."""
    wrong = all(any(each["accuracy"] < 1 for each in severities.values()) for severities in one.values())
    relative = {"corruption_error": corruption_error(found, one)} if wrong else {}
    return mean_scores(found) | relative


def _costs(cell: Cell, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Measured once a model and kept beside the results.

    A model that comes later is measured beside one network too, whose latency then is kept with it: ratios are those
    of one process, and so can be compared.
    """
    stored = cell.run.read_json("cost.json") if (cell.run.path / "cost.json").is_file() else {}
    missing = {label: model for label, model in models.items() if label not in stored}
    if not missing:
        return dict(stored)
    ensemble: Any = models["ensemble"]
    example = example_input(cell.data).to(cell.device)
    measured = measure({ONE: ensemble.member(0), **missing}, ONE, example)
    beside = {"latency": asdict(measured[ONE])["latency"]}
    found = {label: {**asdict(cost), "reference": beside} for label, cost in measured.items()}
    cell.run.write_json("cost.json", {**found, **stored})
    return dict(cell.run.read_json("cost.json"))


def summarise(cells: list[Results]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds that have it of every score, row by row; the first one's cost."""
    summary: dict[str, Any] = {}
    for label in dict.fromkeys(label for cell in cells for label in cell):
        rows = [cell[label] for cell in cells if label in cell]
        first = rows[0]
        gains = [row["gain_recovered"] for row in rows]
        summary[label] = {
            "scores": {name: _spread([row["scores"][name] for row in rows]) for name in first["scores"]},
            "gain_recovered": _spread(gains),
            "cost": first.get("cost"),
        }
        for key in ("corrupted", "diversity", "selective", "uncertainty", "ood"):
            if all(key in row for row in rows):
                summary[label][key] = _spread_tree([row[key] for row in rows])
        if all("member" in row for row in rows):
            summary[label]["member"] = [row["member"] for row in rows]
        unchanged = [row["unchanged"] for row in rows if "unchanged" in row]
        if unchanged:
            summary[label]["unchanged"] = unchanged
        warnings = [row["warning"] for row in rows if "warning" in row]
        if warnings:
            summary[label]["warning"] = warnings[0]
    return summary


def _spread_tree(trees: list[Any]) -> Any:
    """`_spread` of every number that all seeds have; words and counts that are the same for all seeds stay."""
    first = trees[0]
    if isinstance(first, Mapping):
        shared = [key for key in first if all(key in tree for tree in trees)]
        return {key: _spread_tree([tree[key] for tree in trees]) for key in shared}
    return first if isinstance(first, str | int) else _spread(trees)


def _spread(values: list[Any]) -> dict[str, Any] | None:
    if None in values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": deviation, "values": values}
