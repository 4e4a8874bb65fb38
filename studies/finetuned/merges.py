"""Merge members that were fine-tuned from one network, and score all merges: python -m studies.finetuned.merges OUT

A network is trained on five classes of fashion-mini, gets a new head for the other five (fitted with the rest frozen:
the base), and four members are fine-tuned from it with other seeds, learning rates and augmentation. OUT holds networks
and one file of scores for each seed, regime and row, so that an interrupted study continues. The results are written to
studies/finetuned/results/finetuned-merges.json.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import enfold
from enfold.data import Data, Split
from enfold.distill.control import train_control
from enfold.evaluate import best_member, mean_member_score, predict, score
from enfold.io.files import write_json
from enfold.merge.basin_check import basin_check
from enfold.networks.catalogue import make
from enfold.saving import versions
from enfold.train import TrainConfig, fit
from studies.markdown import format_spread, make_table, metric_format

RESULT = Path(__file__).parent / "results" / "finetuned-merges.json"
SEEDS, MEMBERS = (0, 1, 2), 4
NETWORK = {"name": "resnet", "depth": 8, "width": 16, "stem_stride": 2}
BEFORE, TARGET = (1, 5, 7, 8, 9), (0, 2, 3, 4, 6)  # the second five are hard to tell apart
EXAMPLES = 2000  # training examples of the second five
REGIMES: dict[str, tuple[float, ...]] = {"small": (1e-3, 2e-3, 1e-3, 2e-3)}  # learning rates of the members
PRETRAINING = TrainConfig(epochs=8, batch_size=64, lr=2e-3)
PROBE = TrainConfig(epochs=4, batch_size=64, lr=5e-3)
TUNING = TrainConfig(epochs=12, batch_size=64)
METRICS = ("accuracy", "nll", "ece", "cnll")

Scores = dict[str, float]
Merge = Callable[[list[nn.Module], Data, nn.Module], nn.Module]


def by_name(name: str, *, base: bool = False, val: bool = False, **options: Any) -> Merge:
    """Return a call of a merge.

    Args:
        name: The name of the merge.
        base: Whether it gets the base.
        val: Whether it chooses on validation examples.
        **options: Its options.
    """

    def call(members: list[nn.Module], data: Data, origin: nn.Module) -> nn.Module:
        given = {**options, **({"base": origin} if base else {}), **({"val": data} if val else {})}
        merged: nn.Module = getattr(enfold.merge, name)(members, train=data, **given)
        return merged

    return call


MERGES: dict[str, Merge] = {
    "average": by_name("average"),
    "soup, greedy (NLL)": by_name("soup", val=True, score="nll"),
    "soup, learned": by_name("soup", val=True, kind="learned"),
    "WiSE-FT, α on val": by_name("wise_ft", base=True, val=True),
    "Model Stock": by_name("model_stock", base=True),
    "Fisher, predicted labels": by_name("fisher", examples=256),
    "Fisher, labels": by_name("fisher", examples=256, targets="labels"),
    "RegMean": by_name("regmean"),
    "task arithmetic, λ on val": by_name("task_arithmetic", base=True, val=True, choose=True),
    "TIES, density 0.2": by_name("ties", base=True),
    "TIES, density 1": by_name("ties", base=True, density=1.0),
    "DARE, drop 0.5": by_name("dare", base=True),
    "DARE, drop 0.9": by_name("dare", base=True, drop=0.9),
    "DARE, drop 0.5, TIES": by_name("dare", base=True, combine="ties"),
    "spherical mean": by_name("slerp"),
    "spherical mean around the base": by_name("slerp", base=True),
    "changes of rank 8 (lora)": by_name("lora", base=True, rank=8),
    "REPAIR of the average": by_name("average", repair="repair"),
}
OTHERS = ("base", "mean member", "best member", "control", "ensemble")


def select(split: Any, classes: tuple[int, ...], examples: int | None = None) -> Split:
    """Return the examples of some classes, numbered from 0."""
    numbers = {label: index for index, label in enumerate(classes)}
    chosen = torch.tensor([index for index, label in enumerate(split.labels.tolist()) if label in numbers])[:examples]
    labels: Tensor = torch.tensor([numbers[label] for label in split.labels[chosen].tolist()])
    return Split(split.inputs[chosen], labels, mean=split.mean, std=split.std)


def half(data: Data, classes: tuple[int, ...], examples: int | None = None) -> Data:
    """Return the data of some classes."""
    train, val, test = select(data.train, classes, examples), select(data.val, classes), select(data.test, classes)
    names = tuple(data.names[label] for label in classes)
    return data.replace(train=train, val=val, test=test, num_classes=len(classes), names=names)


def stored(file: Path, network: nn.Module, train: Callable[[nn.Module], Any]) -> nn.Module:
    """Return a network from a file; train and store it if there is none."""
    if file.exists():
        network.load_state_dict(torch.load(file, weights_only=True))
    else:
        train(network)
        torch.save(network.state_dict(), file)
    return network.eval()


def make_base(out: Path, seed: int, data: Data) -> nn.Module:
    """Return the network that members are fine-tuned from."""
    before, target = half(data, BEFORE), half(data, TARGET, EXAMPLES)

    def pretrain(network: nn.Module) -> None:
        fit(network, before, config=PRETRAINING.replace(seed=seed), quiet=True)
        head: Any = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
        head.reset_parameters()
        learned = set(head.parameters())
        for parameter in network.parameters():
            parameter.requires_grad_(parameter in learned)
        fit(network, target, config=PROBE.replace(seed=seed), quiet=True)

    torch.manual_seed(seed)
    return stored(out / f"base-{seed}.pt", make(NETWORK, data.shape, len(TARGET)), pretrain).requires_grad_()


def tuning(seed: int, regime: str, index: int) -> TrainConfig:
    """Return the settings of one member."""
    augment = ("flip",) if index >= MEMBERS // 2 else ()
    return TUNING.replace(lr=REGIMES[regime][index], augment=augment, seed=seed, first_member=index)


def make_members(out: Path, seed: int, regime: str, base: nn.Module, data: Data) -> list[nn.Module]:
    """Return the fine-tuned members."""
    members = []
    for index in range(MEMBERS):
        config = tuning(seed, regime, index)
        network = make(NETWORK, data.shape, len(TARGET))
        network.load_state_dict(base.state_dict())
        file = out / f"member-{seed}-{regime}-{index}.pt"
        members.append(stored(file, network, partial(fit, train=data, config=config, quiet=True)))
    return members


def scores_of(model: nn.Module, data: Data) -> Scores:
    """Return the scores of a model on test examples."""
    found = score(predict(model, data.test), predict(model, data.val))
    return {name: found[name] for name in METRICS}


def row(name: str, members: list[nn.Module], base: nn.Module, data: Data, config: TrainConfig) -> Scores:
    """Return the scores of one row of the table."""
    ensemble = enfold.DeepEnsemble(members).eval()
    if name == "mean member":
        found = mean_member_score(predict(ensemble, data.test), predict(ensemble, data.val))
        return {metric: found[metric] for metric in METRICS}
    if name == "control":  # the best member, trained for as long again
        return scores_of(train_control(ensemble, data, config=config, quiet=True).eval(), data)
    if name in OTHERS:
        models = {"base": base, "best member": members[best_member(ensemble, data)], "ensemble": ensemble}
        return scores_of(models[name], data)
    start = time.perf_counter()
    merged = MERGES[name](members, data, base)
    seconds = time.perf_counter() - start
    return {**scores_of(merged, data), "seconds": seconds}


def barriers(members: list[nn.Module], data: Data) -> Scores:
    """Return the result of the basin check."""
    found = basin_check(members, data, data)
    numbers = {"largest": found.largest, "limit": found.limit, "scale": found.scale, "seconds": found.seconds}
    return {**numbers, "one basin": float(found.is_one_basin), "mean member": fmean(found.losses)}


def cell(file: Path, compute: Callable[[], Scores]) -> Scores:
    """Return stored scores; compute and store them if there are none."""
    if not file.exists():
        write_json(file, compute())
    found: Scores = json.loads(file.read_text(encoding="utf-8"))
    return found


def spread(values: list[float]) -> dict[str, Any]:
    """Return mean and standard deviation over seeds."""
    return {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None, "values": values}


def measure(out: Path, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    """Return the scores of all regimes and rows."""
    out.mkdir(parents=True, exist_ok=True)
    data = enfold.data.load("fashion-mini")
    target = half(data, TARGET, EXAMPLES)
    tables: dict[str, Any] = {}
    checks: dict[str, Any] = {}
    for regime in REGIMES:
        rows: dict[str, list[Scores]] = {name: [] for name in (*OTHERS, *MERGES)}
        found = []
        for seed in seeds:
            base = make_base(out, seed, data)
            members = make_members(out, seed, regime, base, target)
            folder = out / f"{regime}-{seed}"
            folder.mkdir(exist_ok=True)
            found.append(cell(folder / "basin.json", lambda: barriers(members, target)))  # noqa: B023 - called here
            config = tuning(seed, regime, 0)
            for name, cells in rows.items():
                file = folder / f"{name.replace(' ', '-').replace(',', '')}.json"
                cells.append(cell(file, lambda: row(name, members, base, target, config)))  # noqa: B023 - called here
                print(regime, seed, name, {key: round(value, 4) for key, value in cells[-1].items()}, flush=True)
        tables[regime] = {
            name: {metric: spread([each[metric] for each in cells]) for metric in cells[0]}
            for name, cells in rows.items()
        }
        checks[regime] = {name: spread([each[name] for each in found]) for name in found[0]}
        apart = [make_members(out, seed, regime, make_base(out, seed, data), target)[0] for seed in seeds]
        checks[f"{regime}, of different networks"] = cell(out / f"{regime}-basin.json", lambda: barriers(apart, target))  # noqa: B023 - called here
    return {
        "command": "python -m studies.finetuned.merges OUT",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "seeds": list(seeds),
        "network": NETWORK,
        "regimes": {name: list(rates) for name, rates in REGIMES.items()},
        "basin": checks,
        "tables": tables,
    }


def finetuned_table(record: Mapping[str, Any]) -> str:
    """Return the scores as a Markdown table; merges are ordered by their NLL."""
    (rows,) = record["tables"].values()
    merges = sorted((name for name in rows if name not in OTHERS), key=lambda name: rows[name]["nll"]["mean"])
    formats = [metric_format(metric) for metric in METRICS]
    lines = [["", *(heading for heading, _, _ in formats)]]
    for name in (*OTHERS, *merges):
        values = [
            format_spread(rows[name][metric], scale, digits)
            for metric, (_, scale, digits) in zip(METRICS, formats, strict=True)
        ]
        lines.append([name, *values])
    return make_table(lines)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    write_json(RESULT, measure(Path(sys.argv[1])))
