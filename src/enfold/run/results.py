"""Results: scores and cost of every model of a run, computed from stored predictions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from enfold.analysis.corruptions import ByKind, average_scores_over_kinds, compute_mce, load_official, score_corruptions
from enfold.cost import measure
from enfold.data.tree import to_device
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import mean_member_score, predict, recovered_fraction, score
from enfold.metrics import accuracy, disagreement, metrics_for, nll, normalised_disagreement, pairwise_kl, per_member
from enfold.metrics.predictions import Predictions, RowPredictions
from enfold.metrics.recovered import beyond_noise, gain_interval
from enfold.run.outputs import example_losses, example_of, shared_criterion
from enfold.run.seed_run import SeedRun
from enfold.run.steps import start_notice
from enfold.run.uncertainty import dirichlet_uncertainties, mean_uncertainty, ood_rows, uncertainty_row
from enfold.train.diversity import describe_similarity
from enfold.train.history import describe_unchanged

ONE = "mean member"  # the row of one network, the reference of gains and costs
Results = dict[str, dict[str, Any]]  # row name -> its scores, gain recovered and cost


def evaluate_seed(run: SeedRun, models: Mapping[str, nn.Module]) -> Results:
    """Return the scores, uncertainty and cost of all models of a seed, and store them.

    Predictions and costs that are stored are not computed again.
    """
    predictions = {label: predict_stored(run, label, model) for label, model in models.items()}
    members = predictions["ensemble"]
    rows: Results = {
        ONE: {"scores": mean_member_score(members["test"], members["validation"])},
        "ensemble": {"scores": score(**members), **_diversity(members, models["ensemble"])},
    }
    for size in run.recipe.sizes:
        subset = {split: each.subset(range(size)) for split, each in members.items()}
        rows[f"ensemble of {size}"] = {"scores": score(**subset)}
    steps = {step.label: step for step in run.recipe.steps}
    for label in list(models)[1:]:
        model, step = models[label], steps.get(label)
        notice = start_notice(run, step, model) if step else None
        rows[label] = {"scores": score(**predictions[label]), **_diversity(predictions[label], model, notice)}
        rows[label] |= _unchanged_entries(rows[label], run.unchanged_start(label))
        if step is not None and step.family != "ensemble":
            rows[label] |= _equal_member(rows[label], model, models["ensemble"])
    first = {label: step.first for label, step in steps.items()}
    _add_gains(rows, members["test"], first)
    test = {label: splits["test"] for label, splits in predictions.items()}
    test |= {f"ensemble of {size}": test["ensemble"].subset(range(size)) for size in run.recipe.sizes}
    _add_uncertainty(run, rows, test, models, first)
    for label, scores in _score_corrupted(run, models).items():
        rows[label]["corrupted"] = scores
    for label, detected in ood_rows(run, models).items():
        rows[label]["ood"] = detected
    if run.recipe.cost and run.seed == run.recipe.seeds[0]:  # the cost of a model does not depend on the seed
        costs = _costs(run, models)
        for label, row in rows.items():
            row["cost"] = costs.get(label)
    run.run.write_json("results.json", {"seed": run.seed, "rows": rows})
    return rows


def _add_uncertainty(
    run: SeedRun,
    rows: Results,
    test: Mapping[str, RowPredictions],
    models: Mapping[str, nn.Module],
    first: Mapping[str, int | None],
) -> None:
    """Add selective prediction and uncertainty of each row, for tasks with classes."""
    members = test["ensemble"]
    if not isinstance(members, Predictions):
        return
    rows[ONE] |= mean_uncertainty(members.known())
    for label, each in test.items():
        compared = members.subset(range(first.get(label) or members.num_members)).known()
        own = dirichlet_uncertainties(run, models[label]) if label in models else None
        if isinstance(each, Predictions):
            rows[label] |= uncertainty_row(each.known(), compared, own)


def _add_gains(rows: Results, members: RowPredictions, first: Mapping[str, int | None]) -> None:
    """Add the fraction of the ensemble's gain that each row recovers, and whether that gain is within noise.

    A step that uses the first members only is compared with the ensemble of these.
    """
    compared: dict[int | None, tuple[dict[str, float], dict[str, float], bool]] = {}
    for size in {None, *first.values()}:
        subset = members if size is None else members.subset(range(size))
        compared[size] = mean_member_score(subset), score(subset), _gain_is_noise(subset)
    criterion = shared_criterion(*(row["scores"] for row in rows.values()))
    for label, row in rows.items():
        mean_member, ensemble, noise = compared[first.get(label)]
        gain = recovered_fraction(row["scores"], mean_member, ensemble, criterion)
        row["gain_recovered"] = None if math.isnan(gain) else gain
        row["gain_within_noise"] = noise


def _gain_is_noise(members: RowPredictions) -> bool:
    """Return whether the 95 % interval of the ensemble's gain in the criterion over its mean member includes zero."""
    if members.num_members < 2:
        return True
    try:
        return not beyond_noise(gain_interval(members, example_losses))
    except EnfoldError:  # of an infinite NLL
        return False


