"""Results of a setting from its cells, and their tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from enfold.train import TrainConfig
from studies.compress.rows import ROWS
from studies.compress.run import slug
from studies.compress.settings import SETTINGS
from studies.markdown import format_spread, make_table

METRICS = ("accuracy", "nll", "cnll")
SHOWN = {"accuracy": ("accuracy (%)", 100, 1), "nll": ("NLL", 1, 3), "cnll": ("cNLL", 1, 3)}
RESULTS = Path(__file__).parent / "results"

Record = dict[str, Any]


def summarize(name: str, folder: Path) -> Record:
    """Return the results of a setting: each row over the seeds that have it, with the gain recovered of each seed.

    Args:
        name: Name of the setting.
        folder: Where the cells are.
    """
    cells: dict[int, Record] = {}
    for each in sorted(folder.glob(f"{name}-*")):
        found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in each.glob("*.json")}
        if "references" in found:
            cells[int(each.name.rpartition("-")[2])] = found
    first = next(iter(cells.values()))["references"]
    setting = SETTINGS[name]
    record: Record = {
        "command": f"python -m studies.compress {name}",
        "title": setting.title,
        "network": setting.network,
        "members": setting.members.changes(),
        "students": setting.students,
        "date": first["date"],
        "versions": first["versions"],
        "machine": first["machine"],
        "seeds": sorted(cells),
        "rows": {},
    }
    for row in ("mean member", "member + temperature", "ensemble", *ROWS, "compress"):
        known = {seed: each for seed, each in cells.items() if row in REFERENCES or slug(row) in each}
        if known:
            record["rows"][row] = _row(row, known)
    return record


REFERENCES = ("mean member", "member + temperature", "ensemble")


def _row(row: str, cells: Mapping[int, Record]) -> Record:
    result: Record = {"seeds": sorted(cells)}
    for which in ("last", "best"):
        values: dict[str, list[float]] = {}
        for cell in cells.values():
            for metric, value in _scores(row, which, cell).items():
                values.setdefault(metric, []).append(value)
        result[which] = {metric: _spread(each) for metric, each in values.items()}
    if row not in REFERENCES:
        own = [cell[slug(row)] for cell in cells.values()]
        result["epochs"] = own[0].get("epochs")
        result["processor seconds"] = [each["processor seconds"] for each in own]
        if row == "compress":
            result["recommended"] = [each["name"] for each in own]
            result["trials"] = {str(seed): cell["compress"]["trials"] for seed, cell in cells.items()}
    return result


def _scores(row: str, which: str, cell: Record) -> dict[str, float]:
    """Return the scores on test examples with the gain recovered in each."""
    member, ensemble = cell["references"]["mean member"], cell["references"]["ensemble"]
    if row in REFERENCES:
        scores = dict(cell["references"]["ensemble" if row == "ensemble" else "mean member"])
        if row == "member + temperature":
            scores["nll"] = scores["cnll"]
    else:
        scores = cell[slug(row)][which]["test"]
    found = {metric: scores[metric] for metric in METRICS if metric in scores}
    gains = {f"gain {m}": (member[m] - found[m]) / (member[m] - ensemble[m]) for m in found}
    return found | gains


def _spread(values: list[float]) -> Record:
    return {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None, "values": values}


def compress_table(record: Mapping[str, Any]) -> str:
    """Return the table of a setting: scores, gains in percent after the last and the best epoch, and the cost."""
    rows = record["rows"]
    metrics = [metric for metric in METRICS if metric in rows["ensemble"]["last"]]
    titles = [SHOWN[metric][0] for metric in metrics]
    short = " / ".join(title.removesuffix(" (%)") for title in titles)
    lines = [["", *titles, f"gain in {short} (%), last epoch", "best epoch", "seconds", "seeds"]]
    for name, row in rows.items():
        values = [format_spread(row["last"][metric], *SHOWN[metric][1:]) for metric in metrics]
        columns = {"ensemble": "", "mean member": "", "member + temperature": "last", "compress": "best"}.get(
            name, "last best"
        )
        percent = [_gains(row[which], metrics) if which in columns else "" for which in ("last", "best")]
        seconds = row.get("processor seconds")
        lines.append([name, *values, *percent, f"{fmean(seconds):.0f}" if seconds else "", str(len(row["seeds"]))])
    return make_table(lines)


CHOSEN = {  # by setting, what the docs quote: a name for readers, the row, and the control of the same length
    "mlp": ("MLPs, Fashion-MNIST", "cutmix or mixup 2x", "control 2x"),
    "cnn": ("CNNs, fashion-mini", "cutmix or mixup 8x", "control 8x"),
    "resnet": ("residual networks, CIFAR-10", "cutmix 2x", "control"),
    "finetuned": ("fine-tuned from one network", "distill", "control"),
    "friedman": ("tabular regression", "mixup 2x", "control"),
}


def recovered_table(load: Callable[[str], Mapping[str, Any]]) -> str:
    """Return one line for each setting: the gain in NLL and cNLL that one network and the control recover.

    Args:
        load: Function that returns the results of a setting.
    """
    lines = [["members", "one network", "epochs", "NLL (%)", "cNLL (%)", "control, NLL / cNLL (%)", "seconds"]]
    for setting, (title, name, control) in CHOSEN.items():
        record = load(setting)
        row, other = record["rows"][name], record["rows"][control]
        length = row["epochs"] / TrainConfig().update(record["members"] | {"task": None}).epochs
        gains = [format_spread(row["last"][f"gain {metric}"], 100, 0) for metric in ("nll", "cnll")]
        seconds = f"{fmean(row['processor seconds']):.0f}"
        plain = name.removesuffix(f" {length:g}x")
        lines.append([title, plain, f"{length:g}x", *gains, _gains(other["last"], ["nll", "cnll"]), seconds])
    return make_table(lines)


def _gains(values: Mapping[str, Any], metrics: list[str]) -> str:
    """Return the gain recovered in each metric in percent, mean ± standard deviation."""
    return " / ".join(format_spread(values[f"gain {metric}"], 100, 0) for metric in metrics)
