"""Measure ensembles, distilled networks and controls on tasks other than image classification.

    python examples/quality.py                 # all cells that are not in runs/tasks yet
    python examples/quality.py tokens --seeds 0

A cell is one task and one seed. Its scores are in runs/tasks/<task>-<seed>.json; cells that exist are not run again.
The control is a member that is trained on labels for as long as the distilled network. The summary is of all cells of a
task, and is written to results/tasks.json and docs/tasks.md.

With ΔL_s the gain of a model in NLL over the mean member for seed s:

    gain recovered = Σ_s ΔL_s(model) / Σ_s ΔL_s(ensemble)                                                (1)

A ratio of sums, as the gain of the ensemble may be close to 0 for one seed. Intervals are of 95 %, from 10,000
bootstrap samples of the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import segmentation
import tokens
import torch
from sklearn.datasets import load_diabetes, make_friedman1
from torch.utils.data import DataLoader

import enfold
from enfold.saving import versions
from enfold.tasks import Regression

CELLS, RESULT, PAGE = Path("runs/tasks"), Path("results/tasks.json"), Path("docs/tasks.md")
START, END = "<!-- results -->", "<!-- end of results -->"
SEEDS = (0, 1, 2)  # by default; more of tasks with a small gain
FEWEST = 10  # seeds for an interval; with fewer, the smallest and the largest value are shown
Splits = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Setting:
    """One task: its data, networks and settings of training.

    Args:
        splits: Function from a seed to training, validation and test examples.
        network: Function that makes a network with the default number of outputs.
        members: Number of members.
        fit: Settings of the members.
        distill: Settings of the distilled networks and of the control.
        metrics: The metrics to report.
        wide: Function that makes a network with three outputs per number, for regression.
    """

    splits: Callable[[int], Splits]
    network: Callable[[], torch.nn.Module]
    members: int
    fit: dict[str, Any]
    distill: dict[str, Any]
    metrics: tuple[str, ...]
    wide: Callable[[], torch.nn.Module] | None = None


def rows_of(inputs: np.ndarray, values: np.ndarray, sizes: tuple[int, int], seed: int) -> Splits:
    """Split a table at random, and standardize it by its training part."""
    order = np.random.default_rng(seed).permutation(len(values))
    ends = (sizes[0], sizes[0] + sizes[1])
    first = order[: ends[0]]
    inputs = (inputs - inputs[first].mean(0)) / inputs[first].std(0)
    values = (values - values[first].mean()) / values[first].std()
    parts = np.split(order, ends)
    return tuple((inputs[part].astype("float32"), values[part].astype("float32")) for part in parts)


def diabetes(seed: int) -> Splits:
    """Return the diabetes data of scikit-learn: 442 patients, 10 features."""
    table = load_diabetes()
    return rows_of(table.data, table.target, (282, 60), seed)


def friedman(seed: int) -> Splits:
    """Return the first Friedman function with noise: 10 features, of which 5 matter."""
    return rows_of(*make_friedman1(3000, noise=1.0, random_state=seed), (400, 100), seed)


def housing(seed: int) -> Splits:
    """Return generated prices of houses in the style of the California data: 8 features, more noise at high incomes.

    The logarithm of a price grows with income, falls with age and distance to the nearest of three towns, and has noise
    whose standard deviation grows with income.
    """
    rng = np.random.default_rng([seed, 1])
    number = 4000
    income, age = rng.lognormal(1.2, 0.5, number), rng.uniform(1, 52, number)
    rooms, bedrooms = rng.normal(5.4, 1.0, number), rng.normal(1.1, 0.1, number)
    population, occupancy = rng.lognormal(7.0, 0.7, number), rng.lognormal(1.0, 0.2, number)
    place = rng.uniform(0, 10, (number, 2))
    towns = np.array([[2.0, 8.0], [5.0, 4.0], [8.5, 1.5]])
    distance = np.linalg.norm(place[:, None] - towns, axis=2)
    price = 0.6 * np.log(income) + 0.8 * np.exp(-((distance / 1.5) ** 2)).max(1) - 0.004 * age
    price += 0.15 * np.tanh(rooms - 5.4 - 2 * (occupancy - 2.7)) + (0.05 + 0.05 * income) * rng.normal(size=number)
    columns = (income, age, rooms, bedrooms, np.log(population), occupancy, *place.T)
    return rows_of(np.stack(columns, axis=1), price, (800, 200), seed)


def mlp(features: int, outputs: int) -> Callable[[], torch.nn.Module]:
    """Return a function that makes an MLP with two hidden layers of 64 units."""
    return lambda: enfold.networks.MLP(features, [64, 64], outputs)


def scenes(seed: int) -> Splits:
    """Return the images of `segmentation.py`."""
    make = segmentation.make_scenes
    return make(500, seed=10 * seed), make(100, seed=10 * seed + 1), make(400, "test", seed=10 * seed)


def sentences(seed: int) -> Splits:
    """Return the sentences of `tokens.py`."""
    sizes = {"train": 600, "val": 150, "test": 1000}
    return tuple(
        DataLoader(
            tokens.make_sentences(size, seed=10 * seed + index),
            batch_size=32 if name == "train" else 250,
            shuffle=name == "train",
            collate_fn=tokens.collate,
        )
        for index, (name, size) in enumerate(sizes.items())
    )


GAUSSIAN = Regression(head="gaussian", variance="softplus")
CLASSES = ("accuracy", "miou", "nll", "ece")
NUMBERS = ("rmse", "nll", "crps", "coverage_90", "width_90")
SCENES = {"batch_size": 25, "epochs": 30}
GAIN, LOWER = "gain recovered (NLL)", "NLL below that of the control"
ROWS = ("distilled", "distilled, three outputs", "control")
HEADINGS = {"rmse": "RMSE", "nll": "NLL", "crps": "CRPS", "coverage_90": "coverage of 90 % intervals (%)"}
HEADINGS |= {"width_90": "their width", "accuracy": "accuracy (%)", "miou": "mIoU (%)", "ece": "ECE (%)"}
PERCENT = ("accuracy", "miou", "ece", "coverage_90")
TABLES = {"batch_size": 32, "lr": 1e-3}


def tabular(splits: Callable[[int], Splits], features: int, epochs: int) -> Setting:
    """Return the setting of a table: five MLPs with a mean and a variance."""
    fit = TABLES | {"task": GAUSSIAN, "epochs": epochs}
    again = TABLES | {"epochs": epochs}
    return Setting(splits, mlp(features, 2), 5, fit, again, NUMBERS, wide=mlp(features, 3))


SETTINGS = {
    "diabetes": tabular(diabetes, 10, 40),
    "friedman": tabular(friedman, 10, 120),
    "housing": tabular(housing, 8, 80),
    "segmentation": Setting(scenes, segmentation.make_net, 4, SCENES | {"lr": 1e-2}, SCENES | {"lr": 5e-3}, CLASSES),
    "tokens": Setting(sentences, tokens.make_net, 4, {"lr": 5e-3, "epochs": 15}, {"lr": 2e-3, "epochs": 15}, CLASSES),
}


def run_cell(name: str, seed: int) -> dict[str, Any]:
    """Train everything for one task and seed, and return the scores of each model."""
    started = time.perf_counter()
    setting = SETTINGS[name]
    train, val, test = setting.splits(seed)
    torch.manual_seed(seed)
    common = {"seed": seed, "quiet": True}
    ensemble = enfold.DeepEnsemble(setting.network, setting.members, seed=seed)
    history = enfold.fit(ensemble, train, val, **setting.fit, **common)
    models = {"ensemble": ensemble}
    models["distilled"] = enfold.distill(ensemble, train, val, **setting.distill, **common)
    if setting.wide is not None:
        from_scratch = setting.distill | {"lr": setting.fit["lr"]}
        models["distilled, three outputs"] = enfold.distill(
            ensemble, train, val, student=setting.wide, **from_scratch, **common
        )
    models["control"] = enfold.train_control(ensemble, train, val, **setting.distill, **common)
    members = [
        enfold.evaluate(member, test, reference=ensemble, task=ensemble.task).scores for member in ensemble.networks()
    ]
    scores = {"mean member": {metric: mean(each[metric] for each in members) for metric in setting.metrics}}
    for label, model in models.items():
        found = enfold.evaluate(model, test, reference=ensemble).scores
        scores[label] = {metric: found[metric] for metric in setting.metrics}
    curve = [mean(epoch.validation_loss) for epoch in history.epochs]
    return {
        "scores": scores,
        "validation": {"loss at 3/4 of the epochs": curve[len(curve) * 3 // 4 - 1], "loss at the end": curve[-1]},
        "chosen epochs": history.chosen,
        "seconds": round(time.perf_counter() - started),
        "versions": versions(),
        "date": date.today().isoformat(),
    }


def summarize() -> dict[str, Any]:
    """Return scores over seeds, the gain recovered, and the differences from the control."""
    recorded = json.loads(RESULT.read_text())["tasks"] if RESULT.exists() else {}
    tasks: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        seeds = sorted(int(file.stem.rpartition("-")[2]) for file in CELLS.glob(f"{name}-*.json"))
        if len(seeds) < len(SEEDS):  # as recorded before
            tasks |= {name: recorded[name]} if name in recorded else {}
            continue
        cells = [json.loads((CELLS / f"{name}-{seed}.json").read_text()) for seed in seeds]
        scores = {
            model: {metric: [cell["scores"][model][metric] for cell in cells] for metric in setting.metrics}
            for model in cells[0]["scores"]
        }
        models: dict[str, Any] = {
            model: {metric: {"mean": mean(each), "std": stdev(each), "values": each} for metric, each in rows.items()}
            for model, rows in scores.items()
        }
        nll = {model: np.array(rows["nll"]) for model, rows in scores.items()}
        for model in models.keys() & ROWS:
            models[model] |= compare(nll, model)
        settings = {"members": setting.members, "fit": repr(setting.fit), "distill": repr(setting.distill)}
        cells = [dict(cell, scores=None) for cell in cells]
        tasks[name] = {"seeds": seeds, "settings": settings, "models": models, "cells": cells}
    return {"command": "python examples/quality.py", "tasks": tasks}


def compare(nll: dict[str, np.ndarray], model: str) -> dict[str, Any]:
    """Return the gain recovered, equation (1), and how much lower the NLL is than that of the control.

    Args:
        nll: The NLL of each model, (S,).
        model: The model.
    """
    own, whole = nll["mean member"] - nll[model], nll["mean member"] - nll["ensemble"]
    lower = nll["control"] - nll[model]
    found: dict[str, Any] = {GAIN: {"mean": own.sum() / whole.sum(), "values": (own / whole).tolist()}}  # (1)
    found[LOWER] = {"mean": lower.mean(), "values": lower.tolist()}
    if len(own) >= FEWEST:
        drawn = np.random.default_rng(0).integers(len(own), size=(10_000, len(own)))
        for label, each in ((GAIN, own[drawn].sum(1) / whole[drawn].sum(1)), (LOWER, lower[drawn].mean(1))):
            found[label]["interval"] = np.quantile(each, (0.025, 0.975)).tolist()
    return found


def markdown(tasks: dict[str, Any]) -> str:
    """Return the tables of the page: mean ± standard deviation over seeds, and intervals."""
    lines = []
    for metrics in (NUMBERS, CLASSES):
        header = [HEADINGS[metric] for metric in metrics] + ["gain recovered (%)"]
        lines += ["| | " + " | ".join(header) + " |", "| --- |" + " ---: |" * len(header)]
        for name, task in tasks.items():
            if SETTINGS[name].metrics != metrics:
                continue
            title = f"**{name}**, ensemble of {SETTINGS[name].members}, {len(task['seeds'])} seeds"
            lines.append(f"| {title} |" + " |" * len(header))
            for model, scores in task["models"].items():
                cells = [_shown(scores[metric], metric in PERCENT) for metric in metrics]
                cells.append({"mean member": "0", "ensemble": "100"}.get(model) or _interval(scores[GAIN], 100, 0))
                lines.append(f"| {model} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["| NLL below that of the control | " + " | ".join(tasks) + " |", "| --- |" + " ---: |" * len(tasks)]
    for model in ROWS[:-1]:
        found = [task["models"].get(model) for task in tasks.values()]
        lines.append(
            f"| {model} | " + " | ".join(_interval(each[LOWER], 1, 3) if each else "" for each in found) + " |"
        )
    return "\n".join([*lines, ""])


def _shown(score: dict[str, float], is_percent: bool) -> str:
    factor, digits = (100, 1) if is_percent else (1, 3)
    return f"{factor * score['mean']:.{digits}f} ± {factor * score['std']:.{digits}f}"


def _interval(score: dict[str, Any], factor: float, digits: int) -> str:
    """Return a value with its interval, or with the smallest and the largest of few seeds."""
    low, high = score.get("interval") or (min(score["values"]), max(score["values"]))
    between = "[{}, {}]" if "interval" in score else "({} to {})"
    texts = [f"{factor * each:.{digits}f}" for each in (score["mean"], low, high)]
    return f"{texts[0]} {between.format(*texts[1:])}"


def main(arguments: list[str]) -> None:
    """Run what is missing, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(SETTINGS), help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    chosen = parser.parse_args(arguments)
    CELLS.mkdir(parents=True, exist_ok=True)
    for seed in chosen.seeds:
        for name in chosen.tasks:
            file = CELLS / f"{name}-{seed}.json"
            if not file.exists():
                file.write_text(json.dumps(run_cell(name, seed), indent=1))
            for model, scores in json.loads(file.read_text())["scores"].items():
                print(
                    f"{name} {seed} {model}:",
                    "  ".join(f"{key} {value:.4f}" for key, value in scores.items()),
                    flush=True,
                )
    found = summarize()
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{markdown(found['tasks'])}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
