"""Measured results of a method: its rows in the stored results of the project."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from enfold.registry import Method

ROOT = Path(__file__).parents[2]
FORMER = {"distill": "kd", "proxy_en_d2": "proxy_end2", "mixture_ensembles": "mixture_ensemble"}
"""Names of methods in records that were made before they were renamed."""
REFERENCES = ("mean member", "ensemble", "control")
FINE_TUNED = {
    "average": "average",
    "soup": "soup",
    "WiSE-FT": "wise_ft",
    "Model Stock": "model_stock",
    "Fisher": "fisher",
    "RegMean": "regmean",
    "task arithmetic": "task_arithmetic",
    "TIES": "ties",
    "DARE": "dare",
    "spherical mean": "slerp",
    "changes of rank": "lora",
    "REPAIR": "repair",
}
"""Methods of the rows of the study of fine-tuned members, by the beginning of their names."""
COLUMNS = (("accuracy", "accuracy (%)", 100, 2), ("nll", "NLL (nats)", 1, 3), ("ece", "ECE (%)", 100, 2))
SPEED = {
    "mlp, train": "MLP, training step",
    "mlp, infer": "MLP, prediction",
    "cnn, train": "CNN, training step",
    "cnn, infer": "CNN, prediction",
}
"""Titles of the tables of times that have a row for each method."""


@dataclass(frozen=True)
class Table:
    """The rows of a record that belong to one method, and those that they are compared with."""

    file: str
    title: str
    command: str
    rows: dict[str, dict[str, Any]]


def section(method: Method) -> str:
    """Return all rows of a method as Markdown."""
    parts = [_markdown(table) for table in tables(method)]
    parts += [speed] if (speed := speed_of(method)) else []
    return "\n\n".join(parts) or "No stored result has a row of this method."


def tables(method: Method) -> Iterator[Table]:
    """Yield the rows of a method from every record that has some."""
    for file, title, command, labels, rows in records():
        own = [label for label in rows if method.name in labels.get(label, ())]
        if own:
            shown = [each for each in REFERENCES if each in rows and each not in own]
            yield Table(file, title, command, {each: rows[each] for each in [*shown, *own]})


@cache
def records() -> list[tuple[str, str, str, dict[str, set[str]], dict[str, dict[str, Any]]]]:
    """Return file, title, command, the methods of each row, and the scores of each row of all records."""
    found: list[tuple[str, str, str, dict[str, set[str]], dict[str, dict[str, Any]]]] = []
    for path in sorted([*ROOT.glob("results/*.json"), *ROOT.glob("studies/*/results/*.json")]):
        record = json.loads(path.read_text(encoding="utf-8"))
        for part in [record, *_parts(record)]:
            if isinstance(part.get("recipe"), dict) and isinstance(part.get("rows"), dict):
                rows = {label: row["scores"] for label, row in part["rows"].items() if "scores" in row}
                command = record.get("command", "")
                found.append((_name(path), _title(part), command, _methods(part["recipe"]), rows))
    path = ROOT / "studies/finetuned/results/finetuned-merges.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    for rows in record["tables"].values():
        labels = {row: {name for start, name in FINE_TUNED.items() if row.startswith(start)} for row in rows}
        title = f"Members fine-tuned from one network, fashion-mini, {len(record['seeds'])} seeds"
        found.append((_name(path), title, record["command"], labels, rows))
    return found


def _parts(record: dict[str, Any]) -> list[dict[str, Any]]:
    networks = record.get("networks", {})
    return [each for each in networks.values() if isinstance(each, dict)] if isinstance(networks, dict) else []


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _title(record: dict[str, Any]) -> str:
    """Return data, network, members and seeds of a record in a few words."""
    recipe = record["recipe"]
    data, network = recipe["data"], recipe["network"]
    network = {"name": network} if isinstance(network, str) else dict(network)
    options = ", ".join(f"{key} {_short(value)}" for key, value in network.items() if key != "name")
    size = f", {data['train_size']:,} images" if isinstance(data.get("train_size"), int) else ""
    described = f"{network['name']}{f' ({options})' if options else ''}"
    return f"{data['source']}{size}, {described}, M = {recipe['members']}, {len(record['seeds'])} seeds"


def _short(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def _methods(recipe: Any) -> dict[str, set[str]]:
    """Return the methods of each label of a recipe: of the step, and of its perturbation."""
    found: dict[str, set[str]] = {}
    if isinstance(recipe, dict):
        if isinstance(recipe.get("label"), str) and "method" in recipe:
            perturb = recipe.get("perturb")
            names = [recipe["method"], perturb["method"] if isinstance(perturb, dict) else perturb]
            found[recipe["label"]] = {FORMER.get(name, name) for name in names if name}
        for value in recipe.values():
            found |= _methods(value)
    elif isinstance(recipe, list):
        for value in recipe:
            found |= _methods(value)
    return found


def _markdown(table: Table) -> str:
    present = [each for each in COLUMNS if any(each[0] in row for row in table.rows.values())]
    lines = [
        f"{table.title} ([{Path(table.file).name}](../../../{table.file})):",
        "",
        f"| | {' | '.join(heading for _, heading, _, _ in present)} |",
        f"| --- |{' ---: |' * len(present)}",
    ]
    for label, scores in table.rows.items():
        cells = [_value(scores.get(key), scale, digits) for key, _, scale, digits in present]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _value(score: Any, scale: float, digits: int) -> str:
    if score is None:
        return "-"
    if not isinstance(score, dict):
        return f"{scale * score:.{digits}f}"
    return f"{scale * score['mean']:.{digits}f} ± {scale * score['std']:.{digits}f}"


def speed_of(method: Method) -> str:
    """Return the times of an ensemble relative to one network, if they were measured."""
    if method.kind != "ensemble":
        return ""
    record = json.loads((ROOT / "results/bench-efficient-ensembles.json").read_text(encoding="utf-8"))
    times = {name: record["tables"][name] for name in SPEED}
    cells = {name: rows[method.name]["median"] for name, rows in times.items() if method.name in rows}
    if not cells:
        return ""
    lines = [
        f"Time relative to one network, four members, batch 128, {record['threads']} CPU threads "
        "([bench-efficient-ensembles.json](../../../results/bench-efficient-ensembles.json)):",
        "",
        f"| {' | '.join(SPEED[name] for name in cells)} |",
        f"|{' ---: |' * len(cells)}",
        f"| {' | '.join(f'{value:.2f}' for value in cells.values())} |",
    ]
    return "\n".join(lines)
