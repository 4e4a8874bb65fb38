"""Tables of permAVG: every number of members and layers, on two data sets, with two kinds of members."""

from __future__ import annotations

from collections.abc import Iterator

from cells import METRICS, Content, both_of, table
from enfold.report.reproduced import MARKS

GRID = "permavg-table"  # rows of every number of members, in runs called DATA-LAYERS, or DATA-LAYERS-brief
SIZES = range(2, 7)
METHODS = {  # of a grid: the row of so many members, and what it is called
    "ensemble of {}": "ensemble",
    "mean member of ensemble of {}": "a member",
    "perm-avg-{}": "permAVG",
    "perm-avg-best-{}": "permAVG at its best",
    "kd-{}": "student",
    "average-tuned-{}": "plain average, trained on",
    "matched-distilled-{}": "matched average, distilled",
}
ONE_SEED = "¹"
KINDS = {"": "converged members", "-brief": "briefly trained members"}
COMPARED = {  # permAVG of two and of six, and what it is held against
    "mean member of ensemble of 6": "a member",
    "control": "a member, trained on",
    "ensemble of 6": "ensemble of 6",
    "perm-avg-2": "as published, of 2",
    "perm-avg-6": "as published, of 6",
    "perm-avg-best-2": "at its best, of 2",
    "perm-avg-best-6": "at its best, of 6",
    "kd-6": "student of 6",
    "matched-distilled-6": "matched average of 6, distilled",
    "average-tuned-6": "plain average of 6, trained on",
}


def grid_rows(content: Content) -> str:
    """A table for each data set, kind of members and metric: layers and methods by numbers of members."""
    tables = []
    for data, kind, runs in _grids(content):
        for metric in ("accuracy", "nll"):
            heading = METRICS[metric][0]
            found = {row["label"]: row["metrics"].get(metric) for row in content["rows"]}
            lines = [["layers", f"{heading}: ours (published)", *(f"M = {size}" for size in SIZES)]]
            for run, layers in runs.items():
                for pattern, method in METHODS.items():
                    cells = [both_of(found.get(f"{run}/{pattern.format(size)}"), metric) for size in SIZES]
                    if any(cell != "-" for cell in cells):
                        lines.append([layers, method, *cells])
            if len(lines) == 1:
                continue
            controls = [f"{n} layers {both_of(found.get(f'{run}/control'), metric)}" for run, n in runs.items()]
            seeds = [
                f"{n} layers {len(content['runs'][run].get('seeds', content['seeds']))}" for run, n in runs.items()
            ]
            tables.append(
                f"**{data}, {KINDS[kind]}**; seeds: {', '.join(seeds)}; {heading} of a member trained on: "
                f"{', '.join(controls)}\n\n"
                f"{table(lines, left=2)}"
            )
    return "\n".join(tables)


def grid_claims(content: Content) -> str:
    """One line a sentence, with a mark for each run that it is said of."""
    said: dict[str, dict[str, str]] = {}
    for claim in content["claims"]:
        run, _, sentence = claim["says"].partition(": ")
        alone = len((claim.get("difference") or {}).get("values", [])) == 1
        said.setdefault(sentence, {})[run] = MARKS[claim["verdict"]] + ONE_SEED * alone
    runs = list(content["runs"])
    lines = [["", *runs], *([sentence, *(marks.get(run, "") for run in runs)] for sentence, marks in said.items())]
    legend = ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
    once = f"{ONE_SEED} of one seed, so that the interval is over test examples alone"
    return f"{legend}; {once}; differences and intervals are in the JSON file.\n\n{table(lines)}"


def _grids(content: Content) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Data set, kind of members, and the runs of them with the number of layers of each."""
    grids: dict[tuple[str, str], dict[str, str]] = {}
    for run in content["runs"]:
        kind = "-brief" if run.endswith("-brief") else ""
        data, _, layers = run.removesuffix(kind).rpartition("-")
        grids.setdefault((data, kind), {})[run] = layers
    for (data, kind), runs in grids.items():
        yield data, kind, runs


def scaling_of(content: Content) -> str:
    """Accuracy and NLL of permAVG of two and of six, a line for each data set and number of layers."""
    found = {row["label"]: row["metrics"] for row in content["rows"]}
    parts = []
    for kind, members in KINDS.items():
        lines = [[f"accuracy (%) / NLL, {members}", *COMPARED.values()]]
        for data, own, runs in _grids(content):
            if own == kind:
                lines += [
                    [f"{data}, {layers} layers", *(_pair(found.get(f"{run}/{label}")) for label in COMPARED)]
                    for run, layers in runs.items()
                ]
        if any("/" in cell for line in lines[1:] for cell in line):
            parts.append(table(lines))
    return "\n".join(parts)


def _pair(metrics: Content | None) -> str:
    found = [(metrics or {}).get(metric) for metric in ("accuracy", "nll")]
    means = [each["ours"]["mean"] for each in found if each and each["ours"]]
    return f"{100 * means[0]:.2f} / {means[1]:.3f}" if len(means) == len(found) else "-"