def _diversity(
    predictions: Mapping[str, RowPredictions], model: nn.Module, notice: str | None = None
) -> dict[str, Any]:
    """Return the diversity of a model's members, the scores of one of them, and warnings."""
    test = predictions["test"]
    notices = [notice, getattr(model, "notice", None), describe_similarity(predictions["validation"])]
    warning = "; ".join(each for each in notices if each)
    warnings = {"warning": warning} if warning else {}
    if test.num_members < 2:
        return warnings
    if not isinstance(test, Predictions):
        criterion = metrics_for(test)[test.criterion]
        return {"diversity": {f"member_{criterion.name}": float(per_member(criterion, test).mean())}, **warnings}
    test = test.known()
    found: dict[str, Any] = {
        "diversity": {
            "disagreement": disagreement(test),
            "normalised_disagreement": _finite(normalised_disagreement(test)),
            "pairwise_kl": _finite(pairwise_kl(test)),
            "member_accuracy": float(per_member(accuracy, test).mean()),
            "member_nll": float(per_member(nll, test).mean()),
        }
    }
    return {**found, **warnings}


def _equal_member(row: Mapping[str, Any], model: nn.Module, members: nn.Module) -> dict[str, Any]:
    """Return the index of the member whose weights a model has, with a warning; empty if there is none."""
    if not isinstance(members, Ensemble) or not members.is_expandable:
        return {}
    own, known = dict(model.named_parameters()), members.expand()
    if own.keys() != members.skeleton.parameters.keys():
        return {}
    for index in range(members.num_members):
        if all(torch.equal(tensor, known[name][index]) for name, tensor in own.items()):
            if "unchanged" in row:  # has a separate warning
                return {"member": index}
            return {"member": index, "warning": _add_warning(row, f"its weights are those of member {index}")}
    return {}


def _unchanged_entries(row: Mapping[str, Any], start: str | None) -> dict[str, Any]:
    """Return the start that a training returned unchanged, and a warning."""
    if start is None:
        return {}
    return {"unchanged": start, "warning": _add_warning(row, describe_unchanged("training", start))}


def _add_warning(row: Mapping[str, Any], message: str) -> str:
    return "; ".join([message, *filter(None, [row.get("warning")])])


def _finite(value: float) -> float | None:
    """Return None for infinite values: members without errors disagree, or a class has probability 0."""
    return value if math.isfinite(value) else None


def remove_model(run: SeedRun, kind: str, label: str) -> None:
    """Remove a model of a seed and all its results."""
    for name in ("results.json", "corrupted.json", "ood.json", "cost.json"):
        if (run.run.path / name).is_file():
            content = run.run.read_json(name)
            if (content if name == "cost.json" else content["rows"]).pop(label, None) is not None:
                run.run.write_json(name, content)
    run.run.discard(kind, label)
    run.run.log("removed", stage=f"{kind}/{label}", seed=run.seed)


