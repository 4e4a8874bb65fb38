"""Tables of what is measured once: networks of other packages, merges by width, the speed of shares."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cells import Content, spread, table

MERGED = {  # of so many members: the row, and what it is called
    "mean member": "a member",
    "control-2": "the best one, trained on as long",
    "ensemble of {}": "ensemble",
    "average-{}": "average",
    "matched-{}": "matched",
    "matched-repair-{}": "matched, REPAIR",
    "perm-avg-{}": "permAVG",
    "route-{}": "matched, REPAIR, distilled",
}
HALFWAY = ("average-2", "matched-2", "matched-repair-2", "perm-avg-2", "route-2")  # between two members
SPEED = {  # of four members: the table and the case
    "MLP 784-256-256-10, training step, batch 128": ("mlp, train, batch 128", "repeated batch"),
    "the same, written by hand with autograd": ("mlp, train, batch 128", "factors by hand"),
    "the same, batch split among the members": ("mlp, train, batch 128", "split batch"),
    "three convolutions with batch norm, training step, batch 128": ("cnn, train, batch 128", "repeated batch"),
    "the same, EnsembleBN": ("cnn, train, batch 128", "EnsembleBN"),
    "the same, joint batch norm": ("cnn, train, batch 128", "joint batch norm"),
    "the same, batch split": ("cnn, train, batch 128", "split batch"),
    "the same, inference": ("cnn, infer, batch 128", "BatchEnsemble"),
    "WideResNet-16-2, training step, batch 64": ("wrn-16-2, train, batch 64", "repeated batch"),
    "WideResNet-16-2, batch split": ("wrn-16-2, train, batch 64", "split batch"),
    "MLP, 10,000 rows by `predict`": ("mlp, 10,000 rows", "BatchEnsemble by predict"),
    "MC dropout, 4 samples, MLP": ("mlp, mc dropout", "MC dropout"),
}
TASKS = ("mlp, train", "mlp, infer", "cnn, train", "cnn, infer")


def foreign_of(content: Content) -> str:
    """One line a network."""
    heads = ["network", "package", "what else is fixed", "parameters", "groups", "permuted (%)", "difference", "s"]
    lines = [heads]
    for name, row in content["networks"].items():
        told = [name, f"{row['package']} {row['version']}"]
        if "refused" in row or not row["groups"]:
            why = row.get("refused") or row["note"] or _kinds(row["fixed"])
            lines.append([*told, f"none is found: {why}", f"{row['parameters']:,}", "0", "0", "-", "-"])
        else:
            figures = [f"{row['parameters']:,}", str(row["groups"]), f"{100 * row['share']:.1f}"]
            lines.append([*told, _kinds(row["fixed"]), *figures, f"{row['difference']:.0e}", f"{row['seconds']:.1f}"])
    return table(lines, left=3)


def merged_of(content: Content) -> str:
    """Accuracy of two and of four networks in one, a line a network; then what two of them lose."""
    networks = content["networks"]
    parts = []
    for size in (2, 4):
        lines = [[f"M = {size}: accuracy (%)", *MERGED.values()]]
        for name, found in networks.items():
            rows = {f"ensemble of {size}": found["rows"]["ensemble"], **found["rows"]}  # of all, or of some by name
            scores = (rows.get(pattern.format(size)) for pattern in MERGED)
            lines.append([name, *(spread(row and row["accuracy"], 100, 1) for row in scores)])
        parts.append(table(lines))
    merges = {pattern.format(2): name for pattern, name in MERGED.items()}
    lines = [["barrier (points)", *(name for label, name in merges.items() if label in HALFWAY)]]
    for name, found in networks.items():
        lines.append([name, *(spread(found["barriers"].get(label), 100, 1) for label in merges if label in HALFWAY)])
    return "\n".join([*parts, table(lines)])


def clipping_of(content: Content) -> str:
    """One line a way to learn: where the matrices end, and what the average is worth."""
    heads = ["permAVG as published, of 2", "accuracy (%)", "NLL", "softness", "largest condition number"]
    kinds = (("accuracy", 100, 1), ("nll", 1, 3), ("softness", 1, 2), ("condition", 1, 0))
    settings = content["settings"].items()
    return table([heads, *([name, *(spread(found[key], *how) for key, *how in kinds)] for name, found in settings)])


def speed_of(content: Content) -> str:
    """Ratios to one network: BatchEnsemble beside a loop with quartiles, then medians of every share."""
    tables = content["tables"]
    lines = [["BatchEnsemble, M = 4", "enfold", "a Python loop over 4 networks"]]
    for name, (place, case) in SPEED.items():
        lines.append([name, _quartiles(tables[place][case]), _quartiles(tables[place].get("python loop"))])
    shares = dict.fromkeys(case for task in TASKS for case in tables[task] if case != "one network")
    every = [["M = 4", *(task.replace("mlp", "MLP").replace("cnn", "CNN") for task in TASKS)]]
    for share in shares:
        medians = (tables[task].get(share) for task in TASKS)
        every.append([share, *("-" if found is None else f"{found['median']:.2f}" for found in medians)])
    return f"{table(lines)}\n{table(every)}"


def _quartiles(found: Content | None) -> str:
    return "-" if found is None else f"{found['median']:.2f} ({found['lower']:.2f} to {found['upper']:.2f})"


def _kinds(fixed: Mapping[str, int]) -> str:
    """Reasons that not every network has, without their places."""
    kinds: dict[str, int] = {}
    for reason, count in fixed.items():
        kind = re.sub(r" in ('[^']*'|the network itself)", "", reason).removeprefix("of ")
        if kind.startswith("aten.") and kind.endswith("decides by a value"):
            kind = "a module decides by a value"
        kind = kind.replace("aten.arange", "numbers in order")
        if not reason.startswith(("they are the", "the network's inputs")):
            kinds[kind] = kinds.get(kind, 0) + count
    return ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
