"""Tables of single measurements: networks of other packages, merges by width, the speed of efficient ensembles."""

from __future__ import annotations

import re
from collections.abc import Mapping

from studies.markdown import Content, format_spread, make_table

MERGED = {  # label for M members: heading
    "mean member": "one member",
    "control-2": "best member, trained equally long",
    "ensemble of {}": "ensemble",
    "average-{}": "average",
    "matched-{}": "matched",
    "matched-repair-{}": "matched, REPAIR",
    "perm-avg-{}": "permAVG",
    "route-{}": "matched, REPAIR, distilled",
}
HALFWAY = ("average-2", "matched-2", "matched-repair-2", "perm-avg-2", "route-2")  # between two members
SPEED = {  # four members: table and case
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


def third_party_table(content: Content) -> str:
    """Return one line for each network."""
    heads = ["network", "package", "other fixed axes", "parameters", "groups", "permuted (%)", "difference", "s"]
    lines = [heads]
    for name, row in content["networks"].items():
        texts = [name, f"{row['package']} {row['version']}"]
        if "refused" in row or not row["groups"]:
            why = row.get("refused") or row["note"] or _kinds(row["fixed"])
            lines.append([*texts, f"none found: {why}", f"{row['parameters']:,}", "0", "0", "-", "-"])
        else:
            figures = [f"{row['parameters']:,}", str(row["groups"]), f"{100 * row['share']:.1f}"]
            lines.append([*texts, _kinds(row["fixed"]), *figures, f"{row['difference']:.0e}", f"{row['seconds']:.1f}"])
    return make_table(lines, left=3)


def merging_table(content: Content) -> str:
    """Return the accuracy of merges of two and of four networks, then the barrier between two."""
    networks = content["networks"]
    parts = []
    for size in (2, 4):
        lines = [[f"M = {size}: accuracy (%)", *MERGED.values()]]
        for name, found in networks.items():
            rows = {
                f"ensemble of {size}": found["rows"]["ensemble"],
                **found["rows"],
            }  # all members, or the first ones by name
            scores = (rows.get(pattern.format(size)) for pattern in MERGED)
            lines.append([name, *(format_spread(row and row["accuracy"], 100, 1) for row in scores)])
        parts.append(make_table(lines))
    merges = {pattern.format(2): name for pattern, name in MERGED.items()}
    lines = [["barrier (points)", *(name for label, name in merges.items() if label in HALFWAY)]]
    for name, found in networks.items():
        lines.append(
            [name, *(format_spread(found["barriers"].get(label), 100, 1) for label in merges if label in HALFWAY)]
        )
    return "\n".join([*parts, make_table(lines)])


def clipping_table(content: Content) -> str:
    """Return one line for each training setting: accuracy of the average, softness and conditioning of the matrices."""
    heads = ["permAVG as published, 2 members", "accuracy (%)", "NLL", "softness", "largest condition number"]
    kinds = (("accuracy", 100, 1), ("nll", 1, 3), ("softness", 1, 2), ("condition", 1, 0))
    settings = content["settings"].items()
    return make_table(
        [heads, *([name, *(format_spread(found[key], *how) for key, *how in kinds)] for name, found in settings)]
    )


def speed_table(content: Content) -> str:
    """Return ratios to one network: BatchEnsemble and a loop (quartiles), then medians of all efficient ensembles."""
    tables = content["tables"]
    lines = [["BatchEnsemble, M = 4", "enfold", "a Python loop over 4 networks"]]
    for name, (place, case) in SPEED.items():
        lines.append([name, _quartiles(tables[place][case]), _quartiles(tables[place].get("python loop"))])
    methods = dict.fromkeys(case for task in TASKS for case in tables[task] if case != "one network")
    every = [["M = 4", *(task.replace("mlp", "MLP").replace("cnn", "CNN") for task in TASKS)]]
    for method in methods:
        medians = (tables[task].get(method) for task in TASKS)
        every.append([method, *("-" if found is None else f"{found['median']:.2f}" for found in medians)])
    return f"{make_table(lines)}\n{make_table(every)}"


def _quartiles(found: Content | None) -> str:
    return "-" if found is None else f"{found['median']:.2f} ({found['lower']:.2f} to {found['upper']:.2f})"


def _kinds(fixed: Mapping[str, int]) -> str:
    """Return the reasons that are specific to a network, without the names of its modules."""
    kinds: dict[str, int] = {}
    for reason, count in fixed.items():
        kind = re.sub(r" in ('[^']*'|the network itself)", "", reason).removeprefix("of ")
        if kind.startswith("aten.") and kind.endswith("decides by a value"):
            kind = "a module decides by a value"
        kind = kind.replace("aten.arange", "numbers in order")
        if not reason.startswith(("they are the", "the network's inputs")):
            kinds[kind] = kinds.get(kind, 0) + count
    return ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