def predict_stored(run: SeedRun, label: str, model: nn.Module) -> dict[str, Any]:
    """Return the predictions of a model on validation and test data, from storage if they are there."""
    stored = run.run.read_predictions(label)
    if stored is None:
        stored = {
            "validation": predict(model.to(run.device), run.data.val),
            "test": predict(model, run.data.test),
        }
        run.run.write_predictions(label, stored)
    return stored


def _score_corrupted(run: SeedRun, models: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Return the mean scores on corrupted test images; those by kind and severity are stored beside the results."""
    spec = run.recipe.corruptions
    if spec is None:
        return {}
    left_out = {"folder"} if spec.folder is None else None
    table: dict[str, Any] = {"spec": spec.model_dump(mode="json", exclude=left_out), "rows": {}}
    if spec.folder is not None:
        table["source"] = load_official(run.data, spec.folder, spec.names[0], spec.severities[0]).source
    if (run.run.path / "corrupted.json").is_file():
        stored = run.run.read_json("corrupted.json")
        table = stored if stored["spec"] == table["spec"] else table
    missing = {label: model for label, model in models.items() if label not in table["rows"]}
    if missing:
        found = score_corruptions(
            missing,
            run.data,
            spec.names,
            spec.severities,
            examples=spec.examples,
            seed=spec.seed,
            members_of="ensemble" if "ensemble" in missing else None,
            folder=spec.folder,
        )
        table["rows"] |= found
        run.run.write_json("corrupted.json", table)
    source = {"source": table["source"]} if "source" in table else {}
    return {label: source | _under_shift(table["rows"][label], table["rows"][ONE]) for label in (ONE, *models)}


def _under_shift(found: ByKind, one: ByKind) -> dict[str, float]:
    """Return the mean scores, and the corruption error relative to one network if that makes errors of every kind."""
    wrong = all(any(each["accuracy"] < 1 for each in severities.values()) for severities in one.values())
    relative = {"corruption_error": compute_mce(found, one)} if wrong else {}
    return average_scores_over_kinds(found) | relative


def _costs(run: SeedRun, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the cost of each model, measured once and stored beside the results.

    A model that is added later is measured together with one network, whose latency is stored with it, because only
    ratios within one process can be compared. `latency_equal` says for each batch size whether the quartiles of the two
    overlap, so that the ratio is within noise.
    """
    stored = run.run.read_json("cost.json") if (run.run.path / "cost.json").is_file() else {}
    missing = {label: model for label, model in models.items() if label not in stored}
    if not missing:
        return dict(stored)
    ensemble: Any = models["ensemble"]
    example = example_of(run.data)
    if example is None:  # of a batch of graphs: there is no batch of another size to measure
        return {}
    measured = measure({ONE: ensemble.member(0), **missing}, ONE, to_device(example, run.device))
    reference = asdict(measured[ONE])["latency"]
    found = {}
    for label, cost in measured.items():
        content = asdict(cost)
        equal = {batch: _overlap(each, reference[batch]) for batch, each in content["latency"].items()}
        found[label] = {**content, "reference": {"latency": reference}, "latency_equal": equal}
    run.run.write_json("cost.json", {**found, **stored})
    return dict(run.run.read_json("cost.json"))


def _overlap(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Return whether the quartiles of two latencies overlap."""
    return one["lower"] <= other["upper"] and other["lower"] <= one["upper"]


def summarise(results: list[Results]) -> dict[str, Any]:
    """Return mean and standard deviation of every score over the seeds that have it; the cost is that of the first."""
    summary: dict[str, Any] = {}
    for label in dict.fromkeys(label for each in results for label in each):
        rows = [each[label] for each in results if label in each]
        first = rows[0]
        gains = [row["gain_recovered"] for row in rows]
        summary[label] = {
            "scores": {
                name: _spread([row["scores"][name] for row in rows])
                for name in first["scores"]
                if all(name in row["scores"] for row in rows)
            },
            "gain_recovered": _spread(gains),
            "gain_within_noise": any(row.get("gain_within_noise", False) for row in rows),
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
    """Return `_spread` of every number that all seeds have, and words and counts that are the same for all seeds."""
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
